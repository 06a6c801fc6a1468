"""The house stands: imports point down, and each room keeps out what does not belong there (rooms: CONTRIBUTING.md)."""
import ast, json, re, subprocess, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent


def default_exp(path):
    "The module that the notebook at `path` is exported to, None if it has none"
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if m := re.match(r'#\|\s*default_exp\s+(\S+)', ''.join(cell['source'])): return m[1]


# module -> its notebook's number: '02' for 02_workers, '02a' for 02a_preload, which is a floor above it
NOTEBOOKS = sorted((root/'nbs').glob('[0-9]*.ipynb'))
ROOMS = {exp: p.name.split('_')[0] for p in NOTEBOOKS if (exp := default_exp(p))}
LOW = [o for o, n in ROOMS.items() if n < '07']


def dotted(node):
    "`a.b.c` of nested attributes, '' for anything else"
    if isinstance(node, ast.Name): return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)): return f'{base}.{node.attr}'
    return ''


def imports(tree):
    "All modules that `tree` imports, wherever: `(dotted name, node)`, our own as `fastddp.room`"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from ((o.name, node) for o in node.names)
        if isinstance(node, ast.ImportFrom):
            base = '.'.join(filter(None, ['fastddp' if node.level else '', node.module]))
            yield base, node
            yield from ((f'{base}.{o.name}', node) for o in node.names)


def at_top(tree):
    "The nodes of `tree` that run when the module is imported"
    def go(node):
        for o in ast.iter_child_nodes(node):
            yield o
            if not isinstance(o, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)): yield from go(o)
    return set(go(tree))


def within(name, *packages): return any(name == o or name.startswith(o + '.') for o in packages)


def allowed(module, number, room):
    "May `module`, of room `number`, import what is in `room`?"
    if number[:2] == '12' and '07' <= room < '11': return False   # v1 has its own callbacks
    return room < number or module == 'all'                       # all is the front door; nobody imports it


def violations(module, source, rooms=ROOMS):
    "What the `source` of `module` does that its room forbids"
    tree, number, found = ast.parse(source), rooms[module], []
    top, low, is_group = at_top(tree), number < '07', number[:2] == '04'
    for name, node in imports(tree):
        room = next((n for o, n in rooms.items() if o != module and within(name, f'fastddp.{o}')), None)
        if room is not None and not allowed(module, number, room): found.append(f'{name} is room {room}')
        if low and within(name, 'fastai'): found.append(f'{name} in room {number}')
        if number[:2] == '12' and within(name, 'fastai.learner', 'fastai.data', 'fastai.torch_basics'): found.append(f'{name} is of fastai v2')
        if within(name, 'fastai.distributed'): found.append(f'{name} needs accelerate')
        if not is_group and within(name, 'torch.distributed'): found.append(f'{name} outside room 04')
        if module == 'shard' and not within(name, 'fastddp', *sys.stdlib_module_names):
            found.append(f'{name} in pure arithmetic')
        if module == 'errors' and within(name, 'torch', 'multiprocess', 'subprocess'): found.append(f'{name} in errors')
        if within(name, 'ray') and node in top: found.append('ray imported with the module')
    uses = [dotted(o) for o in ast.walk(tree) if not is_group and dotted(o) == 'torch.distributed']
    return sorted({*found, *(f'{o} outside room 04' for o in uses)})


@pytest.mark.parametrize('module', ROOMS)
def test_room_keeps_its_rules(module):
    source = (root/'fastddp'/f'{module}.py').read_text(encoding='utf-8')
    assert violations(module, source) == []


def test_v1_stays_with_its_own():
    rooms = dict(launch='06', data='07', session='09e', v1='12g')
    assert violations('v1', 'from .launch import Local\nfrom fastai.basic_train import Learner', rooms) == []
    assert violations('v1', 'from .session import x\nfrom .data import y', rooms) == ['fastddp.data is room 07', 'fastddp.data.y is room 07',
                                                                                    'fastddp.session is room 09e', 'fastddp.session.x is room 09e']
    assert violations('v1', 'from fastai.learner import Learner', rooms)


BAD = {
    'from .learner import snapshot': 'learner is room 10',
    'import fastddp.learner': 'learner is room 10',
    'def f():\n    from .launch import Local': 'launch is room 06',
    'from . import launch': 'launch is room 06',
    'from .preload import x': 'preload is room 02a',
    'from fastai.basics import *': 'fastai.basics in room 02',
    'def f(): import fastai.distributed': 'needs accelerate',
    'import torch.distributed as dist': 'torch.distributed outside room 04',
    'from torch import distributed': 'torch.distributed outside room 04',
    'import torch\ntorch.distributed.barrier()': 'torch.distributed outside room 04',
    'import ray': 'ray imported with the module'}


@pytest.mark.parametrize('source', BAD)
def test_the_rules_are_noticed(source):
    rooms = dict(errors='00', transport='01', workers='02', preload='02a', group='04', launch='06', learner='10')
    assert any(BAD[source] in o for o in violations('workers', source, rooms))


def test_what_is_allowed():
    rooms = dict(errors='00', transport='01', workers='02', preload='02a', group='04', shard='05', ray='13')
    assert violations('workers', 'from .errors import x\nfrom . import transport\nimport torch', rooms) == []
    assert violations('preload', 'from . import workers', rooms) == []
    assert violations('group', 'import torch.distributed as dist', rooms) == []
    assert violations('ray', 'def f(): import ray', rooms) == []
    assert violations('shard', 'import numpy', rooms) == ['numpy in pure arithmetic']


def test_package_itself_imports_nothing_of_ours():
    tree = ast.parse((root/'fastddp'/'__init__.py').read_text(encoding='utf-8'))
    assert [n for n, node in imports(tree) if node in at_top(tree)] == []


def fresh(code, *blocked):
    "Run `code` in a new interpreter in which importing `blocked` fails, and return what it prints"
    block = f'import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n'
    r = subprocess.run([sys.executable, '-c', block + code], cwd=root, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()


def test_import_fastddp_is_light():
    loaded = "print(*[o for o in ('torch', 'fastai', 'fastcore', 'IPython', 'multiprocess') if o in sys.modules])"
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
    "Import each room in a process that has imported only `first`, where importing `blocked` fails; what each says"
    return fresh(f'import {first}\n' + EACH_ALONE.format(modules=modules), *blocked).splitlines()


def test_low_rooms_do_without_fastai_accelerate_and_jupyter():
    assert import_each(LOW, 'torch', 'fastai', 'accelerate', 'ipykernel', 'jupyter_client') == [f'{o} ok' for o in LOW]


def test_high_rooms_do_without_accelerate_jupyter_and_ray():
    high = [o for o, n in ROOMS.items() if o not in LOW and n[:2] != '12']     # those of fastai v1 import where it is installed: tests/v1
    assert import_each(high, 'fastai.basics', 'accelerate', 'ray', 'ipykernel', 'jupyter_client') == [f'{o} ok' for o in high]
