"""Batches that can't be cut, such as those of graphs, train on workers as in one process: one rank has all of a batch,
and another one without a batch is fed the same, which doesn't count there."""
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn
from torch.nn.functional import mse_loss
from parity import assert_same, seed, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Graphs:
    "Tensors with a row for each node; `of` says to which graph it belongs"
    def __init__(self, sizes, g):
        self.x = torch.randn(sum(sizes), 4, generator=g)
        self.of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


class GraphLoader:
    "Batches of `sizes` graphs each. Every `joined` of them make one, as in one process"
    dataset = range(1)
    def __init__(self, sizes, joined=1): self.sizes, self.joined = sizes, joined
    def __len__(self): return -(-len(self.sizes)//self.joined)
    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        made = [(Graphs([2+i % 3 for i in range(n)], g), torch.randn(n, 1, generator=g)) for n in self.sizes]
        for i in range(0, len(made), self.joined): yield self.join(made[i:i+self.joined])
    def join(self, batches):
        res = batches[0][0]
        for b, _ in batches[1:]:
            res.of = torch.cat([res.of, b.of+res.of.max()+1])
            res.x = torch.cat([res.x, b.x])
        return res, torch.cat([y for _, y in batches])


class Pool(nn.Module):
    "A number for each graph"
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def forward(self, b):
        n = int(b.of.max())+1
        return torch.zeros(n, 1).index_add(0, b.of, self.net(b.x))


def root(pred, y): return mse_loss(pred, y).sqrt()


class TwoViews(Callback):
    "Each graph twice"
    order = 60
    def before_batch(self):
        b = self.x
        twice = Graphs.__new__(Graphs)
        twice.x, twice.of = torch.cat([b.x, b.x*.5]), torch.cat([b.of, b.of+b.of.max()+1])
        self.learn.xb, self.learn.yb = (twice,), (torch.cat([self.y, self.y]),)


def learner(sizes, loss, joined=1, cbs=None):
    seed()
    dls = DataLoaders(GraphLoader(sizes, joined), GraphLoader([2, 2]))
    learn = Learner(dls, Pool(), loss_func=loss, opt_func=SGD, lr=.02, cbs=cbs and cbs())
    learn.logger = lambda *_: None
    return learn


def views(n_acc): return [GradientAccumulation(n_acc), TwoViews()]


CASES = dict(known=(nn.MSELoss(), None), root=(root, None),
             accumulating=(nn.MSELoss(), lambda: GradientAccumulation(12)),
             two_views=(nn.MSELoss(), lambda: views(16)))


@pytest.mark.holds('Batches', "Batches that can't be cut, such as those of graphs: known losses, losses over all "
                   "predictions, `GradientAccumulation`, with several rows for each item")
@pytest.mark.spread
@pytest.mark.parametrize('sizes', [[8, 8, 4, 8], [8, 1, 8, 1], [1, 8, 8]])
@pytest.mark.parametrize('batch', ['global', 'per_worker'])
@pytest.mark.parametrize('case', CASES)
def test_batches_of_graphs(two, case, batch, sizes, capfd):
    loss, cbs = CASES[case]
    learn, one = learner(sizes, loss, 1, cbs), learner(sizes, loss, 2 if batch == 'per_worker' else 1, cbs)
    seed(1)
    learn.distrib_fit(2, nprocs=2, launcher=two, batch=batch)
    seed(1)
    one.fit(2)
    assert_same(learn, one)
    if batch == 'per_worker': assert 'averaged over workers' not in capfd.readouterr().out
