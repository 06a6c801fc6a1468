"""Steps that don't go their usual way: passes that a rank leaves out, exceptions that a learner swallows, losses that
are exchanged or asked for in the middle of a batch."""
import pytest
from fastai.callback.core import Callback, CancelValidException
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastcore.foundation import L
from fastddp.base import group
from cases.losses import exact
from parity import Collect, alone_like, assert_ranks_alike, assert_same, fit_both, items, largest, learner, seed, warm
from spread import long_but
from test_decisions import Leave

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=long_but([2, 3], 3))
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Loss(Collect):
    "`learn.loss` after training"
    def before_fit(self): self.rows = []
    def after_train(self): self.note(self.learn.loss)
    def after_cancel_epoch(self): self.note(self.learn.loss)


class LossOfBatch(Collect):
    "`learn.loss` at the end of each training batch"
    def before_fit(self): self.rows = []
    def after_batch(self):
        if self.training: self.note(self.learn.loss)


class LeavesOutAPass(Learner):
    "In one batch the last of `n` ranks makes no backward pass: what counts are the others' items"
    at = 1
    def _backward(self):
        if self.iter != self.at: return super()._backward()
        if group.world_size() == 1:
            kept = [i for i in range(len(self.y)) if i % self.n != self.n-1]
            return self.loss_func(self.pred[kept], self.y[kept]).backward()
        if group.rank() < self.n-1: super()._backward()


@pytest.mark.filterwarnings('default:fastddp')
@pytest.mark.full
def test_one_rank_makes_no_backward_pass(ranks, capfd):
    "The others don't wait for it; that it steps by itself is found at the end of the epoch, and named"
    n, launcher = ranks
    learn = learner(train=8*n, kind=LeavesOutAPass)
    learn.n = n
    loss = LossOfBatch()
    learn, one = fit_both(learn, n, launcher, 1, ddp=dict(timeout=60), cbs=[loss])
    # from the next batch on the workers' weights differ
    assert_ranks_alike([rows[:2] for rows in loss.ranks])
    assert largest([p.detach() for p in learn.model.parameters()], [p.detach() for p in one.model.parameters()]) < 1e-5
    assert capfd.readouterr().err.count("the workers' weights had drifted apart") == 1


@pytest.mark.filterwarnings('default:fastddp')
def test_a_first_batch_that_is_read_whole_and_has_no_backward_pass_on_one_rank(two):
    "Both have read the same, and say so"
    learn = learner(train=16, kind=LeavesOutAPass)
    learn.n, learn.at, learn.dls.train.reads_whole = 2, 0, True
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert len(learn.recorder.values) == 1


class Validates(Callback):
    "In the middle of a batch; notes what comes out"
    def before_fit(self): self.got = []
    def after_step(self):
        if self.iter != 1 or self.got: return
        learn = self.learn
        kept = {k: vars(learn)[k] for k in ('dl', 'iter', 'n_iter', 'training', 'xb', 'yb', 'pred', 'loss')}
        self.got = [*learn.validate()]
        vars(learn).update(kept)
        learn.model.train()


def test_a_validation_in_the_middle_of_a_batch_whose_loss_is_gathered(two):
    "A validation of a callback's own has batches of the loader's own size: here those of one process"
    learn = learner(**exact('rmse', valid=19, bs=8))
    one = alone_like(learn, 2, 'global')
    cb, single = Validates(), Validates()
    seed(1)
    learn.distrib_fit(1, nprocs=2, launcher=two, batch='global', cbs=[cb])
    seed(1)
    one.fit(1, cbs=[single])
    assert cb.got and largest(cb.got, single.got) < 1e-5
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5


@pytest.mark.parametrize('kind', ['epoch', 'batch'])
def test_after_one_rank_left_before_its_loss_all_have_the_last_one(ranks, kind):
    n, launcher = ranks
    loss = Loss()
    learner(train=8*n).distrib_fit(1, nprocs=n, launcher=launcher,
                                   cbs=[loss, Leave('after_pred', kind, n-1, at=1)])
    assert_ranks_alike(loss.ranks)


class StopsItsOwnValidation(Callback):
    "Validates in the middle of training, and cancels that"
    order = 60
    inside, cancelled = False, ()
    def after_train(self): self.cancelled = *self.cancelled, self.recorder.cancel_train
    def before_batch(self):
        if self.inside: raise CancelValidException()
    def after_batch(self):
        if not self.training or self.iter != 1: return
        learn, kept = self.learn, {k: vars(self.learn)[k] for k in ('dl', 'iter', 'n_iter', 'training')}
        self.inside = True
        learn.validate()
        self.inside = False
        vars(learn).update(kept)
        learn.model.train()


def test_a_callbacks_own_validation_that_is_cancelled_is_not_the_fits(two):
    stops, learn = StopsItsOwnValidation(), learner(train=24)
    learn.recorder.add_time = False     # such a validation writes a line of its own
    learn, one = fit_both(learn, 2, two, 2, cbs=[stops])
    assert_same(learn, one)
    assert stops.cancelled == (False, False)


class ValidatesInTraining(Callback):
    "Validates in the middle of training; notes what the metrics of training are at its end"
    order = 60
    def __init__(self, n): self.own, self.got = DataLoader(items(n, s=2), bs=4, num_workers=0), []
    def after_train(self): self.got.append([float(m.value) for m in self.recorder._train_mets])
    def after_batch(self):
        if not self.training or self.iter != 1: return
        learn, kept = self.learn, {k: vars(self.learn)[k] for k in ('dl', 'iter', 'n_iter', 'training')}
        learn.validate(dl=self.own)
        vars(learn).update(kept)
        learn.model.train()


@pytest.mark.parametrize('n_own,valid_metrics', [(9, True), (3, True), (9, False)])
def test_metrics_of_training_after_a_callbacks_own_validation(ranks, n_own, valid_metrics):
    "They go on from what the validation left, as in one process"
    n, launcher = ranks
    validates, learn = ValidatesInTraining(n_own), learner(train=37, valid=3, metrics=accuracy)
    learn.recorder.train_metrics, learn.recorder.valid_metrics, learn.recorder.add_time = True, valid_metrics, False
    one, same = alone_like(learn, n), ValidatesInTraining(n_own)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[validates])
    seed(1)
    one.fit(2, cbs=[same])
    assert largest(validates.got, same.got) < 1e-6
    assert largest(*(sum(o.recorder.values, start=L()) for o in (learn, one))) < 1e-6
