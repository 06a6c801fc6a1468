"""Workers run what the notebook has in memory of the modules beside it: what a cell has replaced, what was edited or
deleted since, what never had a file."""
import importlib, itertools, os, py_compile, shutil, sys, types, zipfile
import pytest
from parity import assert_same, fit_both, learner, warm
from fastddp.launch.engine import Job
from fastddp.payload.own import is_own_module
from fastddp.payload.patches import collect_patches, own_code
from fastddp.payload.sending import dump_with_patches

pytestmark = pytest.mark.timeout(120)


def test_the_modules_of_tests_have_no_code_of_cells():
    "Else each worker of each test would import all of them, which took longer than the tests"
    collect_patches()
    assert own_code().changes == []


TEXT = '''
import functools, math, threading, torch
from fastcore.basics import patch
from fastai.data.core import Transform

lock = threading.Lock()
info = torch.finfo(torch.float32)
limit, seen = 3, []

def act(x): return 2*x
def uses(x): return act(x)+limit
def wraps(f):
    @functools.wraps(f)
    def inner(*args): return f(*args)+100
    return inner
@wraps
def wrapped(x): return act(x)
@functools.lru_cache
def cached(x): return act(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x): return self.b(act(torch.tanh(self.a(x))))

@functools.singledispatch
def kind(x): return 'any'
@kind.register
def _(x: int): return 'int'
class Plus(Transform):
    def encodes(self, x: int): return x+1

class Net:
    width = 3
    def size(self): return self.width*act(1)
    @property
    def area(self): return self.size()**2
    @staticmethod
    def twice(x): return 2*x
    @classmethod
    def make(cls): return cls.__name__
    class Inner:
        def go(self): return 'inner'
class Sub(Net):
    def size(self): return super().size()+1
'''
ALL = ('m.act(1), m.uses(1), m.wrapped(1), m.cached(1), m.Net().size(), m.Net().area, m.Net.twice(1), m.Net.make(), '
       'm.Net.Inner().go(), m.Sub().size(), m.Sub().area, m.Net.width, m.limit, m.seen, m.kind(1), m.kind([]), '
       'm.Plus()(1), m.Plus()(1.5)')

# What a cell does to the module `m`
CELLS = dict(
    nothing='', function='m.act = lambda x: 5*x', method='m.Net.size = lambda self: 7*self.width',
    prop='m.Net.area = property(lambda self: 11)', static='m.Net.twice = staticmethod(lambda x: 13*x)',
    of_class='m.Net.make = classmethod(lambda cls: cls.__name__*2)', nested='m.Net.Inner.go = lambda self: "other"',
    old_one='was = m.act\nm.act = lambda x: was(x)+1', over_super='m.Net.size = lambda self: 17',
    patched='from fastcore.basics import patch\n@patch\ndef size(self:m.Net): return 19',
    whole_class='class Net:\n    width = 23\n    def size(self): return 1\n'
                'for k in ("area", "twice", "make", "Inner"):\n    setattr(Net, k, vars(m.Net)[k])\nm.Net = Net',
    by_a_library='import math\nm.act = math.exp', by_its_own='m.act = m.Net.twice',
    by_a_partial='import functools\nm.act = functools.partial(lambda a, x: a*x, 29)',
    registered='@m.kind.register\ndef _(x: int): return "of a cell"\n@m.kind.register\ndef _(x: list): return "list"',
    in_a_transform='@m.Plus\ndef encodes(self, x: float): return x+100',
    decorated='m.uses = m.wraps(m.uses)', variables='m.limit = 31; m.Net.width = 37; m.seen.append(41)',
    reloaded='import importlib, pathlib\npathlib.Path(m.__file__).write_text("act = abs\\n"+pathlib.Path(m.__file__)'
             '.read_text().replace("return 2*x", "return 43*x"))\nimportlib.invalidate_caches()\nimportlib.reload(m)')
# What becomes of its file, or of the way to it
DISK = dict(edited=lambda f: f.write_text(TEXT.replace('2*x', '6*x')),
            constant=lambda f: f.write_text(TEXT.replace('limit, seen = 3', 'limit, seen = 8')),
            broken=lambda f: f.write_text('def act(:'),
            deleted=lambda f: f.unlink(),
            without_cache=lambda f: (f.unlink(), shutil.rmtree(f.parent/'__pycache__', True)),
            elsewhere=lambda f: (os.chdir('/'), sys.path.remove(str(f.parent))))
