"Losses: what is said of them, what callbacks see of them, and what fails. What they give is in the table of cases."
import pytest, torch
import torch.nn.functional as F
from fastai.callback.core import Callback, CancelBatchException
from fastai.metrics import Perplexity
from fastai.optimizer import OptimWrapper
from fastddp.base import group
from fastddp.base.device import OutOfMemory
from fastddp.base.errors import RankRaised, WorkerError
from fastddp.launch.local import Local
from fastddp.shard import whole
from torch import nn
from cases import CASES
from cases.losses import Standardized, Steps, ctc_time, labelled
from cases.steps import NotesLossLate
from losses import numbers
from parity import (Collect, alone_like, assert_ranks_alike, assert_same, fit_both, largest, learner, mlp, seed, warm)
from test_decisions import EVENTS, AtEnd, Leave

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=[2, 3])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def made(name, **more): return CASES[name].learner(**more)


# What is seen in events

class SeesItsLoss(Callback):
    "In every event of a batch the loss function is the user's own object"
    def __init__(self, loss_func): self.is_mine, self.seen = None, set()
    def before_fit(self): self.mine = self.learn.loss_func
    def __call__(self, event):
        if event != 'before_fit' and hasattr(self, 'mine'):
            assert self.learn.loss_func is self.mine, event
            self.seen.add(event)
        return super().__call__(event)


@pytest.mark.holds('Losses', "`learn.loss_func` is your own object in every event of a batch")
@pytest.mark.parametrize('name', ['dice_of_a_batch', 'focal', 'annealed_by_a_callback', 'multi_task'])
def test_the_loss_function_is_the_users_own_in_every_event(ranks, name):
    n, launcher = ranks
    learn = made(name)
    sees = SeesItsLoss(learn.loss_func)
    learn.distrib_fit(1, nprocs=n, launcher=launcher, cbs=[sees])
    assert {'before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_step', 'after_batch'} <= sees.seen


class OnlyRank0(Callback):
    "Computes a loss that no other rank does"
    rank0_only = True
    def after_pred(self):
        if self.training: self.seen = float(self.learn.loss_func(self.pred.detach(), self.y))


def test_a_callback_of_rank_0_computes_the_loss_of_its_items(ranks):
    n, launcher = ranks
    cb = OnlyRank0()
    learn, one = fit_both(learner(train=8*n, loss_func=Standardized()), n, launcher, 1, ddp=dict(timeout=30), cbs=[cb])
    assert_same(learn, one)
    assert cb.seen > 0


class SkipsOnOneRank(NotesLossLate):
    def _do_one_batch(self):
        if self.iter != 1 or group.rank() != 1: return super()._do_one_batch()
        self.pred = self.model(*self.xb)
        self.loss = F.cross_entropy(self.pred, *self.yb)


class NotesLosses(Collect):
    def after_batch(self):
        if self.training: self.note(self.learn.loss)


@pytest.mark.filterwarnings('default:fastddp')      # that rank makes no step, so its weights differ
def test_a_loss_that_is_set_late_where_one_rank_makes_no_backward_pass(ranks):
    n, launcher = ranks
    cb = NotesLosses()
    learner(kind=SkipsOnOneRank).distrib_fit(1, nprocs=n, launcher=launcher, cbs=cb)
    assert_ranks_alike(cb.ranks)


LEAVES = [o for o in EVENTS if not o[4] and o[0] in ('before_batch', 'after_pred', 'after_loss', 'after_batch')]


@pytest.mark.holds('Losses', "A rank that leaves a batch before its loss blocks no other rank")
@pytest.mark.few(4)
@pytest.mark.spread('event kind')
@pytest.mark.parametrize('event,kind,at,epoch,valid', LEAVES)
def test_one_rank_leaves_while_others_wait_for_its_predictions(two, event, kind, at, epoch, valid):
    learn, end = made('rmse', train=33, valid=21, bs=3), AtEnd()
    one = alone_like(learn, 2)
    seed(1)
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=[end, Leave(event, kind, 1, at, epoch, valid)])
    assert_ranks_alike(end.ranks)
    single = AtEnd()
    seed(1)
    one.fit(2, cbs=[single, Leave(event, kind, 0, at, epoch, valid)])
    assert end.ranks[0][0][0] == single.rows[0][0]
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5


