"""What a notebook's first cells set in libraries: workers have it, and lose it when the notebook resets it"""
import codecs, collections, collections.abc, functools, io, os, ssl, string, subprocess, sys, types
import fastddp, matplotlib, numpy as np, pandas as pd, pytest, scipy, sklearn, torch, torch._dynamo
import sklearn.linear_model, torch.utils.checkpoint
from fastai.callback.core import Callback
from fastddp.all import *
from PIL import Image, ImageFile, PngImagePlugin
from torch.distributions import Distribution
from parity import learner, warm

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Probe(Callback):
    "Evaluates expressions in rank 0's process"
    def __init__(self, probes): self.probes = probes
    def before_fit(self): self.found = {k: attempt(p) for k, p in self.probes.items()}


def attempt(probe):
    try: return repr(eval(probe, {}))
    except Exception as e: return type(e).__name__


def found(probes, two):
    learn = learner(train=8, valid=4, cbs=Probe(probes))
    learn.probe.needs = Image.Image     # what a library keeps goes along with what a learner has of it
    learn.distrib_fit(1, nprocs=2, launcher=two)
    return learn.probe.found


def saved(o):
    f = io.BytesIO()
    np.save(f, np.array([o], dtype=object))
    return f.getvalue()


DATA = saved({'a': 1})

# not a function of this module: workers of all tests would import the modules of all tests before they set it
CELL = dict(__name__='__main__')
exec("def of_cell(): return 'of a cell'", CELL)


# what it is -> (its object, attribute, value, probe)
ATTRIBUTES = {
    'a flag': (ImageFile, 'LOAD_TRUNCATED_IMAGES', True, "__import__('PIL.ImageFile').ImageFile.LOAD_TRUNCATED_IMAGES"),
    'a number as large as a time': (ImageFile, 'MAXBLOCK', 10**10, "__import__('PIL.ImageFile').ImageFile.MAXBLOCK"),
    'a number like that of the process': (ImageFile, 'SIZE', os.getpid(), "__import__('PIL.ImageFile').ImageFile.SIZE"),
    'a long text': (Image, 'NOTICE', 'x'*100_000, "len(__import__('PIL.Image').Image.NOTICE)"),
    'a long text in another order': (string, 'printable', string.printable[::-1], "__import__('string').printable[:9]"),
    'an array': (Image, 'TABLE', np.arange(300_000), "int(__import__('PIL.Image').Image.TABLE.sum())"),
    'nothing in the place of a number': (Image, 'MAX_IMAGE_PIXELS', None,
                                         "__import__('PIL.Image').Image.MAX_IMAGE_PIXELS"),
    'a constant that is gone': (Image, 'OLD_LANCZOS', Image.LANCZOS, "int(__import__('PIL.Image').Image.OLD_LANCZOS)"),
    'a type that is gone': (np, 'int0', np.int64, "__import__('numpy').int0(2)"),
    "a type of Python's": (np, 'float', float, "__import__('numpy').float('2')"),
    'a class that has moved': (collections, 'Mapping', collections.abc.Mapping,
                               "isinstance({}, __import__('collections').Mapping)"),
    'a function with another default': (np, 'load', functools.partial(np.load, allow_pickle=True),
                                        f"__import__('numpy').load(__import__('io').BytesIO({DATA!r}))[0]"),
    'a partial of torch': (torch, 'load', functools.partial(torch.load, weights_only=False),
                           "__import__('torch').load.keywords"),
    'a function of a cell for one of torch.cuda': (
        torch.cuda, 'is_bf16_supported', CELL['of_cell'], "__import__('torch').cuda.is_bf16_supported()"),
    'a method of a class in a private module': (
        sklearn.linear_model.LinearRegression, 'predict', CELL['of_cell'],
        "__import__('sklearn.linear_model').linear_model.LinearRegression.predict()"),
    'a partial for one of torch.utils': (
        torch.utils.checkpoint, 'checkpoint', functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "__import__('torch').utils.checkpoint.checkpoint.keywords"),
    'a name that scipy has lost': (scipy, 'interp', np.interp, "float(__import__('scipy').interp(.5, [0, 1], [0, 2]))"),
    'a property': (pd.DataFrame, 'n', property(lambda self: len(self)+100), "__import__('pandas').DataFrame([1]).n"),
    'another function': (ssl, '_create_default_https_context', ssl._create_unverified_context,
                         "__import__('ssl')._create_default_https_context.__name__")}

