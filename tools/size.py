"""Count the package: tokens, modules, lines, private functions, and the modules that one fit runs.

    python tools/size.py            the table
    python tools/size.py --folders  tokens and modules of each folder, too
    python tools/size.py --fit      also the modules that run in one `distrib_fit_one_cycle(1)`
"""
import argparse, ast, collections, io, os, subprocess, sys, tempfile, tokenize
from pathlib import Path

root = Path(__file__).resolve().parent.parent
package = root/'fastddp'
ANNEXES = ('machines', 'cluster', 'fastai1', 'magics.py')      # everything else is the core
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENCODING, tokenize.ENDMARKER}


def modules(folder=package):
    "The package's modules: all files but those that are generated or empty"
    return [o for o in sorted(folder.rglob('*.py')) if o.name != '_modidx.py' and o.stat().st_size]


def is_annex(path): return path.relative_to(package).parts[0] in ANNEXES


def docstrings(tree):
    "The positions of all docstrings: `{(line, column)}`"
    with_doc = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    firsts = [o.body[0] for o in ast.walk(tree) if isinstance(o, with_doc) and o.body]
    values = [o.value for o in firsts if isinstance(o, ast.Expr)]
    values = [o for o in values if isinstance(o, ast.Constant)]
    return {(o.lineno, o.col_offset) for o in values if isinstance(o.value, str)}


def tokens(source):
    "How many tokens `source` has, without layout, comments and docstrings"
    docs = docstrings(ast.parse(source))
    return sum(o.type not in LAYOUT and o.start not in docs
               for o in tokenize.generate_tokens(io.StringIO(source).readline))


def functions(tree):
    return [o for o in ast.walk(tree) if isinstance(o, (ast.FunctionDef, ast.AsyncFunctionDef))]


def names_used(tree):
    "Each name that `tree` mentions, once for each time: names, attributes, and imported names"
    for o in ast.walk(tree):
        if isinstance(o, ast.Name): yield o.id
        elif isinstance(o, ast.Attribute): yield o.attr
        elif isinstance(o, ast.ImportFrom): yield from (a.name for a in o.names)


def private_and_used_once(sources):
    "How many functions begin with `_` (no dunder) and are mentioned at most once elsewhere"
    trees = [ast.parse(o) for o in sources]
    used = collections.Counter(n for t in trees for n in names_used(t))
    names = [f.name for t in trees for f in functions(t)]
    return sum(used[o] <= 1 for o in names if o.startswith('_') and not o.startswith('__'))


# As `sitecustomize.py` on `PYTHONPATH` it runs first in the notebook's process and in the helper
# that forks the workers
NOTE = """
import os, sys, threading
ran, _exit = set(), os._exit
def note(frame, event, arg):
    code = frame.f_code
    if event == 'call' and code.co_filename.startswith({package!r}) and code.co_name != '<module>':
        ran.add(code.co_filename[len({package!r})+1:])
def begin():
    ran.clear()
    sys.setprofile(note)
    threading.setprofile(note)
def write(status=0):
    sys.setprofile(None)
    role = 'notebook' if {me!r} == str(os.getppid()) else 'rank'
    path = os.path.join({folder!r}, f'{{role}}-{{os.getpid()}}')
    with open(path, 'w') as f: f.write('\\n'.join(sorted(ran)))
def leave(status):
    write()
    _exit(status)
os._exit = leave
os.register_at_fork(after_in_child=begin)
"""

FIT = """
import os, sitecustomize, torch
from fastai.basics import *
from fastai.callback.schedule import *
from fastddp.all import *
x = torch.randn(64, 3)
items = list(zip(x, x.sum(1, keepdim=True)))
dls = DataLoaders.from_dsets(items, items, bs=8)
learn = Learner(dls, nn.Linear(3, 1), loss_func=MSELossFlat(), metrics=mae)
sitecustomize.begin()
learn.distrib_fit_one_cycle(1, nprocs=2)
sitecustomize.write()
"""


def passed_through():
    "The modules of which functions run in one fit: `(in the notebook's process, on ranks)`"
    with tempfile.TemporaryDirectory() as folder:
        note = NOTE.format(package=str(package), folder=folder, me=str(os.getpid()))
        Path(folder, 'sitecustomize.py').write_text(note)
        path = os.pathsep.join([folder, str(root), os.environ.get('PYTHONPATH', '')])
        env = {**os.environ, 'PYTHONPATH': path, 'TMPDIR': folder, 'CUDA_VISIBLE_DEVICES': ''}
        subprocess.run([sys.executable, '-c', FIT], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, cwd=folder, env=env)
        found = {'notebook': set(), 'rank': set()}
        for o in Path(folder).glob('*-*'):
            role = o.name.split('-')[0]
            if role in found: found[role] |= set(o.read_text().split())
    return found['notebook'], found['rank']


def table(with_fit=False):
    "What the package counts: `(what, all of it, the core)`"
    sources = {o: o.read_text(encoding='utf-8') for o in modules()}
    core = [o for o in sources if not is_annex(o)]
    counted = {o: tokens(s) for o, s in sources.items()}
    lines = {o: s.count('\n') for o, s in sources.items()}
    long = {o: sum(len(x) > 100 for x in s.split('\n')) for o, s in sources.items()}
    rows = [('tokens', sum(counted.values()), sum(counted[o] for o in core)),
            ('modules', len(sources), len(core)),
            ('lines', sum(lines.values()), sum(lines[o] for o in core)),
            ('lines of the longest module', max(lines.values()), max(lines[o] for o in core)),
            ('lines over 100 columns', sum(long.values()), sum(long[o] for o in core)),
            ('private functions named once', private_and_used_once(sources.values()),
             private_and_used_once([sources[o] for o in core]))]
    if with_fit:
        notebook, rank = passed_through()
        rows.append(('modules that run in one fit', len(notebook | rank), f'{len(notebook)} here'))
    return rows


def folders():
    "Tokens and modules of each folder: `(folder, tokens, modules)`"
    found = collections.defaultdict(list)
    for o in modules():
        folder = o.relative_to(package).parent.as_posix()
        found[folder].append(tokens(o.read_text(encoding='utf-8')))
    return [(name, sum(o), len(o)) for name, o in sorted(found.items())]


def main(args=None):
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    p.add_argument('--folders', action='store_true')
    p.add_argument('--fit', action='store_true')
    args = p.parse_args(args)
    rows = [('', 'all', 'core'), *table(args.fit)]
    if args.folders: rows += [('', '', ''), ('folder', 'tokens', 'modules'), *folders()]
    for what, everything, core in rows: print(f'{what:32}{everything:>10}{core:>12}')


if __name__ == '__main__': main()
