"""Each loss function is weighted, whole or averaged. What it keeps at any depth is as in one process, a module is
computed over all items wherever a callback calls it, and each line about a loss is true."""
import itertools
import pytest, torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from torch import nn
from as_written import Steps, Views, ctc_time, labelled, swav
from parity import Collect, alone_like, assert_ranks_alike, assert_same, fit_both, items, largest, learner, seed, warm
from test_metrics import Spread

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=[2, 3])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


# What a loss keeps

def in_a_closure():
    kept = dict(calls=0, mean=1.)
    def loss(p, y):
        kept['calls'] += 1
        ce = F.cross_entropy(p, y)
        kept['mean'] = .8*kept['mean']+.2*float(ce)
        return ce/kept['mean']*(1+kept['calls']/20)
    return loss


def in_an_iterator():
    "Two objects below the function"
    class Temperatures:
        def __init__(self): self.it = itertools.count(1)
    held = [Temperatures()]
    return lambda p, y: F.cross_entropy(p/(1+.05*next(held[0].it)), y)


class Weights:
    def __init__(self): self.t = 0
    def next(self):
        self.t += 1
        return 1/(1+.1*self.t)


class Anneals(nn.Module):
    "An object in a module"
    def __init__(self):
        super().__init__()
        self.w = Weights()
    def forward(self, p, y): return F.cross_entropy(p, y)*self.w.next()


class Ema(nn.Module):
    "A dict in a module"
    def __init__(self):
        super().__init__()
        self.ema = dict(ce=1.)
    def forward(self, p, y):
        ce = F.cross_entropy(p, y)
        self.ema['ce'] = .9*self.ema['ce']+.1*float(ce)
        return ce/self.ema['ce']


class Centers(nn.Module):
    "Plain tensors, and a list of them"
    def __init__(self):
        super().__init__()
        self.center, self.bank = torch.zeros(3), []
    def forward(self, p, y):
        self.center = .9*self.center+.1*p.detach().mean(0)
        self.bank.append(p.detach().mean(0))
        del self.bank[:-4]
        return F.cross_entropy(p-self.center+torch.stack(self.bank).mean(0), y)


class Plain:
    "A callable object with a function in its way"
    def __init__(self): self.inner = in_a_closure()
    def __call__(self, p, y): return self.inner(p, y).sqrt()


KEEPS = [in_a_closure, in_an_iterator, Anneals, Ema, Centers, Plain]


@pytest.mark.parametrize('make', KEEPS)
def test_a_state_at_any_depth_is_that_of_one_process(ranks, make, capfd):
    "In a validation, too; one line says that every worker validates all"
    n, launcher = ranks
    learn, one = (learner(train=8*n+1, loss_func=make()) for _ in range(2))
    one = alone_like(one, n)
    one.loss_func = make()
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher)
    said = capfd.readouterr().out
    seed(1)
    one.fit(2)
    assert_same(learn, one)
    assert said.count('changes a state of its own') == 1 and 'every worker validates all batches.' in said


@pytest.mark.parametrize('make', [in_a_closure, Centers])
def test_a_state_while_gradients_accumulate(two, make):
    learn, one = (learner(train=33, loss_func=make(), cbs=GradientAccumulation(16)) for _ in range(2))
    one = alone_like(one, 2)
    one.loss_func = make()
    for l, fit in (learn, lambda: learn.distrib_fit(2, nprocs=2, launcher=two)), (one, lambda: one.fit(2)):
        seed(1)
        fit()
    assert_same(learn, one)


class CachesWeights:
    "What its first call makes is no state: validations are divided"
    weight = None
    def __call__(self, p, y):
        if self.weight is None: self.weight = torch.ones(3)
        return F.cross_entropy(p, y, weight=self.weight)


def test_a_cache_is_no_state(two, capfd):
    learn, one = fit_both(learner(train=32, loss_func=CachesWeights()), 2, two, 2)
    assert_same(learn, one)
    assert 'changes a state' not in capfd.readouterr().out


# A module is computed over all items in every event

class Standardized(nn.Module):
    "What an item gets depends on all others"
    def forward(self, p, y): return F.cross_entropy((p-p.mean(0))/(p.std(0)+.1), y)


class Attacks(Collect):
    "An adversarial example, by the learner's loss; `by` says in which event"
    order = -5
    def __init__(self, event, scaled):
        super().__init__()
        self.scaled = scaled
        setattr(self, event, self.attack)
    def attack(self):
        if not self.training: return
        x = self.x.clone().requires_grad_()
        loss = self.learn.loss_func(self.model(x), self.y)
        self.note(loss)
        g, = torch.autograd.grad(loss, x)
        x = x.detach()+(.5*g if self.scaled else .3*g.sign())
        if hasattr(self, 'before_batch'): self.learn.xb = (x,)
        else: self.learn.loss_grad = self.learn.loss_grad+.5*self.learn.loss_func(self.model(x), self.y)


@pytest.mark.holds('Losses', "A loss module is computed over all items in every event of a batch in which a callback "
                   "calls it, and a gradient by the inputs is that of one process")
@pytest.mark.parametrize('event', ['before_batch', 'after_loss'])
@pytest.mark.parametrize('scaled', [False, True])
def test_a_loss_module_in_an_event_is_that_of_all_items(ranks, event, scaled):
    n, launcher = ranks
    cb, single = Attacks(event, scaled), Attacks(event, scaled)
    learn = learner(train=8*n+3, bs=4, loss_func=Standardized())
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[cb])
    seed(1)
    one.fit(2, cbs=[single])
    assert_same(learn, one)
    assert_ranks_alike(cb.ranks)
    assert largest(cb.ranks[0], single.rows) < 1e-5


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


# What a line says

@pytest.mark.holds('Limits', "Predictions whose dimension 0 isn't the items, or may not be (stacked views), are "
                   "averaged; the line says that a sum is divided by the number of workers")
def test_views_that_are_stacked_are_no_items(two, capfd):
    "As many views as items in each worker's batch"
    class Two(Views):
        def forward(self, x): return super().forward(x)[:2]
    learn = learner(train=32, valid=8, bs=2, model=Two(), loss_func=swav)
    assert_same(*fit_both(learn, 2, two, 2))
    said = capfd.readouterr().out
    assert 'as many entries in dimension 1 as in dimension 0' in said and said.count('averaged over workers') == 1


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


# Texts whose rows differ between workers

class Padded(Callback):
    "Each worker pads to the longest text of its part: predictions don't fit together"
    order = -5
    def before_batch(self):
        n = 2+int((self.x[:, 0] > 0).sum())
        self.learn.xb = (self.x.repeat(1, n),)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
    def forward(self, x): return self.lin(x.view(len(x), -1, 4))


def test_a_replayed_metric_of_training_where_parts_dont_fit(ranks, capfd):
    n, launcher = ranks
    learn = learner(train=8*n, model=Mean(), loss_func=lambda p, y: F.cross_entropy(p.mean(1), y), cbs=Padded(),
                    metrics=Spread())
    learn.recorder.train_metrics = True
    learn.distrib_fit(1, nprocs=n, launcher=launcher)
    assert learn.recorder.values[0][1] > 0