# what it is -> (read, write, value, probe)
PAIRS = {
    'sklearn': (lambda: sklearn.get_config()['transform_output'], lambda v: sklearn.set_config(transform_output=v),
                'pandas', "__import__('sklearn').get_config()['transform_output']"),
    'pandas': (lambda: pd.get_option('display.precision'), lambda v: pd.set_option('display.precision', v), 1,
               "__import__('pandas').get_option('display.precision')"),
    'matplotlib': (lambda: matplotlib.rcParams['lines.linewidth'],
                   lambda v: matplotlib.rcParams.update({'lines.linewidth': v}), 9.,
                   "__import__('matplotlib').rcParams['lines.linewidth']"),
    'fast path': (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False,
                  "__import__('torch').backends.mha.get_fastpath_enabled()"),
    'cudnn': (lambda: torch.backends.cudnn.deterministic, lambda v: setattr(torch.backends.cudnn, 'deterministic', v),
              True, "__import__('torch').backends.cudnn.deterministic"),
    'recursion': (sys.getrecursionlimit, sys.setrecursionlimit, 5000, "__import__('sys').getrecursionlimit()"),
    'distributions': (lambda: Distribution._validate_args, Distribution.set_default_validate_args, False,
                      "__import__('torch.distributions').distributions.Distribution._validate_args"),
    'sharing': (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy, 'file_system',
                "__import__('torch').multiprocessing.get_sharing_strategy()")}
PROBES = {k: v[-1] for k, v in {**ATTRIBUTES, **PAIRS}.items()}


def test_what_first_cells_set_and_reset(two):
    before = found(PROBES, two)
    was = {k: read() for k, (read, *_) in PAIRS.items()}
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, v, _ in ATTRIBUTES.values(): patch.setattr(owner, name, v, raising=False)
        try:
            for _, write, v, _ in PAIRS.values(): write(v)
            here = {k: attempt(p) for k, p in PROBES.items()}
            assert found(PROBES, two) == here
            assert not [k for k in PROBES if here[k] == before[k]]      # each of them shows something
        finally:
            for k, v in was.items(): PAIRS[k][1](v)
    assert found(PROBES, two) == before     # the same workers


def forget():
    Image.ID.remove('MINE')
    for o in Image.OPEN, Image.EXTENSION: o.pop('MINE', o.pop('.mine', None))


def register():
    class MineFile(PngImagePlugin.PngImageFile): format = 'MINE'
    Image.register_open('MINE', MineFile, lambda head: head[:4] == b'MINE')
    Image.register_extension('MINE', '.mine')
    codecs.register(lambda name: codecs.lookup('utf8') if name == 'mine' else None)


NO_VALUE = {'plug-in': "__import__('PIL.Image').Image.EXTENSION.get('.mine')", 'codec': "'a'.encode('mine')"}


def test_a_function_that_workers_run_first(two):
    assert found(NO_VALUE, two) == {'plug-in': 'None', 'codec': 'LookupError'}
    fastddp.setup(register)
    try:
        assert found(NO_VALUE, two) == {'plug-in': "'MINE'", 'codec': "b'a'"}
        assert {k: attempt(p) for k, p in NO_VALUE.items()} == found(NO_VALUE, two)      # in this process, too
        assert ranch(2, lambda: attempt(NO_VALUE['codec'])) == ["b'a'"]*2
    finally:
        fastddp.setup(None)
        forget()


def test_a_private_value_on_torch_fails_no_call(two, monkeypatch):
    "The shim for old libraries: some of torch's attributes raise an error when they are asked"
    monkeypatch.setattr(torch, '_six', types.SimpleNamespace(string_classes=(str,)), raising=False)
    learn = learner(train=8, valid=4)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert len(learn.recorder.values) == 1


class Opens:
    "A data set whose items are made by a library"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        Image.open(io.BytesIO(b'MINE'+bytes(40)))
        return torch.zeros(6), 0


def test_what_a_failed_worker_lacks_is_named():
    learn = learner(train=8, valid=4)
    learn.dls.train.dataset = Opens(8)
    register()
    try:
        with pytest.raises(RankRaised) as e: learn.distrib_fit(1, nprocs=2)
    finally: forget()
    assert 'PIL.Image.OPEN' in str(e.value) and 'fastddp.setup(fn)' in str(e.value)


LATER = '''
import os, sys
sys.path.insert(0, {tests!r})
from fastddp.all import *
from fastddp.launch.rank import notebook_settings
from parity import learner
from fastai.callback.core import Callback
from fastai.distributed import *        # as all examples of fastai have it
class Where(Callback):
    def before_fit(self): self.pid = os.getpid()
learn = learner(cbs=Where())
with learn.distrib_ctx(nprocs=2, sync_bn=False, in_notebook=True): learn.fit(1)
print(learn.where.pid == os.getpid())
for options in dict(mixed_precision='fp16'), dict(rubbish=7):
    try:
        with learn.distrib_ctx(**options): pass
    except CantDistribute as e: print(e)
'''


@pytest.mark.full
def test_an_import_of_fastais_own_comes_last(tmp_path):
    (tmp_path/'later.py').write_text(LATER.format(tests=os.path.dirname(os.path.dirname(__file__))))
    out = subprocess.run([sys.executable, 'later.py'], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert [*map(str.strip, out.stdout.splitlines()[-3:])][0] == 'False', out
    assert 'learn.to_fp16()' in out.stdout and 'No option rubbish' in out.stdout
