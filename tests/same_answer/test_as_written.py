"""Losses and outputs as people write them: each trains on workers with the answer of one process, or as an average that
a line names; none is an error."""
import copy
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastddp.base.errors import RankRaised
from as_written import AVERAGED, CASES, NAMED, made
from parity import Steps, alone_like, assert_ranks_alike, assert_same, fit_both, items, learner, mlp, seed, warm
from spread import long_but

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=[2, 3])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


HOW = {'per_worker': {}, 'global': dict(batch='global')}


def fit_as_made(name, n, launcher, how):
    "`(on workers, in one process)`, each made anew: a closure isn't copied with its learner"
    size = dict(bs=8) if how == 'global' else {}
    learn, one = made(name, **size), alone_like(made(name, **size), n, how)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, timeout=60, **HOW[how])
    seed(1)
    one.fit(2)
    return learn, one


@pytest.mark.holds('Losses', "Outputs of torch's `_pytree` (tuples, dicts, named tuples, outputs of transformers), "
                   "and dataclasses; lists with an entry for each item; sparse gradients; a loss that fails with the "
                   "predictions and targets of all workers (it reads more), or computes gradients (a gradient "
                   "penalty, a residual of an equation), is averaged over workers, and a line says what it saw and "
                   "what follows (tests/as_written.py)")
@pytest.mark.holds('Losses', "A loss function that changes a state of its own in each call: all workers validate all "
                   "batches, so that its state is that of one process. One that does so only in a validation: from "
                   "the second one on, and a line says so. What a first call makes, such as a cache, is no state")
@pytest.mark.spread('name')
@pytest.mark.parametrize('how', HOW)
@pytest.mark.parametrize('name', CASES)
def test_trains_on_workers(ranks, name, how, capfd):
    "The last batch has one item, so that ranks have none"
    n, launcher = ranks
    learn, one = fit_as_made(name, n, launcher, how)
    said = capfd.readouterr().out
    assert ('averaged over workers' in said) == (name in AVERAGED or name in NAMED)
    assert_same(learn, one, *((.05, .05) if name in AVERAGED else (2e-5, 2e-6)))


@pytest.mark.spread
# fastai counts the boxes of the first item, and divides a square root in place
@pytest.mark.parametrize('name', long_but(
    [o for o in CASES if 'detection' not in o and o != 'annealed_by_itself'],
    'data_class', 'masked_language_model', 'barlow_twins', 'label_smoothing', 'views_first', 'two_heads', 'survival'))
def test_while_gradients_accumulate(ranks, name):
    n, launcher = ranks
    learn = made(name, train=32)
    learn.add_cb(GradientAccumulation(8*n))
    learn, one = fit_both(learn, n, launcher, 2)
    if name not in AVERAGED: assert_same(learn, one, 2e-5, 2e-6)


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


class OwnLoop(Callback):
    "Trains without targets, as self-supervised callbacks do that compute the loss themselves"
    order = 20
    def before_batch(self): self.learn.yb = ()
    def after_pred(self):
        if not self.training: return
        (self.pred-self.x[:, :3]).pow(2).mean().backward()
        self.learn.opt.step()
        self.learn.opt.zero_grad()


def test_no_targets(ranks):
    n, launcher = ranks
    steps = Steps()
    learn = learner(train=36, bs=4)
    before = copy.deepcopy(learn.model.state_dict())
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[OwnLoop(), steps])
    assert_ranks_alike(steps.ranks)
    one = alone_like(learn, n)
    one.model.load_state_dict(before)
    one.opt = None
    seed(1)
    one.fit(1, cbs=[OwnLoop()])
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), learn.model.state_dict().values()))


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
        from fastai.callback.core import CancelBatchException
        self.count += len(self.x)
        if self.count < self.n: raise CancelBatchException()
        self.count = 0


@pytest.mark.holds('Limits', "Accumulation that isn't derived from fastai's `GradientAccumulation`: a line names the "
                   "callback")
def test_accumulation_of_ones_own_is_named(ranks, capfd):
    n, launcher = ranks
    learner(train=96, bs=4).distrib_fit(1, nprocs=n, launcher=launcher, cbs=[Accumulates(16)])
    assert capfd.readouterr().out.count('Accumulates leaves batches before their step') == 1
