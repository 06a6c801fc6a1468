"""The house stands: imports point down, and each folder keeps out what does not belong there (CONTRIBUTING.md has the
table)."""
import ast, json, re, subprocess, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent

# Folders from the ground up, and what of ours each may import. Within a folder a notebook's number decides.
BELOW = {
    'base': (),
    'payload': ('base',),
    'output': ('base',),
    'shard': ('base',),
    'process': ('base', 'payload', 'output'),
    'launch': ('base', 'payload', 'output', 'shard', 'process'),
    # annexes: they stand on `launch`, and nothing but the front doors knows them
    'machines': ('base', 'payload', 'output', 'process', 'launch'),
    'cluster': ('base', 'payload', 'output', 'process', 'launch'),
    'fastai2': ('base', 'payload', 'output', 'shard', 'process', 'launch'),
    'fastai1': ('base', 'payload', 'output', 'shard', 'process', 'launch'),
    # the front doors
    '': ('base', 'payload', 'output', 'shard', 'process', 'launch', 'fastai2', 'fastai1', 'machines',
         'cluster')}
# What a folder, or a module of it, must never import. Longest name first: it alone decides.
KEEPS_OUT = {'base': ('fastai', 'multiprocessing', 'torch.distributed'),
             'base.group': ('fastai', 'multiprocessing'),
             **dict.fromkeys(('base.scoped', 'base.failure', 'base.errors'),
                             ('fastai', 'torch', 'multiprocessing', 'subprocess')),
             'payload': ('fastai', 'multiprocessing', 'torch.distributed'),
             'output': ('fastai', 'torch'), 'shard': ('fastai', 'torch.distributed'),
             'process': ('fastai', 'torch.distributed'), 'launch': ('fastai', 'torch.distributed'),
             'machines': ('fastai', 'torch.distributed'), 'machines.node': ('fastai',),
             'cluster': ('fastai', 'torch.distributed'), 'fastai2': ('fastai.distributed', 'torch.distributed'),
             'fastai1': ('fastai.distributed', 'torch.distributed', 'fastai.learner', 'fastai.data',
                         'fastai.torch_basics'),
             '': ('fastai', 'torch.distributed')}


def default_exp(path):
    "The module that the notebook at `path` is exported to, None if it has none"
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if m := re.match(r'#\|\s*default_exp\s+(\S+)', ''.join(cell['source'])): return m[1]


def folder(module): return module.rpartition('.')[0]


# module, e.g. 'base.group' -> its notebook's number
NUMBERS = {exp: p.name.split('_')[0] for p in sorted((root/'nbs').glob('**/[0-9]*.ipynb')) if (exp := default_exp(p))}
NO_FASTAI = [o for o in NUMBERS if 'fastai' in KEEPS_OUT[folder(o)] and folder(o)]


def imports(tree, module):
    "All modules that `tree`, the source of `module`, imports, wherever: `(dotted name, node)`"
    here = ['fastddp', *module.split('.')]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from ((o.name, node) for o in node.names)
        if isinstance(node, ast.ImportFrom):
            base = '.'.join([*(here[:-node.level] if node.level else ()), *filter(None, [node.module])])
            yield base, node
            yield from ((f'{base}.{o.name}', node) for o in node.names)


def at_top(tree):
    "The nodes of `tree` that run when the module is imported"
    def go(node):
        for o in ast.iter_child_nodes(node):
            yield o
            if not isinstance(o, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)): yield from go(o)
    return set(go(tree))


def dotted(node):
    "`a.b.c` of nested attributes, '' for anything else"
    if isinstance(node, ast.Name): return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)): return f'{base}.{node.attr}'
    return ''


def within(name, *packages): return any(name == o or name.startswith(o + '.') for o in packages)


def of_ours(name, modules):
    "The module of ours that `name` is, or is in; None for anybody else's"
    return next((o for o in sorted(modules, key=len, reverse=True) if within(name, f'fastddp.{o}')), None)


