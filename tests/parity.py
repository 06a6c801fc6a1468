"""What the tests of `N workers are one process` share: small learners, the same in one process, comparisons."""
import contextlib, copy, random
import numpy as np, torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn
import fastddp.all      # with the helper process, later workers start at once
from fastddp.base import group
from fastddp.launch.local import Local


class Warm(Local):
    "Its workers stay from fit to fit, whatever block a fit ran in, until `end`"
    def __exit__(self, *_): pass
    def end(self): self.leave()
    def pids(self): return [p.pid for p in self.workers.procs.values()] if self.workers else []


_launchers = {}     # number of workers -> the `Warm` launcher of this session of tests


@contextlib.contextmanager
def warm(n):
    """The session's `Warm` launcher with `n` workers, which are still the same ones at the end. It stays for the next
    module that asks for one (`conftest.py` ends it before one that doesn't)"""
    launcher = _launchers.setdefault(n, Warm(idle=7200))
    here = launcher.pids()
    # memory for results is there by then
    for _ in range(2 if not here else 1): fit_a_little(n, launcher)
    if (pids := launcher.pids()) != here: fit_a_little(n, launcher)     # those that were there had left meanwhile
    yield launcher
    assert len(pids) == n and launcher.pids() == pids, 'the workers were started anew: not the warm path'


def fit_a_little(n, launcher): learner(train=8, valid=1).distrib_fit(1, nprocs=n, launcher=launcher)


def end_launchers():
    while _launchers: _launchers.popitem()[1].end()


class Collect(Callback):
    "Notes numbers on each rank, and brings all ranks' notes together at the end of the fit: `ranks[r]`"
    order = 1000
    def __init__(self): self.rows, self.ranks = [], None
    def note(self, *vals): self.rows.append([float(o) for o in vals])
    def after_fit(self):
        if not self.rows: self.rows.append([])
        self.ranks = [t.tolist() for t in group.all_gather_object(torch.tensor(self.rows, dtype=torch.float64))]


class Steps(Collect):
    "Counts optimizer steps, and notes the weights' sum at the end of the fit"
    def before_fit(self): self.rows, self.steps = [], 0
    def after_step(self): self.steps += 1
    def after_fit(self):
        self.rows = []
        self.note(self.steps, *(p.detach().double().abs().sum() for p in self.learn.model.parameters()))
        super().after_fit()


def seed(s=0):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


def mlp(n_in=4, n_out=3, n_hid=8): return nn.Sequential(nn.Linear(n_in, n_hid), nn.Tanh(), nn.Linear(n_hid, n_out))


class Idle(nn.Module):
    "A layer that nothing uses"
    def __init__(self):
        super().__init__()
        self.net, self.idle = mlp(), nn.Linear(2, 2)
    def forward(self, x): return self.net(x)


def items(n, n_in=4, n_out=3, s=0):
    "`n` pairs of a vector and a class"
    g = torch.Generator().manual_seed(s)
    x, y = torch.randn(n, n_in, generator=g), torch.randint(n_out, (n,), generator=g)
    return list(zip(x, y))


def loaders(train, valid, bs=4, drop_last=False, valid_bs=None):
    return DataLoaders(DataLoader(train, bs=bs, shuffle=True, drop_last=drop_last, num_workers=0),
                       DataLoader(valid, bs=valid_bs or bs, num_workers=0))


def learner(train=37, valid=21, bs=4, model=None, loss_func=None, opt_func=SGD, drop_last=False, data=items, lr=.05,
            kind=Learner, **kwargs):
    seed()
    dls = loaders(data(train), data(valid, s=1), bs, drop_last)
    learn = kind(dls, mlp() if model is None else model, loss_func=loss_func or nn.CrossEntropyLoss(),
                 opt_func=opt_func, lr=lr, **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn


def alone_like(learn, n, batch='per_worker'):
    "The same learner with the global batch size in training, for a fit in one process"
    res = copy.deepcopy(learn)
    if batch == 'per_worker': res.dls.train.bs *= n     # a validation has the loader's own batches
    return res


def fit_both(learn, n, launcher, *args, batch='per_worker', how='fit', cbs=(), ddp={}, **kwargs):
    "`(on workers, in one process)` from the same state and seeds; `ddp`: options of DDP's own"
    one, cbs_one = alone_like(learn, n, batch), copy.deepcopy(list(cbs))
    seed(1)
    learn.distrib(how, *args, nprocs=n, launcher=launcher, batch=batch, cbs=list(cbs), **ddp, **kwargs)
    seed(1)
    getattr(one, how)(*args, cbs=cbs_one, **kwargs)
    return learn, one


def flat_opt(opt):
    "All tensors of an optimizer's state, in the order of its parameters"
    inner = getattr(opt, 'opt', None)
    st = inner.state if isinstance(inner, torch.optim.Optimizer) else opt.state
    ps = [p for pg in opt.param_lists for p in pg]
    return [(i, k, torch.as_tensor(v).to_dense().double()) for i, p in enumerate(ps) if p in st
            for k, v in sorted(st[p].items()) if isinstance(v, (torch.Tensor, float, int)) and not isinstance(v, bool)]


def largest(a, b):
    "Largest difference of two lists of numbers or tensors"
    assert len(a) == len(b), (len(a), len(b))
    a, b = ([torch.as_tensor(o, dtype=torch.float64) for o in l] for l in (a, b))
    return max((float((x-y).abs().max()) if x.numel() else 0. for x, y in zip(a, b)), default=0.)


def values(learn):
    "The recorder's table as numbers, nothing for None"
    return [[float('nan') if v is None else float(v) for v in row] for row in learn.recorder.values]


def size(vs):
    "The largest of all numbers in `vs`, at least 1: what a difference of float32 numbers is held against"
    return max([1., *(float(t.abs().max()) for t in map(torch.as_tensor, vs) if t.numel())])


def assert_same(learn, one, tol=1e-5, metrics_tol=1e-6):
    "Weights, buffers, optimizer state, losses and metrics are those of one process"
    worst = {k: largest([v], [one.model.state_dict()[k]]) for k, v in learn.model.state_dict().items()}
    assert max(worst.values(), default=0) <= tol, worst
    a, b = flat_opt(learn.opt), flat_opt(one.opt)
    assert [o[:2] for o in a] == [o[:2] for o in b]
    state = [o[2] for o in b]
    assert largest([o[2] for o in a], state) <= tol*size(state)
    assert largest(learn.recorder.losses, one.recorder.losses) <= metrics_tol*10*size(one.recorder.losses)
    va, vb = values(learn), values(one)
    assert [len(o) for o in va] == [len(o) for o in vb]
    np.testing.assert_allclose([v for r in va for v in r], [v for r in vb for v in r], atol=metrics_tol*10,
                               rtol=metrics_tol*10)
    numbers = [[v for h in o.opt.hypers for v in h.values() if isinstance(v, float)] for o in (learn, one)]
    assert learn.opt.hypers == one.opt.hypers or largest(*numbers) < 1e-9


def assert_ranks_alike(rows):
    "What every rank noted is the same to the bit"
    assert rows is not None and len(rows) > 1
    a = torch.tensor(rows, dtype=torch.float64)
    assert a.numel(), 'nothing was noted'
    assert torch.equal(a.nan_to_num(12345.), a[:1].expand_as(a).nan_to_num(12345.)), rows
