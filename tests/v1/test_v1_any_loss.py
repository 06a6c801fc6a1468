"""Losses of fastai v1 on workers: weighted, or averaged with a line."""
import pytest
import torch.nn.functional as F
from learners_v1 import *
from fastddp.base.errors import CantDistribute


def squares(out, y): return ((out[:, 0]-y.float())**2).sum()/9
def root(out, y): return ((out[:, 0]-y.float())**2).mean().sqrt()
def mean(out, y): return F.cross_entropy(out, y)


# the loss, the option, and what is said: torch's own are weighted by what they are a mean over
LOSSES = dict(known=(nn.CrossEntropyLoss(weight=torch.tensor([1., 4.])), 'auto', 0),
              ignores=(nn.CrossEntropyLoss(ignore_index=1), 'auto', 0),
              summed=(partial(F.cross_entropy, reduction='sum'), 'auto', 0), mean=(mean, 'auto', 1),
              told=(mean, 'mean', 0), squares=(squares, 'sum', 0))


@pytest.mark.parametrize('name', LOSSES)
def test_a_known_loss_a_mean_and_a_sum_are_those_of_one_process(name, capfd):
    f, option, said = LOSSES[name]
    two, one = plain(4, loss_func=f, n=49), plain(8, loss_func=f, n=49)
    seed(5)
    two.distrib_fit(2, 1e-2, nprocs=2, loss=option)
    seed(5)
    one.fit(2, 1e-2)
    same_weights(two, one)
    same_recorder(two, one, 1e-4)
    assert capfd.readouterr().out.count('averaged over workers') == said


def test_any_other_trains_and_a_line_says_what_follows(capfd):
    learn = plain(4, loss_func=root)
    learn.distrib_fit(1, 1e-2, nprocs=2)
    said = capfd.readouterr().out
    assert "root is a loss that fastddp doesn't know. It is averaged over workers, weighted by items" in said
    assert "a sum over items is divided by 2. If it is a sum, pass loss='sum'." in said


@pytest.mark.parametrize('loss', ['max', 'gather'])
def test_what_the_option_may_not_be(loss):
    with pytest.raises(CantDistribute, match=f"loss='{loss}'"): plain(4).distrib_fit(1, nprocs=2, loss=loss)


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
        learn.loss_func = lambda out, y: F.cross_entropy(out, y) + .1*model.kl
        return learn
    two, one = pair(make, lambda l: l.fit(2, 1e-2), n=49)
    same_weights(two, one)
    same_recorder(two, one)
    assert capfd.readouterr().out.count("doesn't come from predictions and targets") == 1