def may_import(module, other, modules):
    if folder(module) == folder(other): return modules[other] < modules[module]
    return folder(other) in BELOW[folder(module)]


def violations(module, source, modules=NUMBERS):
    "What the `source` of `module` does that its folder forbids"
    tree, found = ast.parse(source), set()
    top, out = at_top(tree), KEEPS_OUT.get(module, KEEPS_OUT[folder(module)])
    names = [*imports(tree, module), *((dotted(o), o) for o in ast.walk(tree) if isinstance(o, ast.Attribute))]
    for name, node in names:
        other = of_ours(name, modules)
        allowed = other in (None, module) or may_import(module, other, modules)
        if not allowed: found.add(f'{module} imports {other}')
        if bad := next((o for o in out if within(name, o)), None): found.add(f'{module} imports {bad}')
        if within(name, 'ray') and node in top: found.add('ray imported with the module')
    return sorted(found)


# What these say of CUDA is about CUDA: its settings, and variables that it reads
OF_CUDA = {'payload.pairs': {'torch.backends.cuda'}, 'payload.patches': {'cuda'}}


def kinds_named(module, source):
    "Where `source` names a kind of accelerator: `base.device` knows which one is there"
    nodes = list(ast.walk(ast.parse(source)))
    found = {dotted(o) for o in nodes if isinstance(o, ast.Attribute) and o.attr in ('cuda', 'xpu', 'is_cuda')}
    words = {o.value for o in nodes if isinstance(o, ast.Constant) and o.value in ('cuda', 'xpu', 'nccl', 'xccl')}
    return sorted((found | words)-OF_CUDA.get(module, set()))


@pytest.mark.parametrize('module', [o for o in NUMBERS if o != 'base.device'])
def test_no_other_module_names_a_kind_of_accelerator(module):
    source = (root/'fastddp'/f"{module.replace('.', '/')}.py").read_text(encoding='utf-8')
    found = kinds_named(module, source)
    assert found == (['nccl'] if module == 'base.group' else []), found     # where torch has no table of backends


def test_a_kind_that_is_named_is_found():
    source = "t.is_cuda and torch.cuda.x() or t.device.type == 'cuda'"
    assert kinds_named('launch.local', source) == ['cuda', 't.is_cuda', 'torch.cuda']


@pytest.mark.parametrize('module', NUMBERS)
def test_a_module_keeps_the_rules_of_its_folder(module):
    source = (root/'fastddp'/f"{module.replace('.', '/')}.py").read_text(encoding='utf-8')
    assert violations(module, source) == []


def test_notebooks_mirror_the_folders():
    found = {exp: p.parent.relative_to(root/'nbs') for p in sorted((root/'nbs').glob('**/[0-9]*.ipynb'))
             if (exp := default_exp(p))}
    assert {exp: str(p) for exp, p in found.items()} == {exp: folder(exp) or '.' for exp in found}
    numbers = [(n, list(BELOW).index(folder(exp))) for exp, n in NUMBERS.items()]
    assert sorted(numbers) == sorted(numbers, key=lambda o: (o[1], o[0])), 'notebooks are numbered from the ground up'
    assert len({n for n, _ in numbers}) == len(numbers)


HOUSE = {'base.errors': '00', 'base.group': '02', 'payload.pickling': '11', 'process.helper': '44', 'process.workers':
         '45', 'shard.sharded': '30', 'launch.local': '53', 'machines.ray': '60', 'fastai2.session': '84',
         'fastai2.learner': '86', 'fastai1.learner': '96'}

