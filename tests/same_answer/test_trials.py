"""What trials from outside found to differ from one process, in what a fit computes: each is the same answer now, or
named."""
import gc
import pytest, torch
import torch.nn.functional as F
from fastai.callback.core import Callback, CancelEpochException
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper
from torch import nn
from fastddp.launch.engine import InProcess
from losses import RMSE, numbers
from parity import Steps, assert_ranks_alike, assert_same, fit_both, learner, mlp, warm
from test_drift import Sam

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=[2, 3])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


def regression(**kwargs): return dict(data=numbers, model=mlp(n_out=1), **kwargs)


# Batches that a callback changes

class LeavesOut(Callback):
    "Missing labels, hard examples: some items of a batch don't go on"
    order = 60
    def before_batch(self):
        keep = self.x[:, 0] > -.3
        self.learn.xb, self.learn.yb = (self.x[keep],), (self.y[keep],)


class LeavesOutLate(Callback):
    order = 60
    def after_pred(self):
        keep = self.x[:, 0] > -.3
        self.learn.pred, self.learn.yb = self.pred[keep], (self.y[keep],)


@pytest.mark.parametrize('cb', [LeavesOut, LeavesOutLate])
@pytest.mark.parametrize('loss', ['known', 'gathered'])
def test_a_callback_leaves_items_out(ranks, cb, loss):
    n, launcher = ranks
    how = dict(metrics=accuracy) if loss == 'known' else regression(loss_func=RMSE())
    learn, one = fit_both(learner(train=8*n, valid=21, bs=4, **how), n, launcher, 2, cbs=[cb()])
    assert_same(learn, one)


class Doubles(Callback):
    order = 60
    def before_batch(self):
        self.learn.xb, self.learn.yb = (torch.cat([self.x, -self.x]),), (torch.cat([self.y, self.y]),)


@pytest.mark.parametrize('how', ['mean', 'sum', 'accumulating'])
def test_a_callback_doubles_the_batch(ranks, how):
    n, launcher = ranks
    kwargs = dict(mean={}, sum=dict(loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.005),
                  accumulating=dict(cbs=GradientAccumulation(16*n)))[how]
    assert_same(*fit_both(learner(train=37, bs=4, **kwargs), n, launcher, 2, cbs=[Doubles()]))


class Nodes(Callback):
    "A batch of graphs: each item has as many rows as its class says"
    order = 60
    def before_batch(self):
        rows = torch.arange(len(self.y)).repeat_interleave(self.y+1)
        self.learn.xb, self.learn.yb = (self.x[rows],), (self.y[rows],)


def test_rows_that_are_no_items(ranks):
    n, launcher = ranks
    assert_same(*fit_both(learner(), n, launcher, 2, cbs=[Nodes()]))


# Losses

def ratio(pred, y):
    "Its value is a mean, its gradient is none"
    a, b = F.mse_loss(pred, y), pred.var()+1
    return a + b*(a/b).detach()


def annealed():
    "Counts its calls in a closure"
    calls = [0]
    def loss(pred, y):
        calls[0] += torch.is_grad_enabled()
        return F.mse_loss(pred, y)*min(1, calls[0]/8)
    return loss


class Counts:
    "Counts in a plain attribute and a list"
    def __init__(self): self.n, self.seen = 0, []
    def __call__(self, pred, y):
        self.n += torch.is_grad_enabled()
        self.seen.append(len(y))
        return F.mse_loss(pred, y)/(1+.1*self.n)


@pytest.mark.parametrize('loss', [lambda: ratio, annealed, Counts], ids=['ratio', 'annealed', 'counts'])
def test_losses_that_are_not_what_they_seem(ranks, loss):
    n, launcher = ranks
    learn, one = fit_both(learner(train=8*n, loss_func=loss(), **regression()), n, launcher, 2)
    assert_same(learn, one)


class KeepsPenalty(nn.Module):
    "A model that keeps a term of its loss, as a variational autoencoder does"
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        h = self.a(x)
        self.kl = h.pow(2).mean()
        return self.b(h)


class WithPenalty(Callback):
    "The loss reads what the model keeps"
    def before_fit(self):
        model = self.learn.model
        self.learn.loss_func = lambda pred, y: F.mse_loss(pred, y) + .1*model.kl


def test_a_term_that_the_model_keeps_is_weighted_by_items_and_named(ranks, capfd):
    n, launcher = ranks
    how = dict(regression(), model=KeepsPenalty())
    learn, one = fit_both(learner(**how), n, launcher, 2, cbs=[WithPenalty()])
    # a mean over items, so the average is that of one process; in validation rank 0's own is taken
    assert_same_weights(learn, one)
    assert capfd.readouterr().out.count("doesn't come from predictions and targets") == 1


def assert_same_weights(learn, one):
    for p, q in zip(learn.model.parameters(), one.model.parameters()): assert (p-q).abs().max() < 1e-5


@pytest.mark.parametrize('event', ['before_step', 'after_backward'])
def test_a_second_pass_with_a_loss_that_is_no_mean(ranks, event):
    n, launcher = ranks
    steps = Steps()
    learn, one = fit_both(learner(loss_func=RMSE(), **regression()), n, launcher, 2, cbs=[Sam(event), steps])
    assert_same(learn, one)
    assert_ranks_alike(steps.ranks)


def test_after_an_epoch_that_is_left_the_loss_is_the_learners_own(ranks):
    "Also where the batch in which it was gathered was left by an exception"
    n, launcher = ranks
    leave = LeavesEpoch()
    learn, one = fit_both(learner(train=16*n, loss_func=Counts(), **regression()), n, launcher, 3, cbs=[leave])
    assert_same(learn, one)
    assert leave.kinds == ['Counts']*3


class LeavesEpoch(Callback):
    order = 51
    def before_fit(self): self.kinds = []
    def before_epoch(self): self.kinds.append(type(self.learn.loss_func).__name__)
    def after_loss(self):
        if self.training and self.epoch == 0 and self.iter == 1: raise CancelEpochException()


def test_one_rank_alone_may_load(tmp_path):
    learn = learner(path=tmp_path, cbs=SaveModelCallback())
    learn.distrib_fit(2, launcher=InProcess())
    assert (tmp_path/'models'/'model.pth').exists()


# Steps of one's own

class WithClosure(Learner):
    "`step(closure)`, as LBFGS wants it"
    def _do_one_batch(self):
        if not self.training: return super()._do_one_batch()
        def closure():
            self.opt.zero_grad()
            self.pred = self.model(*self.xb)
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.clone()
            self.loss_grad.backward()
            return self.loss_grad
        self.opt.opt.step(closure)


def lbfgs(params, lr, **kwargs): return OptimWrapper(params, torch.optim.LBFGS, lr=lr, max_iter=3)


def test_a_step_with_a_closure(ranks):
    n, launcher = ranks
    learn, one = fit_both(learner(train=8*n, bs=4, kind=WithClosure, opt_func=lbfgs), n, launcher, 2)
    assert_same_weights(learn, one)
    del learn, one
    gc.collect()
