"""What trials from outside found to differ from one process, in what a fit computes: each is the same answer now, or
named."""
import gc
from functools import partial
import pytest, torch
import torch.nn.functional as F
from fastai.callback.core import Callback, CancelBatchException, CancelEpochException
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import Perplexity, accuracy
from fastai.optimizer import Adam, OptimWrapper
from torch import nn
from fastddp.base import group
from fastddp.base.errors import WorkerError
from fastddp.launch.engine import InProcess
from fastddp.launch.local import Local
from losses import RMSE, numbers
from parity import (Collect, Steps, alone_like, assert_ranks_alike, assert_same, fit_both, items, largest, learner, mlp,
                    seed, warm)
from spread import long_but
from test_drift import Sam

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=long_but([2, 3], 3))
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


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


@pytest.mark.holds('Weights', "A callback that leaves items out of a batch, or doubles it; rows that are no items "
                   "(nodes of graphs): also where a rank has none left")
@pytest.mark.parametrize('cb', [LeavesOut, LeavesOutLate])
@pytest.mark.parametrize('loss', ['known', 'gathered'])
def test_a_callback_leaves_items_out(ranks, cb, loss):
    n, launcher = ranks
    how = dict(metrics=accuracy) if loss == 'known' else regression(loss_func=RMSE())
    learn, one = fit_both(learner(train=8*n, valid=21, bs=4, **how), n, launcher, 2, cbs=[cb()])
    assert_same(learn, one)


class LeavesMost(Collect):
    order = 60
    def before_batch(self):
        keep = self.x[:, 0] > .2
        self.note(keep.sum())
        self.learn.xb, self.learn.yb = (self.x[keep],), (self.y[keep],)


@pytest.mark.parametrize('loss', ['known', 'gathered'])
def test_a_worker_may_have_no_item_left(two, loss):
    how = dict(metrics=accuracy) if loss == 'known' else regression(loss_func=RMSE())
    learn, cb = learner(train=16, valid=16, bs=4, **how), LeavesMost()
    learn, one = fit_both(learn, 2, two, 2, cbs=[cb])
    assert [0.] in cb.ranks[0] and [0.] in cb.ranks[1]
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


@pytest.mark.holds('Losses', "Losses whose value is a mean and whose gradient is none; annealing counters in a "
                   "closure or an attribute; a term that the model keeps (`model.kl`) is named")
@pytest.mark.parametrize('loss', [lambda: ratio, annealed, Counts], ids=['ratio', 'annealed', 'counts'])
def test_losses_that_are_not_what_they_seem(ranks, loss):
    n, launcher = ranks
    learn = learner(train=8*n, loss_func=loss(), **regression())
    seed(1)
    one = alone_like(learn, n)
    one.loss_func = loss()      # what a closure counts comes back
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher)
    seed(1)
    one.fit(2)
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
    assert_same(learn, one)     # a mean over items, so the average is that of one process
    assert capfd.readouterr().out.count("doesn't come from predictions and targets") == 1


class AddsTerm(Callback):
    "A mean over items, to what is trained and to what is shown"
    def after_loss(self): add(self.learn, .1*self.pred.pow(2).mean())


def add(learn, term):
    for name in 'loss_grad', 'loss': setattr(learn, name, getattr(learn, name)+term)


@pytest.mark.holds('Losses', "What a callback adds to `learn.loss` (a mean over items) is in `valid_loss`, also where "
                   "the loss is computed over all predictions")
@pytest.mark.parametrize('metrics', [None, Perplexity], ids=['loss', 'perplexity'])
def test_a_term_that_a_callback_adds_is_in_the_validation_loss(ranks, metrics, capfd):
    "Also where the loss is computed over all predictions"
    n, launcher = ranks
    learn = learner(loss_func=RMSE(), metrics=metrics and metrics(), **regression())
    assert_same(*fit_both(learn, n, launcher, 2, cbs=[AddsTerm()]))
    assert capfd.readouterr().out.count('AddsTerm changes the loss') == 1


def assert_same_weights(learn, one):
    for p, q in zip(learn.model.parameters(), one.model.parameters()): assert (p-q).abs().max() < 1e-5


@pytest.mark.holds('Weights', "A second pass (SAM) with a loss that is no mean")
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

def lbfgs(params, lr, **kwargs): return OptimWrapper(params, torch.optim.LBFGS, lr=lr)


@pytest.mark.holds('Weights', "LBFGS, which decides by the loss that its closure returns, is refused")
def test_lbfgs_is_refused():
    "The loss of one worker would decide about its steps"
    with Local(gpus=[]) as launcher, pytest.raises(WorkerError, match='LBFGS decides by the loss'):
        learner(opt_func=lbfgs).distrib_fit(1, nprocs=2, launcher=launcher)


class SamOptimizer(torch.optim.Optimizer):
    "In two steps: `first_step` goes uphill, `second_step` back and along the gradient that is there"
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=.9)
    def params(self): return [p for g in self.param_groups for p in g['params'] if p.grad is not None]
    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.params()]).norm()
        for p in self.params():
            self.state[p]['old'] = p.clone()
            p.add_(p.grad*(.05/norm))
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for p in self.params(): p.copy_(self.state[p]['old'])
        self.base.step()
        self.zero_grad()


