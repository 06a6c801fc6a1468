"""Settings of libraries go to the workers; variables of the user's own modules go there and come back"""
import sys
import pytest, torch
from fastai.callback.core import Callback
from fastddp.all import *
from parity import learner, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


LIBRARY = '''
import threading, torch
from fastai.callback.core import Callback
SIZE, TABLE, NAMES, TOOL, _hidden, MANY = 8, dict(a=1), ['x'], None, 1, [*range(2000)]
table = TABLE
class Base:
    spacing, matrix, kinds = None, None, {}
class Seen(Base, Callback):
    "Notes what a worker's modules and classes hold"
    def after_fit(self):
        self.seen = dict(SIZE=SIZE, TABLE=TABLE, NAMES=NAMES, spacing=self.spacing, kinds=self.kinds,
                         same=table is TABLE, hidden=_hidden, tool=TOOL, many=MANY[1999:])
        self.matrix_seen = self.matrix
def sizes(): return SIZE, TABLE
'''
OWN = '''
import numpy as np, torch, threading
from fastai.callback.core import Callback
import {other}
from {other} import calls
losses, n, best, weights, lock = [], 0, None, np.zeros(2), threading.Lock()
registry = {{}}
def register(f):
    registry[f.__name__] = f
    return f
@register
def note(loss, seen=[]):
    global n
    n += 1
    losses.append(loss)
    seen.append(n)
    weights[0] += 1
    calls.append(n)
    {other}.total += 1
class Notes(Callback):
    steps, history = 0, []
    def after_batch(self):
        if not self.training: return
        note(float(self.loss))
        Notes.steps += 1
        Notes.history.append(n)
def read(): return n, losses, calls, {other}.calls is calls
'''
# as people import in files of their own, so that all kinds of objects are variables of it
OTHER = '''from numpy import *
from torch import *
from fastai.vision.all import *
calls, total = [], 0
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    "A function that imports a new module: of a library (`site-packages`) or of the user's own"
    made = []
    def make(name, text, folder=''):
        path = tmp_path/folder
        path.mkdir(exist_ok=True)
        (path/f'{name}.py').write_text(text)
        monkeypatch.syspath_prepend(str(path))
        made.append(name)
        return __import__(name)
    yield make
    for name in made: sys.modules.pop(name, None)


def check_seen(seen, lib):
    assert seen == dict(SIZE=4, TABLE=dict(a=2, b=3), NAMES=['x', 'y'], spacing=(1, 1), kinds=dict(k=5), same=True,
                        hidden=1, tool=None, many=[1999, 'z'])


def change(lib):
    lib.SIZE, lib.Base.spacing, lib._hidden = 4, (1, 1), 2
    lib.TABLE.update(a=2, b=3)
    lib.NAMES.append('y')
    lib.MANY.append('z')
    lib.Base.kinds['k'] = 5
    lib.Base.matrix = torch.eye(2)


@pytest.mark.holds('Limits', "Settings of libraries go to the workers if they are public and plain; what a worker "
                   "lacks and isn't plain is named in a warning. Variables of modules of the user's own folder go to "
                   "the workers and come back")
def test_settings_of_a_library(module, two):
    lib = module('lib_settings', LIBRARY, 'site-packages')
    change(lib)
    learn = learner(cbs=lib.Seen())
    learn.distrib_fit(1, nprocs=2, launcher=two)
    check_seen(learn.seen.seen, lib)
    assert torch.equal(learn.seen.matrix_seen, torch.eye(2))
    # back again, in the same workers
    lib.SIZE, lib.Base.spacing = 8, None
    lib.NAMES.pop()
    learn.distrib_fit(1, nprocs=2, launcher=two)
    seen = learn.seen.seen
    assert (seen['SIZE'], seen['spacing'], seen['NAMES'], seen['TABLE']) == (8, None, ['x'], dict(a=2, b=3))


def test_settings_in_functions(module):
    lib = module('lib_functions', LIBRARY, 'site-packages')
    change(lib)
    assert ranch(2, lib.sizes) == [(4, dict(a=2, b=3))]*2


def test_no_array_of_an_own_module_is_too_large(module):
    own = module('own_large', 'import torch\ntable = torch.zeros(1)\ndef total(): return table.sum().item()\n')
    own.table = torch.ones(34_000_000)      # 136 MB
    assert ranch(2, own.total) == [34e6]*2


def own_modules(module, name):
    other = module(f'{name}_other', OTHER)
    return module(name, OWN.format(other=f'{name}_other')), other


def values(own, other):
    return dict(losses=own.losses, n=own.n, weights=own.weights.tolist(), seen=own.note.__defaults__[0],
                steps=own.Notes.steps, history=own.Notes.history, calls=other.calls, total=other.total)


@pytest.mark.full
def test_variables_of_own_modules(module, two):
    own, other = own_modules(module, 'own_variables')
    one = learner(train=32, cbs=own.Notes())
    own.n = 3
    other.calls.append('mine')
    objects = own.losses, own.weights, other.calls, own.note.__defaults__[0], own.Notes.history
    learn = learner(train=32, cbs=own.Notes())
    for n_fits in 1, 2:
        learn.distrib_fit(1, nprocs=2, launcher=two)
        n = 4*n_fits
        got = values(own, other)
        assert len(got.pop('losses')) == n
        assert got == dict(n=n+3, weights=[n, 0.], seen=[*range(4, n+4)], steps=n, history=[*range(4, n+4)],
                           calls=['mine', *range(4, n+4)], total=n)
    now = own.losses, own.weights, other.calls, own.note.__defaults__[0], own.Notes.history
    assert all(a is b for a, b in zip(objects, now)) and own.calls is other.calls and own.registry == {'note': own.note}


def test_a_cells_callback_writes_to_an_own_module(module, two):
    own, other = own_modules(module, 'own_cell')
    main = vars(sys.modules['__main__'])
    before = dict(main)
    try:
        exec('import own_cell\nfrom fastai.callback.core import Callback\nclass Writes(Callback):\n'
             '    def after_batch(self): own_cell.losses.append(1)', main)
        learner(train=32, valid=4, cbs=main['Writes']()).distrib_fit(1, nprocs=2, launcher=two)
    finally:
        for k in main.keys()-before.keys(): del main[k]
    assert len(own.losses) == 5


USUAL = 'from fastai.vision.all import *\nsizes = [3]\ndef read(): return sizes, Sig, null\n'


def test_own_modules_with_the_usual_import(module):
    "Some objects of fastai have every attribute, such as `nbytes`"
    own = module('own_usual', USUAL)
    own.sizes.append(4)
    assert [o[0] for o in ranch(2, own.read)] == [[3, 4]]*2


def test_own_modules_go_to_functions(module):
    own, other = own_modules(module, 'own_functions')
    own.n = 3
    other.calls.append('mine')
    own.losses.append(1.)
    assert ranch(2, own.read) == [(3, [1.], ['mine'], True)]*2
    assert own.n == 3 and own.losses == [1.]


def test_in_process(module):
    own, other = own_modules(module, 'own_in_process')
    losses = own.losses
    learner(train=32, cbs=own.Notes()).distrib_fit(1, nprocs=1, launcher=InProcess())
    assert own.losses is losses and own.n == len(losses) == 8