names = (f'words_{i}_of_mine' for i in itertools.count())


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture
def m(tmp_path, monkeypatch):
    "A module beside the notebook"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = next(names)
    (tmp_path/f'{name}.py').write_text(TEXT)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def cell(code, **names):
    "Runs a cell, whose definitions are `__main__`'s"
    scope = dict(names, __name__='__main__')
    exec(compile(code, '<cell>', 'exec'), scope)
    return scope


def evaluate(ctx, obj):
    name, words = obj['call']
    return eval(words, dict(m=importlib.import_module(name)))


def there(launcher, name, words=ALL):
    "On two workers, as a call of a learner or of `ranch` sends it"
    obj = dict(call=(name, words), of=sys.modules[name])
    return launcher.run(Job.of(evaluate, dump_with_patches(obj, {})), 2).results


def here(m, words=ALL): return eval(words, dict(m=m))


@pytest.mark.parametrize('code', CELLS.values(), ids=CELLS)
def test_what_a_cell_does_to_a_module(m, two, code):
    cell(code, m=m)
    assert there(two, m.__name__) == [here(m)]*2


@pytest.mark.parametrize('change', DISK.values(), ids=DISK)
def test_what_becomes_of_its_file(m, two, tmp_path, change):
    if change is DISK['without_cache']: here(m)
    change(tmp_path/f'{m.__name__}.py')
    words = ALL if change is not DISK['without_cache'] else 'm.act(1), m.uses(1), m.Net().size(), m.Sub().area'
    assert there(two, m.__name__, words) == [here(m, words)]*2


def test_compiled_code_that_is_older_than_the_import(two, tmp_path, monkeypatch):
    "As in containers, which set PYTHONDONTWRITEBYTECODE: what differs is no function's code"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    used, user = (tmp_path/f'{next(names)}.py' for _ in range(2))
    used.write_text('rates = [1]')
    py_compile.compile(str(used))
    used.write_text('rates = [1000]')
    user.write_text(f'from {used.stem} import rates\nassert rates[0] == 1000\ndef act(x): return rates[0]*x')
    m = importlib.import_module(user.stem)
    try: assert there(two, user.stem, 'm.act(1), m.rates') == [(1000, [1000])]*2
    finally:
        for o in used, user: del sys.modules[o.stem]


def test_a_change_is_undone_in_workers_that_stay(m, two):
    was = m.act
    for code in 'm.act = lambda x: 3*x', 'm.act = was':
        cell(code, m=m, was=was)
        assert there(two, m.__name__, 'm.uses(1)') == [m.uses(1)]*2


def test_a_fit_in_which_a_method_was_replaced(m, two):
    "As one does while one tries things: the model's class is the module's"
    cell('m.act = lambda x: 3*x\nm.Model.forward = lambda self, x: self.b(m.act(self.a(x)))', m=m)
    assert_same(*fit_both(learner(model=m.Model()), 2, two, 2))


def test_a_module_without_a_file(two):
    "A stub in the place of a library, with a module below it, and one that a cell has made by exec"
    stub, below, made = (types.ModuleType(o) for o in ('not_installed', 'not_installed.tools', 'made_by_exec'))
    stub.tools, stub.version = below, '1.0'
    exec('limit = 4\ndef half(x): return x/limit', vars(below))
    register(stub, below)
    exec('import not_installed.tools as t\ndef quarter(x): return t.half(x)/2', vars(made))
    register(made)
    try:
        assert there(two, 'not_installed', 'm.version, m.tools.half(8)') == [('1.0', 2.)]*2
        assert there(two, 'made_by_exec', 'm.quarter(8)') == [1.]*2
    finally:
        for o in stub, below, made: sys.modules.pop(o.__name__, None)


def test_the_module_that_cython_makes_is_none_of_ones_own():
    import pandas       # its extensions have made it
    assert sys.modules['cython_runtime'].__name__ == 'cython_runtime'
    assert not is_own_module(sys.modules['cython_runtime'])


def register(*modules): sys.modules.update({o.__name__: o for o in modules})