class InTwoSteps(Learner):
    def _do_grad_opt(self):
        self.loss_grad.backward()
        self.opt.opt.first_step()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.opt.opt.second_step()


def sam(params, lr, **kwargs): return OptimWrapper(params, SamOptimizer, lr=lr)


@pytest.mark.holds('Weights', "SAM in two steps (`first_step`, `second_step`), and `backward(create_graph=True)`")
@pytest.mark.parametrize('how', [{}, dict(regression(), loss_func=RMSE())], ids=['mean', 'gathered'])
def test_sam_in_two_steps(ranks, how):
    n, launcher = ranks
    learn, one = fit_both(learner(kind=InTwoSteps, opt_func=sam, **how), n, launcher, 2)
    assert_same_weights(learn, one)


class KeepsGraph(Learner):
    def _backward(self): self.loss_grad.backward(create_graph=True)


@pytest.mark.filterwarnings('ignore:Using backward')
def test_a_backward_pass_that_keeps_its_graph(ranks):
    n, launcher = ranks
    learn, one = fit_both(learner(kind=KeepsGraph), n, launcher, 2)
    assert_same_weights(learn, one)
    del learn, one
    gc.collect()


# Losses that are known only after their backward pass

class StepsByItself(Callback):
    "Trains in an event, tells the Recorder its loss, and leaves the batch"
    run_valid = False
    def before_batch(self):
        loss = F.cross_entropy(self.model(*self.xb), *self.yb)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.learn.loss = loss.detach()
        raise CancelBatchException


class NotesLossLate(Learner):
    "Its own code sets `loss` last"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        loss = F.cross_entropy(self.pred, *self.yb)
        if self.training:
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        self.loss = loss.detach().clone()


@pytest.mark.holds('Losses', "A loss that a callback or a learner sets after its own backward pass, also where one "
                   "rank makes none")
@pytest.mark.parametrize('how', [dict(cbs=StepsByItself), dict(kind=NotesLossLate)])
@pytest.mark.parametrize('batch', ['global', 'per_worker'])
def test_a_loss_that_is_set_after_its_backward_pass(ranks, how, batch):
    "The Recorder has that of the global batch"
    n, launcher = ranks
    made = {k: v() if k == 'cbs' else v for k, v in how.items()}
    assert_same(*fit_both(learner(**made), n, launcher, 2, batch=batch))


class SkipsOnOneRank(NotesLossLate):
    def _do_one_batch(self):
        if self.iter != 1 or group.rank() != 1: return super()._do_one_batch()
        self.pred = self.model(*self.xb)
        self.loss = F.cross_entropy(self.pred, *self.yb)


class NotesLosses(Collect):
    def after_batch(self):
        if self.training: self.note(self.learn.loss)


def test_a_loss_that_is_set_late_where_one_rank_makes_no_backward_pass(ranks):
    n, launcher = ranks
    cb = NotesLosses()
    learner(kind=SkipsOnOneRank).distrib_fit(1, nprocs=n, launcher=launcher, cbs=cb)
    assert_ranks_alike(cb.ranks)


# Between two fits

def in_halves(model): return [list(model[0].parameters()), list(model[2].parameters())]


@pytest.mark.holds('Weights', "A layer that was trained and then frozen goes on being decayed, as in fastai: its "
                   "gradient is zero, not None")
def test_a_layer_that_was_trained_and_then_frozen_goes_on_being_decayed(ranks):
    "Its gradient is zero, not None: in the next fit, on workers or in the notebook"
    n, launcher = ranks
    learn = learner(opt_func=Adam, wd=.1, splitter=in_halves)
    one = alone_like(learn, n)
    seed(1)
    for l, fit in (learn, partial(learn.distrib_fit, nprocs=n, launcher=launcher)), (one, one.fit):
        seed(1)
        l.unfreeze()
        fit(1)
        l.freeze()
        fit(1)
    assert_same(learn, one)
    assert learn.model[0].weight.grad is not None and not learn.model[0].weight.grad.any()
    was = learn.model[0].weight.clone()
    learn.fit(1)
    assert not torch.equal(was, learn.model[0].weight)


# Loaders

class Rows:
    def __init__(self, n): self.x, self.y = map(torch.stack, zip(*items(n)))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]


class ReadsSlices(DataLoader):
    def create_item(self, i): return i
    def create_batch(self, b): return tuple(t[b[0]:b[0]+self.bs] for t in (self.dataset.x, self.dataset.y))


class ReadsAll(ReadsSlices):
    def create_batch(self, b): return self.dataset.x[b], self.dataset.y[b]


@pytest.mark.holds('Batches', "A loader whose `create_batch` is your own or a library's may read a slice: workers get "
                   "whole batches")
@pytest.mark.parametrize('kind', [ReadsSlices, ReadsAll])
@pytest.mark.parametrize('batch', ['global', 'per_worker'])
def test_a_loader_that_reads_slices(ranks, kind, batch):
    "Each worker gets whole batches, in training as in validation; where one is divided, all read it"
    n, launcher = ranks
    learn = learner()
    learn.dls = DataLoaders(kind(Rows(37), bs=4), kind(Rows(21), bs=4))
    assert_same(*fit_both(learn, n, launcher, 2, batch=batch))