class Draws(nn.Module):
    "Draws, and keeps a buffer, an attribute and a list; a mean over items in all else"
    def __init__(self):
        super().__init__()
        self.register_buffer('center', torch.zeros(1))
        self.calls, self.seen = 0, []
    def forward(self, pred, y):
        self.calls += self.training
        if self.training: self.center.lerp_(y.mean(), .1)
        self.seen.append(len(y))
        return F.mse_loss(pred, y) + (pred-self.center).abs().mean()


class Kept(Collect):
    "What the loss function holds at the end of training, on each rank"
    def before_fit(self): self.rows = []
    def after_train(self): self.note(self.learn.loss_func.calls, self.learn.loss_func.center, torch.rand(()))


@pytest.mark.holds('Losses', "A loss function is called as often as in one process, so its counters, attributes and "
                   "running means are those of one process, at any depth: in closures, dicts, lists, iterators, "
                   "objects in modules; also if its first call with the whole batch failed")
def test_what_a_loss_keeps_is_as_in_one_process(ranks):
    n, launcher = ranks
    kept, single = Kept(), Kept()
    learn = learner(loss_func=Draws(), data=numbers, model=mlp(n_out=1), metrics=Perplexity())
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[kept])
    seed(1)
    one.fit(2, cbs=[single])
    assert_same(learn, one)
    assert largest([r[:2] for r in kept.ranks[0]], [r[:2] for r in single.rows]) < 1e-6
    for rank in kept.ranks: assert largest([r[1] for r in rank], [r[1] for r in single.rows]) < 1e-6
    assert len({r[-1][2] for r in kept.ranks}) == n     # a probe leaves each rank its own random stream
    assert largest([learn.loss_func.center], [one.loss_func.center]) < 1e-6


@pytest.mark.holds('Losses', "Random losses of all these kinds")
@pytest.mark.parametrize('how_many', [4, pytest.param(12, marks=pytest.mark.full)])
def test_some_random_losses(how_many):
    from random_losses import main
    assert main(how_many, 0)


# What is said

def sums(p, y): return ctc_time(p, y)*len(y)


def test_a_sum_whose_items_are_not_in_dimension_0_is_told_that_it_is_divided(two, capfd):
    learn = learner(train=16, valid=8, bs=4, data=labelled, model=Steps(True), loss_func=sums, lr=.001)
    one = alone_like(learn, 2)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    said = capfd.readouterr().out
    assert 'No prediction for sums is a tensor' in said
    assert "a sum over items is divided by 2. If it is a sum, pass loss='sum'." in said and 'reads more' not in said
    learn.model.load_state_dict(one.model.state_dict())
    assert_same(*fit_both(learn, 2, two, 1, ddp=dict(loss='sum')))


def test_the_bytes_of_a_small_batch(two, capfd):
    "Three scores and a class for each of four items"
    learner(train=4, valid=1, bs=2, loss_func=lambda p, y: F.cross_entropy(p, y)).distrib_fit(1, nprocs=2, launcher=two)
    assert f'{4*(3*4+8)} bytes to exchange per step' in capfd.readouterr().out


class Queue:
    "Keeps all targets that it was called with, and reads the inputs"
    def __init__(self): self.seen, self.calls = [], 0
    def __call__(self, p, y):
        self.calls += 1
        self.seen.append(len(y))
        return (torch.nn.functional.cross_entropy(p, y, reduction='none')*self.learn.x[:, 0].abs()).mean()


