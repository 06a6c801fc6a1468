"""A callback that validates or predicts in the middle of a fit: its numbers, and what follows, are one process's."""
import random
import numpy as np, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastcore.basics import noop
from parity import assert_same, largest, learner, seed, alone_like, warm
from fastddp.base import group

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Asks(Callback):
    "Notes what `ask(learn)` gives at an event, unless that event is of its own making"
    def __init__(self, at, ask): self.at, self.ask, self.got, self.asking = at, ask, [], False
    def __call__(self, event):
        if event == self.at and not self.asking:
            self.asking = True
            self.got.append(list(self.ask(self.learn)))
            self.asking = False
        return super().__call__(event)


def asked_in_both(at, ask, launcher, batch, log=noop):
    "`(learner, its callback)` on workers and in one process, each with the streams as the fit left them"
    learn = learner()
    one, res = alone_like(learn, 2, batch), []
    for o, how in ((learn, lambda *a, **kw: learn.distrib('fit', *a, nprocs=2, launcher=launcher, batch=batch, **kw)),
                   (one, one.fit)):
        cb = Asks(at, ask)
        o.logger = log
        seed(1)
        how(2, cbs=[cb])
        drawn = random.random(), np.random.rand(), float(torch.rand(1)), o.dls.train.rng.random()
        o.recorder.values = [[v for v in row if not isinstance(v, str)] for row in o.recorder.values]   # no times
        res.append((o, cb.got, drawn))
    return res


ASKS = dict(train=lambda learn: learn.get_preds(0, inner=True), valid=lambda learn: learn.get_preds(inner=True),
            apart=lambda learn: learn.get_preds(),
            as_it_comes=lambda learn: learn.get_preds(0, inner=True, reorder=False),
            validate=lambda learn: learn.validate(), validate_train=lambda learn: learn.validate(0))


@pytest.mark.parametrize('batch', ['global', 'per_worker'])
@pytest.mark.parametrize('at', ['after_train', 'after_epoch'])
@pytest.mark.parametrize('ask', [*ASKS])
def test_values_weights_and_random_streams(ask, at, batch, two):
    (learn, got, drawn), (one, expected, drawn_one) = asked_in_both(at, ASKS[ask], two, batch)
    assert_same(learn, one)
    assert drawn == drawn_one
    assert len(got) == len(expected) == 2
    for a, b in zip(got, expected): assert largest(a, b) < 1e-4


OWN = dict(get_preds=lambda learn: learn.get_preds(dl=learn.dls.train.new(shuffle=True), inner=True)[1].sort()[:1],
           validate=lambda learn: learn.validate(dl=learn.dls.train.new(shuffle=True, drop_last=False)))


@pytest.mark.parametrize('ask', [*OWN])
def test_each_rank_made_a_shuffled_loader(ask, two):
    "Each would have an order of its own, and the parts no whole: items would be missing, others be there twice"
    (learn, got, _), (one, expected, _) = asked_in_both('after_train', OWN[ask], two, 'global')
    assert_same(learn, one)
    for a, b in zip(got, expected): assert largest(a, b) < 1e-4


class AsksMidway(Callback):
    "Validates in the middle of training, as the recipes do it; then one rank leaves the fit"
    order = 60      # the recorder has seen the batch
    def after_batch(self):
        if not self.training: return
        if self.iter == 1:
            learn, kept = self.learn, {k: vars(self.learn)[k] for k in ('dl', 'iter', 'n_iter', 'training')}
            learn.get_preds(inner=True)
            vars(learn).update(kept)
            learn.model.train()
        if self.iter == 3 and self.rank_leaves(): raise CancelFitException()
    def rank_leaves(self): return group.rank() == 1 or group.world_size() == 1


@pytest.mark.parametrize('batch', ['global', 'per_worker'])
def test_one_rank_leaves_after_predictions_in_the_middle_of_training(batch, two):
    learn = learner()
    one = alone_like(learn, 2, batch)
    seed(1)
    learn.distrib('fit', 2, nprocs=2, launcher=two, batch=batch, cbs=[AsksMidway()], timeout=20)
    seed(1)
    one.fit(2, cbs=[AsksMidway()])
    assert len(learn.recorder.losses) == len(one.recorder.losses) == 4
    assert_same(learn, one)


class Draws(Callback):
    "Notes what this rank draws before and after a validation in the middle of an epoch"
    def __init__(self): self.drawn = []
    def after_train(self):
        for _ in range(2):
            self.learn.validate()
            self.drawn.append(float(torch.rand(1)))


def test_a_validation_of_a_callbacks_own_begins_no_stream_anew(two):
    learn, cb = learner(), Draws()
    learn.distrib('fit', 1, nprocs=2, launcher=two, cbs=[cb])
    assert len(set(cb.drawn)) == 2


def test_the_last_line_counts_the_fits_own_epochs(two, capsys):
    learn = learner()
    learn.distrib('fit', 2, nprocs=2, launcher=two, cbs=[Asks('after_epoch', ASKS['validate'])])
    assert '2 epochs in ' in capsys.readouterr().out
