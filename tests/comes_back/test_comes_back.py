"""After a distributed fit the notebook has what a local fit would have left, in every corner; and nothing else."""
from functools import partial
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastcore.basics import noop
from fastai.data.all import Pipeline, Transform
from fastai.optimizer import Lookahead, OptimWrapper, SGD
from torch import nn
from parity import assert_same, items, largest, learner, loaders, seed, alone_like, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Counting(torch.optim.SGD):
    "Its rate falls by what it counts in an attribute of its own; it keeps a tensor, too"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.slow, self.seen = 0, torch.zeros(3), []
    def step(self, closure=None):
        self.count += 1
        self.slow += 1
        self.seen.append(self.count)
        for g in self.param_groups: g['lr'] = .1/self.count
        return super().step(closure)


def lookahead(*args, **kwargs): return Lookahead(SGD(*args, **kwargs), k=4)


@pytest.mark.parametrize('opt_func', [lookahead, partial(OptimWrapper, opt=Counting)],
                         ids=['lookahead', 'own'])
def test_an_optimizers_own_attributes_go_on(opt_func, two):
    "Two fits of an epoch are one process's two"
    learn = learner(opt_func=opt_func)
    one = alone_like(learn, 2)
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        learn.fit(1)
    seed(1)
    one.fit(1)
    one.fit(1)
    assert_same(learn, one)
    a, b = (getattr(o.opt, 'opt', o.opt) if 'count' not in vars(o.opt) else o.opt for o in (learn, one))
    assert a.count == b.count > 0
    if hasattr(b, 'seen'): assert (a.seen, a.slow.tolist()) == (b.seen, b.slow.tolist())


def grads(learn): return [torch.zeros_like(p) if p.grad is None else p.grad for p in learn.model.parameters()]


def test_gradients_that_accumulation_left_travel_both_ways(two):
    "37 items, 16 of which make a step: 5 are left, and go into the next fit's first step"
    learn = learner(cbs=GradientAccumulation(16))
    one = alone_like(learn, 2)
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        first = [g.clone() for g in grads(learn)]
        learn.fit(1)
    seed(1)
    one.fit(1)
    assert largest(first, grads(one)) < 1e-6 < max(float(g.abs().max()) for g in first)
    one.fit(1)
    assert_same(learn, one)
    assert largest(grads(learn), grads(one)) < 1e-6


class FreezesLate(Callback):
    "Trains all in the first epoch, then only the last layer"
    def before_epoch(self): self.learn.unfreeze() if self.epoch == 0 else self.learn.freeze()


def two_groups(model): return [[*model[0].parameters()], [*model[2].parameters()]]


def test_what_was_trained_and_is_frozen_decays_as_in_fastai(two):
    "Its gradient is zero, not None: within a fit, from one fit to the next, and in the notebook"
    learn = learner(splitter=two_groups, wd=.1)
    one = alone_like(learn, 2, 'global')
    def on_workers(*args, **kwargs): learn.distrib_fit(*args, nprocs=2, launcher=two, batch='global', **kwargs)
    for o, fit in (learn, on_workers), (one, one.fit):
        seed(1)
        fit(2, cbs=FreezesLate())
        for _ in range(2): fit(1)
    assert_same(learn, one)
    for o in learn, one:
        seed(2)
        o.fit(1)
    assert_same(learn, one)


class Grows(Callback):
    "A buffer, a layer with its optimizer, an attribute"
    def before_fit(self):
        if hasattr(self.model, 'ema'): return
        self.model.register_buffer('ema', torch.zeros(3))
        self.model.append(nn.Linear(3, 3))
        self.learn.create_opt()
        self.opt.set_hypers(lr=.05)
    def after_epoch(self):
        self.model.ema += 1
        self.model[0].epochs = self.epoch+1


def test_a_model_that_grows(two):
    learn = learner()
    model, first = learn.model, learn.model[0]
    for _ in range(2): learn.distrib_fit(2, nprocs=2, launcher=two, cbs=Grows())
    assert learn.model is model and model[0] is first and len(model) == 4
    assert (model.ema.tolist(), first.epochs) == ([4]*3, 2)
    assert {*map(id, model.parameters())} == {id(p) for pg in learn.opt.param_lists for p in pg}
    learn.fit(1)


class Holds(nn.Module):
    "A layer that can't travel"
    def __init__(self):
        super().__init__()
        self.layer, self.file = nn.Linear(3, 3), open('/dev/null')
    def forward(self, x): return self.layer(x)


class GrowsBadly(Callback):
    def before_fit(self):
        self.model[0].told = 'something'
        self.model.append(Holds())
        self.learn.create_opt()


def test_a_model_that_grows_by_what_cannot_travel_leaves_the_learner_as_it_was(two):
    learn = learner()
    learn.fit(1)
    before, model, opt = [p.clone() for p in learn.model.parameters()], learn.model, learn.opt
    with pytest.warns(UserWarning, match='the model got 3.layer.weight, 3.layer.bias in the fit, which can.t be loaded '
                                         'here; the learner is as before the fit'):
        learn.distrib_fit(2, nprocs=2, launcher=two, cbs=GrowsBadly())
    assert (learn.model, learn.opt, len(model)) == (model, opt, 3) and not hasattr(model[0], 'told')
    for a, b in zip(before, model.parameters(), strict=True): assert torch.equal(a, b)
    learn.fit(1)


class Leaves(Callback):
    "Sets attributes everywhere, and goes"
    def before_fit(self):
        self.model.told, self.dls.told, self.dls.train_ds.told = 'model', ['dls'], 'dataset'
        self.dls.train.after_batch.fs[0].told = 'transform'
    def after_fit(self):
        self.file = open('/dev/null')
        self.file.close()
        self.learn.add_cb(Comes())
        self.learn.remove_cb(self)


class Comes(Callback): pass


class Items(list): pass


def test_attributes_and_callbacks_that_come_and_go(two):
    learn = learner(data=lambda *a, **k: Items(items(*a, **k)))
    learn.dls.train.after_batch = Pipeline([Transform(noop)])
    cb, ds = Leaves(), learn.dls.train_ds
    learn.add_cb(cb)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert (learn.model.told, learn.dls.told) == ('model', ['dls'])
    assert cb not in learn.cbs and [type(o) for o in learn.cbs].count(Comes) == 1 and cb.file.closed
    assert learn.dls.train_ds is ds and learn.dls.train.after_batch.fs[0].told == 'transform'


class OtherData(Callback):
    def before_fit(self): self.learn.dls = loaders(items(24, s=5), items(9, s=6), 6)


def test_exchanged_loaders(two):
    learn = learner()
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=OtherData())
    assert (len(learn.dls.train_ds), len(learn.dls.valid_ds), learn.dls.train.bs) == (24, 9, 6)
    learn.fit(1)


def test_callbacks_get_nothing_extra(two):
    learn, one = learner(cbs=GradientAccumulation(8)), learner(cbs=GradientAccumulation(8))
    learn.distrib_fit(1, nprocs=2, launcher=two)
    one.fit(1)
    assert [{*vars(cb)} for cb in learn.cbs] == [{*vars(cb)} for cb in one.cbs]
