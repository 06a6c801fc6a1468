"""Ranks can't go apart: changed gradients are averaged before the step, and weights are compared after each epoch."""
from functools import partial
import pytest, torch
from fastai.callback.core import Callback
from fastai.optimizer import SGD, Optimizer, weight_decay
from torch import nn
from parity import Collect, assert_ranks_alike, assert_same, fit_both, learner, mlp, seed, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture(scope='module')
def three():
    with warm(3) as launcher: yield launcher


# Weights that went apart

class Weights(Collect):
    "Notes the weights of each rank at the beginning of each validation"
    def before_fit(self): self.rows = []
    def before_validate(self): self.note(*(p.detach().double().pow(2).sum() for p in self.learn.model.parameters()))


class Reset(Callback):
    "A new last layer in each epoch"
    def before_epoch(self): self.model[2].reset_parameters()


class Noise(Callback):
    def after_step(self):
        for p in self.model.parameters(): p.data.add_(torch.randn_like(p)*.01)


class RateOfBatch(Callback):
    "A learning rate that is set from what this rank sees"
    def after_loss(self):
        if self.training: self.opt.set_hyper('lr', float(self.xb[0].abs().mean())/10)


def langevin(p, lr, **kwargs): p.data.add_(torch.randn_like(p), alpha=lr*.1)


def sgld(params, **kwargs): return Optimizer(params, [weight_decay, langevin], lr=.05)


class Noisy(nn.Sequential):
    "Its hook makes its own weights differ"
    def __init__(self):
        super().__init__(*mlp())
        self.register_forward_pre_hook(jitter)


def jitter(module, _):
    if module.training: module[0].bias.data.uniform_(-.1, .1)


# name -> (what the learner is made with, who is named, what is said of it)
DRIFTS = {'reset': (dict(cbs=Reset), 'callback Reset draws random numbers (reset_parameters)'),
          'noise': (dict(cbs=Noise), 'callback Noise draws random numbers (randn_like)'),
          'rate': (dict(cbs=RateOfBatch), 'callback RateOfBatch looks at its own part of the batch (xb)'),
          'sgld': (dict(opt_func=sgld), 'the optimizer (Optimizer) draws random numbers (randn_like)'),
          'hook': (dict(model=Noisy), 'a hook on the model draws random numbers (uniform_)')}


def made(model=None, cbs=None, **kwargs):
    return learner(model=model and model(), cbs=cbs and cbs(), **kwargs)


@pytest.mark.parametrize('case', DRIFTS)
def test_weights_that_drift_become_rank_0s_with_one_warning(case, two, capfd):
    kwargs, who = DRIFTS[case]
    learn, notes = made(**kwargs), Weights()
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=notes)
    assert_ranks_alike(notes.ranks)
    said = ' '.join(capfd.readouterr().err.split())
    epoch = 1 if case == 'reset' else 0       # DDP gives rank 0's weights to all when it is built
    assert said.count('drifted apart') == 1 and f'the end of epoch {epoch}.' in said and who in said, said


def test_ranks_that_stay_together_are_not_warned_of(two, capfd):
    learn, notes = learner(cbs=Weights()), None
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert_ranks_alike(learn.weights.ranks)
    assert 'drifted' not in capfd.readouterr().err
