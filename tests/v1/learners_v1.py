"""Small fastai v1 learners, each for one process (`one`) or for 2 workers with half its batch."""
import contextlib, random
import numpy as np, torch
from fastai.basics import *
from fastai.callback import AverageMetric
import fastddp.all


def seed(n=3):
    random.seed(n); np.random.seed(n); torch.manual_seed(n)


class Numbers(torch.utils.data.Dataset):
    "Plain items, sum above zero or not; `log` notes nothing: workers have their own copy"
    def __init__(self, n, start=0):
        g = torch.Generator().manual_seed(start)
        self.x = torch.randn(n, 3, generator=g)
        self.y = (self.x.sum(1) > 0).long()
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]


def plain(bs=4, n=50, n_valid=13, loss_func=None, **kwargs):
    "A learner on a plain `DataBunch`, which validates by batches of 4: some numbers depend on that"
    seed()
    data = DataBunch.create(Numbers(n), Numbers(n_valid, 1), bs=bs, val_bs=4, num_workers=0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    kwargs = dict(metrics=[accuracy], **kwargs) if 'metrics' not in kwargs else kwargs
    return Learner(data, model, loss_func=loss_func or nn.CrossEntropyLoss(), **kwargs)


def squared(out, y):
    "A metric that is no mean over items"
    return accuracy(out, y)**2


def pair(make, run, run_one=None, **kwargs):
    "`make(bs=4)` after `run` on 2 workers and `make(bs=8)` after the same in one process"
    two, one = make(bs=4, **kwargs), make(bs=8, **kwargs)
    seed(5)
    with two.distrib_ctx(nprocs=2): run(two)
    seed(5)
    (run_one or run)(one)
    return two, one


def same_weights(a, b, tol=1e-5):
    for (k, p), q in zip(a.model.state_dict().items(), b.model.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol, msg=lambda m: f'{k}: {m}')


def same_recorder(a, b, tol=1e-5):
    a, b = a.recorder, b.recorder
    assert a.names == b.names and a.nb_batches == b.nb_batches and len(a.losses) == len(b.losses)
    np.testing.assert_allclose([float(o) for o in a.losses], [float(o) for o in b.losses], atol=tol)
    np.testing.assert_allclose(a.lrs, b.lrs)
    np.testing.assert_allclose(a.moms, b.moms)
    np.testing.assert_allclose(np.array(a.val_losses, dtype=float), np.array(b.val_losses, dtype=float), atol=1e-6)
    for m, n in zip(a.metrics, b.metrics, strict=True):
        np.testing.assert_allclose([float(o) for o in m], [float(o) for o in n], atol=1e-6)