def test_what_a_failed_call_has_changed_is_undone(ranks, capfd):
    "The first call with the items of all workers counts as none, also in a list"
    n, launcher = ranks
    queue = Queue()
    learn = learner(train=32*n, valid=8, bs=4, loss_func=queue)
    queue.learn = learn
    learn.distrib_fit(1, nprocs=n, launcher=launcher)
    said = capfd.readouterr().out
    assert 'With the predictions and targets of all workers, Queue raised RuntimeError (The size of tensor' in said
    assert queue.calls == len(queue.seen) == 8+2 and f'divided by {n}' in said


class Accumulates(Callback):
    "Steps every `n` items, not derived from fastai's callback"
    def __init__(self, n): self.n = n
    def before_fit(self): self.count = 0
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad*len(self.x)/self.n
    def before_step(self):
        self.count += len(self.x)
        if self.count < self.n: raise CancelBatchException()
        self.count = 0


@pytest.mark.holds('Limits', "Accumulation that isn't derived from fastai's `GradientAccumulation`: a line names the "
                   "callback")
def test_accumulation_of_ones_own_is_named(ranks, capfd):
    n, launcher = ranks
    learner(train=96, bs=4).distrib_fit(1, nprocs=n, launcher=launcher, cbs=[Accumulates(16)])
    assert capfd.readouterr().out.count('Accumulates leaves batches before their step') == 1


# What fails

def wrong(p, y): return p.no_such_method(y)
def wrong_shape(p, y): return (p-torch.zeros(5, 7)).mean()


@pytest.mark.parametrize('loss_func,says', [(wrong, 'no_such_method'), (wrong_shape, 'The size of tensor')])
def test_a_mistake_in_a_loss_is_shown(loss_func, says):
    with pytest.raises(RankRaised, match=says) as e:
        learner(loss_func=loss_func).distrib_fit(1, nprocs=2)
    assert 'all workers' not in str(e.value).splitlines()[0]


def test_gather_that_was_asked_for_keeps_raising():
    with pytest.raises(RankRaised, match='batch_size'):
        made('distillation_of_kept_predictions').distrib_fit(1, nprocs=2, loss='gather')


def too_large(pred, y):
    "Rank 1 has no room for what the predictions of both ranks need"
    if group.rank() == 1 and len(pred) > 4: raise OutOfMemory('CUDA out of memory. Tried to allocate 2.00 GiB')
    return (pred-y).std()


@pytest.mark.full
def test_memory_that_a_loss_lacks_is_no_sign_of_what_it_reads(capfd):
    learn = made('rmse', train=16, valid=8)
    learn.loss_func = too_large
    with pytest.raises(RankRaised, match='CUDA out of memory') as e: learn.distrib_fit(1, nprocs=2, timeout=60)
    assert e.value.rank == 1
    assert 'averaged over workers' not in capfd.readouterr().out


class NoCopies:
    _backward_cls = whole._ScaleGradient._backward_cls
    def apply(self, *args): raise ValueError('no copy of this tensor')


class CantJoin(Callback):
    "Rank 1 can't put the tensors of all ranks together"
    def before_fit(self):
        if group.rank() == 1: whole._ScaleGradient = NoCopies()


def test_a_rank_that_cant_join_lists_keeps_none_waiting(capfd):
    "Its targets are lists, which the ranks exchange after the tensors"
    learn, one = made('detection'), alone_like(made('detection'), 2)
    seed(1)
    learn.distrib_fit(1, nprocs=2, timeout=20, cbs=[CantJoin()])
    seed(1)
    one.fit(1)
    assert_same(learn, one)     # a mean over items, so that the average is exact
    assert 'averaged over workers' in capfd.readouterr().out


def lbfgs(params, lr, **kwargs): return OptimWrapper(params, torch.optim.LBFGS, lr=lr)


@pytest.mark.holds('Weights', "LBFGS, which decides by the loss that its closure returns, is refused")
def test_lbfgs_is_refused():
    "The loss of one worker would decide about its steps"
    with Local(gpus=[]) as launcher, pytest.raises(WorkerError, match='LBFGS decides by the loss'):
        learner(opt_func=lbfgs).distrib_fit(1, nprocs=2, launcher=launcher)
