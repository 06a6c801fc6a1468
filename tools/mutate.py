"""Change lines of the library at random, one at a time, and see whether the tests notice.

    python tools/mutate.py [N] [SEED]       # N changes (10), the same for the same seed

Each change is made in a clone of the last commit, in the module and in its notebook. The tests that the
module touches run first, then all, and they stop at the first that fails. One that no test notices is
shown, for somebody to read: it may be a promise that nothing holds, or a line that costs more than it is
worth.
"""
import ast, os, random, subprocess, sys, tempfile
from pathlib import Path
from changed import HOUSE, NONE_CHOSEN, touched
from size import modules, package, root

OPERATORS = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
             ast.LtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
             ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.And: ast.Or, ast.Or: ast.And}


def other(o):
    "A node to put in the place of `o`, or None"
    if isinstance(o, ast.Constant) and isinstance(o.value, bool): return ast.Constant(not o.value)
    if isinstance(o, ast.Constant) and isinstance(o.value, int): return ast.Constant(o.value+1)
    if isinstance(o, ast.Compare) and type(o.ops[0]) in OPERATORS:
        return ast.Compare(o.left, [OPERATORS[type(o.ops[0])](), *o.ops[1:]], o.comparators)
    if isinstance(o, ast.BinOp) and type(o.op) in OPERATORS:
        return ast.BinOp(o.left, OPERATORS[type(o.op)](), o.right)
    if isinstance(o, ast.BoolOp): return ast.BoolOp(OPERATORS[type(o.op)](), o.values)
    if isinstance(o, ast.UnaryOp) and isinstance(o.op, ast.Not): return o.operand
    if isinstance(o, ast.Return) and o.value: return ast.Return(ast.Constant(None))
    if isinstance(o, ast.Expr) and isinstance(o.value, ast.Call): return ast.Pass()
    if isinstance(o, ast.If): return ast.If(ast.UnaryOp(ast.Not(), o.test), o.body, o.orelse)


def mutants(path):
    "All changes that can be made to a module: `(path, first line, position, new text)`"
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    def at(line, column): return sum(map(len, lines[:line-1])) + len(lines[line-1].encode()[:column].decode())
    for o in ast.walk(ast.parse(source)):
        new = other(o)
        if new is None: continue
        if isinstance(o, ast.If):       # its condition alone
            o, new = o.test, new.test
        text = ast.unparse(ast.fix_missing_locations(new))
        if isinstance(o, ast.expr): text = f'({text})'
        yield path, o.lineno, (at(o.lineno, o.col_offset), at(o.end_lineno, o.end_col_offset)), text


def first_failure(tree, *which, select='not full', python=sys.executable):
    "Run these tests of `tree`; return the line of the first that fails, or None"
    ask = [python, '-m', 'pytest', *which, '-m', select, '-q', '-x', '-n', '4', '--dist', 'loadfile',
           '--no-loadscope-reorder', '--ignore=tests/test_sync.py', '--ignore=tests/test_style.py']
    env = {**os.environ, 'PYTHONPATH': f'{tree}:{tree}/tests'}
    run = subprocess.run(ask, cwd=tree, env=env, capture_output=True, text=True)
    if run.returncode in (0, NONE_CHOSEN): return None
    return next((o for o in run.stdout.splitlines() if o.startswith(('FAILED', 'ERROR'))), run.stdout[-300:])


def main(n=10, seed=0):
    all_of_them = [m for p in modules() for m in mutants(p)]
    missed = []
    for path, line, (start, end), text in random.Random(int(seed)).sample(all_of_them, int(n)):
        with tempfile.TemporaryDirectory() as d:
            subprocess.run(['git', 'clone', '-q', root, d], check=True)
            source = path.read_text()
            (Path(d)/path.relative_to(root)).write_text(source[:start] + text + source[end:])
            update = Path(sys.executable).parent/'nbdev-update'
            subprocess.run([update, '--fname', path.relative_to(root)], cwd=d, check=True)
            where = f'{path.relative_to(package)}:{line}  {source[start:end]!r} -> {text!r}'
            if path.parent.name == 'fastai1':
                seen = first_failure(d, 'tests/v1', python=root/'.venv-v1/bin/python')
            else:
                near = [o for o in touched([f'{path.relative_to(root)}']) if o not in HOUSE]
                own = [o for o in near if 'test_notebook[' in o]    # also where it is one of the long tests
                seen = own and first_failure(d, *own, select='') or first_failure(d, *near)
                seen = seen or first_failure(d, 'tests', '--ignore=tests/v1')
        print(where, '\n   ', seen or 'NOT NOTICED', flush=True)
        if not seen: missed.append(where)
    print(f'{int(n)-len(missed)} of {n} noticed')


if __name__ == '__main__': main(*sys.argv[1:])
