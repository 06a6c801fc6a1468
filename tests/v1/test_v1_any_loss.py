"""Any loss of outputs and targets is that of one process, in fastai v1, too."""
import pytest
import torch.nn.functional as F
from learners_v1 import *
from fastddp.base.errors import CantDistribute


def squares(out, y): return ((out[:, 0]-y.float())**2).sum()/9
def root(out, y): return ((out[:, 0]-y.float())**2).mean().sqrt()
def weighted(out, y): return F.cross_entropy(out, y, weight=torch.tensor([1., 4.]))
def mean(out, y): return F.cross_entropy(out, y)


class Ignores(nn.Module):
    def forward(self, out, y): return F.cross_entropy(out, y, ignore_index=1)


LOSSES = dict(summed=partial(F.cross_entropy, reduction='sum'), squares=squares, root=root, weighted=weighted,
              mean=mean, ignores=Ignores())


@pytest.mark.parametrize('name', LOSSES)
def test_any_loss_is_that_of_one_process(name, capfd):
    two, one = pair(plain, lambda l: l.fit(2, 1e-2), loss_func=LOSSES[name], n=49)
    same_weights(two, one)
    same_recorder(two, one, 1e-4)
    assert capfd.readouterr().out.count('predictions of all workers') == (name != 'summed')


def test_the_option():
    two, one = plain(4, loss_func=root), plain(8, loss_func=root)
    seed(5)
    two.distrib_fit(1, 1e-2, nprocs=2, loss='gather')
    seed(5)
    one.fit(1, 1e-2)
    same_weights(two, one)
    with pytest.raises(CantDistribute, match="loss='max'"): two.distrib_fit(1, nprocs=2, loss='max')


class KeepsPenalty(nn.Module):
    "A model that keeps a term of its loss, as a variational autoencoder does"
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
    def forward(self, x):
        h = self.a(x)
        self.kl = h.pow(2).mean()
        return self.b(h)


def test_a_term_that_the_model_keeps_is_weighted_by_items_and_named(capfd):
    def make(**kwargs):
        learn = plain(**kwargs)
        learn.model = model = KeepsPenalty()
        learn.layer_groups = [model]
        learn.loss_func = lambda out, y: F.cross_entropy(out, y).sqrt() + .1*model.kl
        return learn
    two, one = pair(make, lambda l: l.fit(2, 1e-2), n=49)
    same_weights(two, one)
    same_recorder(two, one)
    assert capfd.readouterr().out.count("doesn't come from predictions and targets") == 1
