"""The notebooks and tests that a change touches, for `make test-changed`.

    python tools/changed.py [REV]           # says which: what differs from REV (HEAD)
    python tools/changed.py REV ARG ...     # and runs them, with these arguments of pytest

A module stands for its notebook, and the other way round. A test is touched if it is changed
itself, if it is named like a changed module, or if it, or a helper that it imports, imports or names
what is changed; with a module come the tests of the promise for which its folder answers.
"""
import re, subprocess, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
# These hold what every module, notebook and text has to be like.
HOUSE = ['tests/test_floors.py', 'tests/test_style.py', 'tests/test_sync.py', 'tests/test_repo.py']
# Every test runs with these.
ALL = {'tests/conftest.py', 'tests/traces.py', 'tests/spread.py', 'pytest.ini'}
# What a folder of the library answers for, beside the tests of its modules
PROMISES = dict(fastai2='same_answer', shard='same_answer', payload='comes_back', process='faults',
                launch='faults')
NONE_CHOSEN = 5     # says pytest: all of these are long
V1 = 'tests/v1/', 'nbs/fastai1/', 'nbs/tutorials/v1/', 'fastddp/fastai1/'


def git(*args):
    res = subprocess.run(['git', *args], cwd=root, capture_output=True, text=True, check=True)
    return res.stdout.splitlines()


def changed(rev='HEAD'):
    "Paths of files that differ from `rev`, and of those that git doesn't know yet"
    new = git('ls-files', '--others', '--exclude-standard')
    return sorted({*git('diff', '--name-only', '--no-renames', rev), *new})


def read(path): return (root/path).read_text(encoding='utf-8', errors='replace')


def module_of(path):
    "`folder/name` of the module that a notebook or a file of the library is; None for others"
    p = Path(path)
    if p.parts[0] == 'fastddp' and p.suffix == '.py':
        return Path(*p.parts[1:]).with_suffix('').as_posix()
    if p.parts[0] == 'nbs' and (m := re.match(r'\d+_(\w+)\.ipynb$', p.name)):
        return Path(*p.parts[1:-1], m[1]).as_posix()


def notebooks():
    return [o.relative_to(root).as_posix() for o in sorted((root/'nbs').rglob('*.ipynb'))
            if o.name != 'lesson.ipynb' and '.ipynb_checkpoints' not in o.parts]


def python_of_tests():
    return [o.relative_to(root).as_posix() for o in sorted((root/'tests').rglob('*.py'))]


def names_module(text, module):
    "Does `text` import or name `folder/name`?"
    folder, _, name = module.rpartition('/')
    dotted = re.escape(module.replace('/', '.'))
    if re.search(rf'\b{dotted}\b(?!\()|`{re.escape(module)}`', text): return True
    package = 'fastddp' + (f'.{folder}' if folder else '')
    found = re.findall(rf'from {re.escape(package)} import ([^\n;]*)', text)
    return any(re.search(rf'\b{name}\b', o) for o in found)


def is_test(path): return Path(path).name.startswith('test_')


def touched(paths):
    "pytest's arguments for `paths`: notebooks as tests of their own, then files of tests"
    if ALL & {*paths}: return ['tests']
    modules = {o for o in map(module_of, paths) if o}
    names = {Path(o).name for o in paths if not module_of(o)}
    texts = {o: read(o) for o in python_of_tests()}
    hit = {o for o in paths if o in texts}
    for path, text in texts.items():
        if any(names_module(text, o) for o in modules): hit.add(path)
        if any(o in text for o in names): hit.add(path)
        if any(Path(path).stem == f'test_{Path(o).name}' for o in modules): hit.add(path)
    todo = [o for o in hit if not is_test(o)]
    while todo:     # what imports or names a helper, and so on
        stem = Path(todo.pop()).stem
        uses = re.compile(rf'\b(import|from) (\w+, )*{stem}\b|\b{stem}\.(py|sh)\b')
        for path, text in texts.items():
            if path in hit or not uses.search(text): continue
            hit.add(path)
            if not is_test(path): todo.append(path)
    promises = {PROMISES.get(o.partition('/')[0]) for o in modules}
    hit |= {o for o in texts if Path(o).parent.name in promises}
    own = [o for o in notebooks() if o in paths or module_of(o) in modules]
    tests = {o for o in hit if is_test(o)} | {*(HOUSE if paths else [])}
    if 'tests/test_notebooks.py' in tests: own = []
    own = [f'tests/test_notebooks.py::test_notebook[{o}]' for o in own if not o.startswith(V1)]
    return own + sorted(o for o in tests if not o.startswith(V1))


def main(rev='HEAD', *args):
    paths = changed(rev)
    tests = touched(paths)
    print(*(tests or ['Nothing is touched.']), sep='\n', flush=True)
    if any(o.startswith(V1) for o in paths): print('and of fastai v1: make test-v1', flush=True)
    if not tests or not args: return 0
    code = subprocess.run([sys.executable, '-m', 'pytest', *tests, *args], cwd=root).returncode
    return 0 if code == NONE_CHOSEN else code


if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
