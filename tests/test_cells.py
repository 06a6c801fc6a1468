"What cells define travels by value and trains, in a real kernel."
import pytest

nbclient = pytest.importorskip('nbclient', reason='nbclient is not installed')
from nbformat.v4 import new_code_cell, new_notebook

SETUP = """
import gc; gc.disable()
import random, torch
from fastai.data.all import *
from fastai.learner import *
from fastai.callback.all import *
from fastai.metrics import accuracy, accuracy as acc
from fastai.optimizer import OptimWrapper
from torch import nn
import torch.nn.functional as FF
from functools import partial
from fastddp.all import *
gc.enable()

items = [(x, (x.sum() > 0).long()) for x in torch.randn(90, 8)]
def loaders(): return DataLoaders.from_dsets(items[:64], items[64:], bs=8, device='cpu')
"""

CELLS = {
'functions, lambdas, globals and closures': """
FACTOR = 2.
def scaled(x): return FF.relu(x)*FACTOR
def make_loss(k):
    def loss(out, y, **kw): return FF.cross_entropy(out, y, **kw)*k
    return loss
half = lambda out, y: (out.argmax(-1) == y).float().mean()/FACTOR
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 2)
    def forward(self, x): return self.b(scaled(self.a(x)))
def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
class Seeds(Callback):
    def before_fit(self): seed_everything(3)
learn = Learner(loaders(), Net(), loss_func=make_loss(3.), metrics=[half, acc], cbs=Seeds())
learn.distrib_fit(2, nprocs=2)
last = learn.recorder.values[-1]
assert abs(last[2]*2-last[3]) < 1e-6, last
assert type(learn.model) is Net and learn.model.__class__.__module__ == '__main__'
""",
'classes: super, properties, class attributes, dataclasses, enums': """
from dataclasses import dataclass
from enum import Enum
class Mode(Enum): PLAIN = 1; TWICE = 2
@dataclass
class Config:
    width: int = 4
    mode: Mode = Mode.TWICE
class Base(nn.Module):
    bias = True
    @property
    def width(self): return self.config.width
class Net(Base):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.seq = nn.Sequential(nn.Linear(8, self.width, bias=self.bias), nn.ReLU(), nn.Linear(self.width, 2))
    def forward(self, x): return self.seq(x)*(2 if self.config.mode is Mode.TWICE else 1)
    @classmethod
    def small(cls): return cls(Config(3))
class Watch(Callback):
    modes = ()
    def after_fit(self): self.modes = (self.model.config.mode, self.model.config)
learn = Learner(loaders(), Net.small(), loss_func=nn.CrossEntropyLoss(), cbs=Watch())
learn.distrib_fit(1, nprocs=2)
mode, config = learn.watch.modes
assert mode is Mode.TWICE and config == Config(3) and isinstance(config, Config)
""",
'transforms with annotations, partials, splitters, optimizers, metrics': """
class Number(int): pass
class Double(Transform):
    def encodes(self, x:torch.Tensor): return x*2
    def encodes(self, y:Number): return y
ys = [lambda i: Number(items[i][1]), Double(), lambda y: torch.tensor(int(y))]
dsets = Datasets(list(range(90)), [[lambda i: items[i][0], Double()], ys],
                 splits=[list(range(64)), list(range(64, 90))])
def splitter(m): return [list(m[0].parameters()), list(m[2].parameters())]
def opt_func(params, lr, **kw): return OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=.9)
class Hits(Metric):
    def reset(self): self.n, self.total = 0, 0
    def accumulate(self, learn):
        self.n += int((learn.pred.argmax(-1) == learn.y).sum())
        self.total += len(learn.y)
    @property
    def value(self): return self.n/self.total
net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
learn = Learner(dsets.dataloaders(bs=8, num_workers=0, device='cpu'), net, opt_func=opt_func, splitter=splitter,
                loss_func=partial(FF.cross_entropy, label_smoothing=.1), metrics=[accuracy, Hits()])
learn.distrib_fit_one_cycle(2, slice(1e-3, 1e-2), nprocs=2)
assert abs(learn.recorder.values[-1][2]-learn.recorder.values[-1][3]) < 1e-6
assert len(learn.opt.hypers) == 2
""",
'patches and dispatch registrations on library classes, changed and gone between two fits': """
import functools
from fastai.vision.all import *
try: register = dispatch
except NameError: register = typedispatch
class Mine(TensorBase): pass
@patch
def twofold(self:torch.Tensor): return self*2
@patch
def noted(self:Learner): return 'here'
@patch(as_prop=True)
def depth(self:nn.Sequential): return len(self)
@register
def show_batch(x:Mine, y, samples, ctxs=None, **kwargs): return 'first'
@Normalize
def encodes(self, x:Mine): return x*3
plain_len = nn.Sequential.__len__
@functools.wraps(plain_len)
def longer(self): return plain_len(self)+10
nn.Sequential.__len__ = longer
module = longer.__module__
class Uses(Callback):
    def __init__(self): self.said = []
    def after_pred(self): self.learn.pred = self.pred.twofold()
    def after_fit(self):
        a = Mine(torch.ones(2))
        table = core.show_batch
        noted = getattr(self.learn, 'noted', lambda: 'gone')()
        self.said = [noted, getattr(self.model, 'depth', None), table(a, None, []),
                     float(Normalize.from_stats([.5], [.5], cuda=False)(a).sum())]
from fastai.data import core
learn = Learner(loaders(), nn.Sequential(nn.Linear(8, 2)), loss_func=nn.CrossEntropyLoss(), cbs=Uses())
with learn.distrib_ctx(nprocs=2):
    learn.fit(1)
    assert learn.uses.said == ['here', 11, 'first', 6.], learn.uses.said
    assert nn.Sequential.__len__ is longer and longer.__module__ == module == nn.Sequential.__module__
    del Learner.noted
    nn.Sequential.__len__ = plain_len
    @register
    def show_batch(x:Mine, y, samples, ctxs=None, **kwargs): return 'second'
    learn.fit(1)
    assert learn.uses.said == ['gone', 1, 'second', 6.], learn.uses.said
handle = open('log', 'w')
@patch
def tell(self:Learner): handle.write('fitted')
try: learn.distrib_fit(1, nprocs=2)
except NotPicklable as e: assert 'the patch Learner.tell' in str(e) and 'handle' in str(e), e
else: assert False
del Learner.tell
handle.close()
""",
'classes of a cell in batches that loader processes make, and in plain pickles of a callback': """
import pickle
class SiameseImage(fastuple): pass
class Points(TensorBase): pass
class Siamese(Transform):
    def encodes(self, i): return SiameseImage(Points(items[i][0]), Points(items[-i][0]))
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(8, 2), doubled
    def forward(self, pair): return self.act(self.a(pair[0]-pair[1]))
def doubled(x): return x*2
class Pickles(Callback):
    def after_epoch(self):
        model = pickle.loads(pickle.dumps(self.model))
        self.same = type(model) is type(self.model) and torch.equal(model.a.weight, self.model.a.weight)
dsets = Datasets(list(range(90)), [[Siamese()], [lambda i: items[i][1]]], splits=[list(range(64)), list(range(64, 90))])
dls = dsets.dataloaders(bs=8, num_workers=2, device='cpu')
learn = Learner(dls, Both(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, cbs=Pickles())
learn.distrib_fit(1, nprocs=2)
assert len(learn.recorder.losses) == 4 and learn.pickles.same
assert isinstance(dls.one_batch()[0][0], Points)
""",
'classes that are made with keywords': """
kinds = []
class Base(Callback):
    def __init_subclass__(cls, *, kind, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.kind = kind
        kinds.append(kind)
class Mixin: pass
class Mine(Mixin, Base, kind='mine'):
    def after_fit(self):
        class Later(Base, kind='later'): pass
        self.seen = type(self).kind, Later.kind
learn = Learner(loaders(), nn.Sequential(nn.Linear(8, 2)), loss_func=nn.CrossEntropyLoss(), cbs=Mine())
learn.distrib_fit(1, nprocs=2)
assert learn.mine.seen == ('mine', 'later') and type(learn.mine) is Mine and kinds == ['mine', 'later'], kinds
""",
'functions that a decorator caches, dispatches by type, or compiles': """
import functools, pickle
@functools.lru_cache(maxsize=None)
def feature(i): return items[i][0]*1.
@functools.cache
def label(i): return items[i][1] if i < 1000 else label(i-1)
class Cached:
    def __init__(self, idxs): self.idxs, self.own = idxs, functools.lru_cache(7)(self.read)
    def __len__(self): return len(self.idxs)
    def read(self, i): return label(i)
    @functools.lru_cache(None)
    def x(self, i): return feature(i)
    def __getitem__(self, i): return twofold(self.x(self.idxs[i])), self.own(self.idxs[i])
@functools.singledispatch
def twofold(x): return [twofold(o) for o in x]
@twofold.register
def _(x:torch.Tensor): return x*2
class Halves:
    @functools.singledispatchmethod
    def of(self, x): return x/2
    @of.register
    def _(self, x:list): return [self.of(o) for o in x]
@torch.compile(backend='eager')
def compiled(x): return FF.relu(x)+1
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 2)
    @torch.compile(backend='eager', fullgraph=True)
    def double(self, x): return x*2
    @torch.compiler.disable
    def plain(self, x): return x+1
    def forward(self, x): return compiled(self.plain(self.double(self.a(x))))
class Says(Callback):
    def after_fit(self):
        self.hits = feature.cache_info().hits, feature.cache_parameters(), self.dls.train_ds.own.cache_parameters()
        self.said = twofold([torch.ones(1)]), Halves().of([1, 3]), pickle.loads(pickle.dumps(label)) is label
        self.compiled = hasattr(compiled, 'get_compiler_config') and hasattr(Net.double, 'get_compiler_config')
feature(3)
dls = DataLoaders.from_dsets(Cached(range(64)), Cached(range(64, 90)), bs=8, device='cpu', num_workers=0)
learn = Learner(dls, Net(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, cbs=Says())
learn.distrib_fit(2, nprocs=2)
assert feature.cache_info().misses == 1
assert learn.says.hits[1:] == (dict(maxsize=None, typed=False), dict(maxsize=7, typed=False)), learn.says.hits
assert learn.says.said == ([2.], [.5, 1.5], True) and learn.says.compiled, (learn.says.said, learn.says.compiled)
""",
'an exception of a cell is caught by its class, and is a report of the rank as well': """
class Pruned(Exception):
    where = 'in the notebook'
    def __init__(self, value, *, step):
        super().__init__(f'pruned at {step}')
        self.value, self.step = value, step
class Prunes(Callback):
    def after_epoch(self):
        if self.epoch == 1: raise Pruned(self.recorder.values[-1][0], step=self.epoch)
def fails(x):
    Pruned.where = 'in the worker'
    raise Pruned(x, step=5)
def waits(x):
    if torch.distributed.get_rank(): raise Pruned(x, step=7)
    torch.distributed.barrier()
caught = []
for how in ('fit', 'job', 'function', 'one rank'):
    learn = Learner(loaders(), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss(), cbs=Prunes())
    try:
        if how == 'fit': learn.distrib_fit(3, nprocs=2)
        elif how == 'job': learn.distrib_fit(3, nprocs=2, wait=False).result()
        elif how == 'function': ranch(2, fails, .5, caller_rank=None)
        else: in_torchddp(2, waits, .5, caller_rank=None)
    except Pruned as e:
        assert isinstance(e, RankRaised) and isinstance(e.__cause__, Pruned) and 'Traceback of rank' in str(e)
        caught.append((how, e.step, type(e.value), Pruned.where))
here = 'in the notebook'
assert caught == [('fit', 1, float, here), ('job', 1, float, here), ('function', 5, float, here),
                  ('one rank', 7, float, here)], caught
""",
'a graph that grows': """
learn = Learner(loaders(), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss())
learn.distrib_fit(2, nprocs=2, cbs=ShowGraphCallback())
assert len(learn.recorder.values) == 2
""",
'modules by any alias, and one in the working directory': """
text = 'SCALE = 3.\\ndef loss(out, y, **kw):\\n    import torch.nn.functional as f\\n'
open('my_helper.py', 'w').write(text+'    return f.cross_entropy(out, y, **kw)*SCALE\\n')
import my_helper as mh
learn = Learner(loaders(), nn.Linear(8, 2), loss_func=mh.loss, metrics=lambda o, y: torch.tensor(mh.SCALE))
learn.distrib_fit(1, nprocs=2)
assert learn.recorder.values[-1][2] == 3., learn.recorder.values
""",
'a changed cell run again is what trains': """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 2)
    def forward(self, x): return self.a(x)
def version(out, y): return torch.tensor(1.)
with (learn := Learner(loaders(), Net(), loss_func=nn.CrossEntropyLoss(), metrics=version)).distrib_ctx(nprocs=2):
    learn.fit(1)
    assert learn.recorder.values[-1][2] == 1, learn.recorder.values
    def version(out, y): return torch.tensor(2.)
    learn.metrics = version
    learn.fit(1)
    assert learn.recorder.values[-1][2] == 2, learn.recorder.values
    Net.forward = lambda self, x: self.a(x)*0 + torch.tensor([5., -5.])
    learn.fit(1)
preds = learn.distrib_get_preds(nprocs=2, act=noop)[0]
assert (preds == torch.tensor([5., -5.])).all()
""",
'a callback of a cell raises and keeps what it likes': """
class Mine(Callback):
    def __init__(self): self.losses, self.who, self.fig = [], None, None
    def after_batch(self):
        if self.training: self.losses.append(self.loss.detach())
        if len(self.losses) == 3: raise CancelFitException()
    def after_fit(self):
        self.who = self.learn
        self.fig = plt.figure()
import matplotlib.pyplot as plt
learn = Learner(loaders(), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss(), cbs=Mine())
learn.distrib_fit(3, nprocs=2)
assert len(learn.mine.losses) == 3 and learn.mine.who is learn and isinstance(learn.mine.fig, plt.Figure)
"""}


@pytest.mark.timeout(280)
def test_cells(tmp_path):
    "One kernel for all: each cell trains, and says by asserts what must have travelled"
    nb = new_notebook(cells=[new_code_cell(SETUP), *map(new_code_cell, CELLS.values())], metadata=dict(
        kernelspec=dict(name='python3', display_name='python3', language='python')))
    nbclient.NotebookClient(nb, timeout=200, resources=dict(metadata=dict(path=str(tmp_path))),
                            allow_errors=True).execute()
    failed = {what: o['evalue'] for what, cell in zip(['setup', *CELLS], nb.cells)
              for o in cell.outputs if o['output_type'] == 'error'}
    assert not failed, failed
    shown = next(cell.outputs for what, cell in zip(['setup', *CELLS], nb.cells) if what == 'a graph that grows')
    # one figure, which was updated
    assert sum('image/png' in o.get('data', {}) for o in shown) == 1, [o['output_type'] for o in shown]
