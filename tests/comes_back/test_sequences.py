"""A random sequence of calls in one block leaves, bit by bit, what the same calls leave each by itself."""
import random
import pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.optimizer import Adam
from parity import Warm, learner, mlp, seed
from spread import long_but

pytestmark = pytest.mark.timeout(3000)


class Holds(Callback):
    "State that a fit changes, and that calls make larger and smaller"
    def __init__(self): self.bank, self.seen, self.at = [torch.zeros(3)], {}, None
    def after_batch(self):
        if self.training: self.bank[0] += 1; self.seen[self.train_iter] = float(self.bank[-1].sum())
    def before_epoch(self):
        if self.at == 'fail': raise ValueError('asked for')
        if self.at == 'stop': raise CancelFitException


def fit(learn, how): learn.fit(1+how.random.randrange(2), how.random.choice([.01, .05]))


def ending(at):
    def call(learn, how):
        learn.holds.at = at
        try: learn.fit(1)
        except ValueError: pass
        learn.holds.at = None
    return call


def edit(learn, how):
    with torch.no_grad(): [*learn.model.parameters()][how.random.randrange(4)].mul_(.5)


def exchange(learn, how):
    seed(how.random.randrange(9))
    learn.model, learn.opt = mlp(), None


def grow(learn, how):
    sizes = [how.random.choice([1, 100, 30_000]) for _ in range(how.random.choice([1, 120]))]
    learn.holds.bank += map(torch.ones, sizes)


def shrink(learn, how): del learn.holds.bank[1:]
def predict(learn, how): how.preds.append(learn.get_preds()[0])


CALLS = [fit, fit, fit, ending('fail'), ending('stop'), edit, exchange, grow, shrink, predict]


class How:
    def __init__(self, i): self.random, self.preds = random.Random(i), []


def run(i, block):
    learn, how = learner(train=16, valid=4, opt_func=Adam, cbs=Holds()), How(i)
    calls = [how.random.choice(CALLS) for _ in range(6)]
    seed(i)
    if block:
        with learn.distrib_ctx(nprocs=2, launcher=block):
            for call in calls: call(learn, how)
    else:
        for call in calls: call(learn, how)
    return learn, how


def state(learn, how):
    opt = [[*(v for v in s.values())] for s in learn.opt.state.values()] if learn.opt else []
    tensors = [*learn.model.state_dict().values(), *learn.holds.bank, *how.preds,
               *(v for s in opt for v in s if isinstance(v, torch.Tensor))]
    return [bytes(t.contiguous().numpy()) for t in tensors], learn.holds.seen, vars(learn.recorder).get('values')


class Single:
    "A learner each of whose calls is in a block of its own"
    def __init__(self, learn, launcher): vars(self).update(learn=learn, launcher=launcher)
    def __getattr__(self, k):
        v = getattr(self.learn, k)
        if k not in ('fit', 'get_preds'): return v
        def call(*args):
            with self.learn.distrib_ctx(nprocs=2, launcher=self.launcher): return getattr(self.learn, k)(*args)
        return call
    def __setattr__(self, k, v): setattr(self.learn, k, v)


@pytest.mark.parametrize('seeds', long_but([range(3), range(3, 500)], range(3)), ids=['few', 'many'])
def test_random_sequences(seeds):
    launcher = Warm()       # a failing fit may end its workers
    try:
        for i in seeds:
            together = state(*run(i, launcher))
            learn, how = learner(train=16, valid=4, opt_func=Adam, cbs=Holds()), How(i)
            calls = [how.random.choice(CALLS) for _ in range(6)]
            seed(i)
            for call in calls: call(Single(learn, launcher), how)
            assert state(learn, how) == together, (i, [c.__name__ for c in calls])
    finally: launcher.end()