BAD = {
    ('process.workers', 'from ..fastai2.learner import snapshot'): 'process.workers imports fastai2.learner',
    ('process.workers', 'import fastddp.fastai2.learner'): 'process.workers imports fastai2.learner',
    ('process.workers', 'def f():\n    from ..launch.local import Local'): 'process.workers imports launch.local',
    ('process.workers', 'from ..launch import local'): 'process.workers imports launch.local',
    ('process.helper', 'from .workers import x'): 'process.helper imports process.workers',
    ('process.workers', 'from fastai.basics import *'): 'process.workers imports fastai',
    ('fastai2.session', 'def f(): import fastai.distributed'): 'fastai2.session imports fastai.distributed',
    ('process.workers', 'import torch.distributed as dist'): 'process.workers imports torch.distributed',
    ('process.workers', 'from torch import distributed'): 'process.workers imports torch.distributed',
    ('launch.local', 'import torch\ntorch.distributed.barrier()'): 'launch.local imports torch.distributed',
    ('launch.local', 'from ..machines import ray'): 'launch.local imports machines.ray',
    ('fastai2.session', 'def f(): from ..machines.ray import Ray'): 'fastai2.session imports machines.ray',
    ('machines.ray', 'from ..fastai2.session import x'): 'machines.ray imports fastai2.session',
    ('fastai1.learner', 'from ..fastai2.session import x'): 'fastai1.learner imports fastai2.session',
    ('fastai2.session', 'from ..fastai1 import learner'): 'fastai2.session imports fastai1.learner',
    ('fastai1.learner', 'from fastai.learner import Learner'): 'fastai1.learner imports fastai.learner',
    ('launch.local', 'import ray'): 'ray imported with the module'}


@pytest.mark.parametrize('module, source', BAD)
def test_the_rules_are_noticed(module, source): assert violations(module, source, HOUSE) == [BAD[module, source]]


def test_what_is_allowed():
    fine = {'process.workers': 'from ..base.errors import x\nfrom ..payload import pickling\nfrom . import '
                               'helper\nimport torch, multiprocessing',
            'base.group': 'import torch.distributed as dist', 'launch.local': 'def f(): import ray',
            'fastai1.learner': 'from ..launch.local import Local\nfrom fastai.basic_train import Learner',
            'fastai2.learner': 'from .session import x\nfrom fastai.learner import Learner'}
    assert {k: violations(k, v, HOUSE) for k, v in fine.items()} == dict.fromkeys(fine, [])


def test_package_itself_imports_nothing_of_ours():
    tree = ast.parse((root/'fastddp'/'__init__.py').read_text(encoding='utf-8'))
    assert [n for n, node in imports(tree, '__init__') if node in at_top(tree)] == []


def fresh(code, *blocked):
    "Run `code` in a new interpreter in which importing `blocked` fails, and return what it prints"
    block = f'import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n'
    r = subprocess.run([sys.executable, '-c', block + code], cwd=root, capture_output=True, text=True, timeout=280)
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


def test_import_fastddp_is_light():
    loaded = "print(*[o for o in ('torch', 'fastai', 'fastcore', 'IPython', 'multiprocessing') if o in sys.modules])"
    assert fresh('import sys, fastddp\n' + loaded) == ''


EACH_ALONE = """
import os, traceback
for module in {modules!r}:
    if pid := os.fork(): os.waitpid(pid, 0)
    else:
        try: __import__('fastddp.'+module)
        except BaseException: print(module, traceback.format_exc(), flush=True)
        else: print(module, 'ok', flush=True)
        os._exit(0)
"""


def import_each(modules, first, *blocked):
    "Import each module in a process that has imported only `first`, where importing `blocked` fails; what each says"
    return fresh(f'import {first}\n' + EACH_ALONE.format(modules=modules), *blocked).splitlines()


@pytest.mark.full
def test_what_knows_no_fastai_does_without_it():
    assert len(NO_FASTAI) > 20
    assert import_each(NO_FASTAI, 'torch', 'fastai', 'accelerate', 'ipykernel',
                       'jupyter_client') == [f'{o} ok' for o in NO_FASTAI]


@pytest.mark.full
def test_what_knows_fastai_does_without_accelerate_jupyter_and_ray():
    # those import where fastai v1 is installed: tests/v1
    rest = [o for o in NUMBERS if o not in NO_FASTAI and folder(o) != 'fastai1']
    assert import_each(rest, 'fastai.basics', 'accelerate', 'ray', 'ipykernel',
                       'jupyter_client') == [f'{o} ok' for o in rest]