def test_a_package_with_relative_imports(two, tmp_path, monkeypatch):
    "Modules that import each other and star imports; one is replaced in, then all files are gone"
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path/'parts_of_mine'
    folder.mkdir()
    (folder/'__init__.py').write_text('from .one import *\nfrom . import two')
    (folder/'one.py').write_text('def act(x): return 2*x\nfrom . import two\ndef through(x): return two.twice(x)')
    (folder/'two.py').write_text('from .one import act\ndef twice(x): return act(act(x))')
    p = importlib.import_module('parts_of_mine')
    words = 'm.act(1), m.through(1), m.two.twice(1), m.one.act(1)'
    try:
        assert there(two, 'parts_of_mine', words) == [here(p, words)]*2
        cell('p.one.act = lambda x: 7*x', p=p)
        assert there(two, 'parts_of_mine', words) == [here(p, words)]*2
        shutil.rmtree(folder)
        assert there(two, 'parts_of_mine', words) == [here(p, words)]*2
    finally:
        for k in [k for k in sys.modules if k.partition('.')[0] == 'parts_of_mine']: del sys.modules[k]


def test_a_zip(two, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path/'mine.zip', 'w') as z: z.writestr('zipped_of_mine.py', 'def act(x): return 2*x')
    monkeypatch.syspath_prepend(str(tmp_path/'mine.zip'))
    m = importlib.import_module('zipped_of_mine')
    try:
        cell('m.limit = 5', m=m)
        assert there(two, 'zipped_of_mine', 'm.act(1), m.limit') == [(2, 5)]*2
    finally: del sys.modules['zipped_of_mine']


def test_a_library_that_is_installed_to_a_folder(tmp_path, monkeypatch):
    "As by `pip install --target`: its modules are a library's, those beside it are one's own"
    from fastddp.base.failure import is_user_file
    (tmp_path/'of_others').mkdir()
    (tmp_path/'bin').mkdir()
    files = 'of_others/part.py', 'mine.py', 'of_others/added_by_hand.py', 'bin/mine_too.py'
    for o in files: (tmp_path/o).touch()
    (tmp_path/'of_others-1.0.dist-info').mkdir()
    (tmp_path/'of_others-1.0.dist-info/RECORD').write_text('of_others/part.py,sha256=x,0\nbin/tool,,\n')
    assert [is_user_file(str(tmp_path/o)) for o in files] == [False, True, True, True]
    assert not is_user_file('/usr/lib/python3/dist-packages/yaml/loader.py')


def test_a_value_that_pickles_but_does_not_load(m, two):
    cell('import numpy as np\nm.numbers = np.finfo(np.float32)\nm.limit = 47', m=m)
    assert there(two, m.__name__, 'm.limit, float(m.numbers.eps)') == [(47, float(m.numbers.eps))]*2


@pytest.mark.parametrize('edited', [False, True])
def test_what_a_worker_has_imported_before_is_not_run_twice(two, tmp_path, monkeypatch, edited):
    "By its helper, or in a function: what it registers can't be registered once more"
    monkeypatch.syspath_prepend(str(tmp_path))
    name = next(names)
    registers = f'import torch\ntorch.library.define("{name}::op", "(Tensor x) -> Tensor")\n'
    file = tmp_path/f'{name}.py'
    file.write_text(registers+'def act(x): return 2*x')
    assert two.run(Job.of(in_worker, dump_with_patches(dict(name=name), {})), 2).results == [2, 2]
    if edited: file.write_text('def act(x): return 6*x')
    m = importlib.import_module(name)
    try: assert there(two, name, 'm.act(1)') == [m.act(1)]*2
    finally: del sys.modules[name]


def test_what_a_worker_has_imported_and_what_that_uses(two, tmp_path, monkeypatch):
    "A module that stayed would keep the other one, which was edited since"
    monkeypatch.syspath_prepend(str(tmp_path))
    user, used = next(names), next(names)
    (tmp_path/f'{used}.py').write_text('def twice(x): return 2*x')
    (tmp_path/f'{user}.py').write_text(f'import {used}\ndef act(x): return {used}.twice(x)')
    assert two.run(Job.of(in_worker, dump_with_patches(dict(name=user), {})), 2).results == [2, 2]
    (tmp_path/f'{used}.py').write_text('def twice(x): return 600*x')
    m = importlib.import_module(user)
    try: assert there(two, user, 'm.act(1)') == [m.act(1)]*2 == [600]*2
    finally:
        for o in user, used: del sys.modules[o]


def in_worker(ctx, obj): return importlib.import_module(obj['name']).act(1)
