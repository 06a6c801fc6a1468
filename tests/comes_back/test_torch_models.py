"""What torch makes of modules and functions: TorchScript is refused by name, a scripted loss trains (models that it
parametrizes: cases/held.py)"""
import pytest, torch
from torch import nn
from fastddp.all import *
from cases.held import MODELS
from parity import assert_same, learner, mlp, seed, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def new(model, bs=4, **kwargs):
    seed()
    learn = learner(model=model(), bs=bs, **kwargs)
    learn.dls.valid.bs = 4
    return learn


@torch.jit.script
def squares(pred, y): return ((pred-nn.functional.one_hot(y, 3))**2).mean()


def test_a_scripted_loss(two):
    learn, one = new(mlp, loss_func=squares), new(mlp, bs=8, loss_func=squares)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    seed()
    one = new(mlp, bs=8, loss_func=squares)
    one.fit(1)
    assert_same(learn, one)
    assert learn.loss_func is squares


@pytest.mark.parametrize('model', [lambda: torch.jit.script(mlp()), lambda: torch.jit.trace(mlp(), torch.zeros(2, 4)),
                                   lambda: nn.Sequential(torch.jit.script(mlp()), nn.Linear(3, 3))])
def test_torchscript_is_refused_by_name(model):
    with pytest.raises(NotPicklable, match='learn.model.*a TorchScript module: train the module itself'):
        learner(model=model()).distrib_fit(1, nprocs=2)


def test_functions():
    net, x = MODELS['weight_norm'](), torch.ones(1, 4)
    for out in ranch(2, called, net, x): assert torch.allclose(out, net(x))


def called(net, x): return net(x).detach()
