"""All ranks leave a step, a batch, a phase, an epoch or a fit together, whoever wants to; the result is that of one
process."""
import re, subprocess, sys
from pathlib import Path
import pytest, torch
from fastai.callback.core import (
    Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
    CancelStepException, CancelTrainException, CancelValidException)
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation, ShortEpochCallback
from fastai.metrics import accuracy
from fastai.optimizer import Adam
from torch import nn
from fastddp.base import group
from fastddp.launch.engine import InProcess
from parity import (
    Collect, alone_like, assert_ranks_alike, assert_same, fit_both, items, largest, learner, seed, values, warm)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=[2, 3])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


RAISES = dict(
    batch=CancelBatchException,
    train=CancelTrainException,
    valid=CancelValidException,
    epoch=CancelEpochException,
    fit=CancelFitException,
    step=CancelStepException,
    backward=CancelBackwardException)


class Leave(Callback):
    "Raises once, on one rank, at one event; `at` is a training batch, -1 the last one, None where there is none"
    order = 51
    def __init__(self, event, kind, rank, at=None, epoch=0, valid=False):
        self.rank, self.kind = rank, kind
        self.at, self.when, self.valid = at, epoch, valid
        self.done = False
        setattr(self, event, self.go)
    def go(self):
        if self.done or group.rank() != self.rank or self.learn.epoch != self.when: return
        if self.at is not None and (self.training == self.valid or self.iter != self.at % self.n_iter): return
        self.done = True
        raise RAISES[self.kind]()


class AtEnd(Collect):
    "Weights at the end of the fit, and the steps that were made"
    order = -8
    def before_fit(self): self.rows, self.steps = [], 0
    def after_step(self): self.steps += 1
    def after_fit(self):
        self.rows = []
        self.note(self.steps, *(p.detach().double().abs().sum() for p in self.learn.model.parameters()))
        super().after_fit()


# What is raised at which event: in which training batch (`at`) of which epoch
IN_TRAINING = [
    ('before_batch', 'batch', 0, 0),
    ('before_batch', 'batch', 1, 0),
    ('before_batch', 'fit', 0, 0),
    ('before_batch', 'epoch', 2, 1),
    ('before_batch', 'train', -1, 1),
    ('after_pred', 'batch', 2, 0),
    ('after_pred', 'train', 2, 0),
    ('after_loss', 'batch', 1, 1),
    ('after_loss', 'epoch', 1, 0),
    ('before_backward', 'backward', 0, 0),
    ('before_backward', 'backward', 3, 0),
    ('before_backward', 'fit', -1, 1),
    ('after_step', 'train', 1, 0),
    ('after_step', 'fit', -1, 1),
    ('after_batch', 'train', 1, 0),
    ('after_batch', 'train', -1, 0),
    ('after_batch', 'epoch', 0, 0),
    ('after_batch', 'epoch', -1, 0),
    ('after_batch', 'fit', 3, 1),
    ('after_batch', 'fit', -1, 1),
    ('before_train', 'train', None, 0),
    ('before_train', 'epoch', None, 1),
    ('before_train', 'fit', None, 1),
    ('before_epoch', 'epoch', None, 1),
    ('before_epoch', 'fit', None, 1),
    ('after_train', 'epoch', None, 0),
    ('after_train', 'fit', None, 0),
    ('before_validate', 'valid', None, 0),
    ('before_validate', 'epoch', None, 0),
    ('before_validate', 'fit', None, 1),
    ('after_validate', 'epoch', None, 0),
    ('after_validate', 'fit', None, 0),
    ('after_validate', 'fit', None, 1),
    ('after_epoch', 'fit', None, 0),
    ('after_epoch', 'fit', None, 1),
    ('before_fit', 'fit', None, 0)]
# in which validation batch of the first epoch
IN_VALIDATION = [
    ('before_batch', 'valid', 0),
    ('after_pred', 'valid', 1),
    ('after_loss', 'fit', 0),
    ('after_batch', 'valid', 0),
    ('after_batch', 'epoch', 1),
    ('after_batch', 'fit', -1)]
EVENTS = [*((*o, False) for o in IN_TRAINING), *((*o, 0, True) for o in IN_VALIDATION)]


def rank_that_leaves(n, at, valid):
    "The last one; in a validation of 7 batches, dealt out in turn, the one that has batch `at`"
    return at % 7 % n if valid else n-1


def data(): return learner(train=33, valid=21, bs=3, metrics=accuracy, wd=.1, opt_func=Adam)


@pytest.mark.holds('Decisions', "A callback may raise any `Cancel*Exception`, at any event, on one rank only or on "
                   "two: the ranks vote at the end of the event, and all do what one process would do. So the forward "
                   "pass may be a collective operation, as with `SyncBatchNorm`")
@pytest.mark.few(5)
@pytest.mark.spread
@pytest.mark.parametrize('event,kind,at,epoch,valid', EVENTS)
def test_one_rank_wants_to_leave(ranks, event, kind, at, epoch, valid):
    n, launcher = ranks
    learn, end = data(), AtEnd()
    one = alone_like(learn, n)
    seed(1)
    rank = rank_that_leaves(n, at, valid)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[end, Leave(event, kind, rank, at, epoch, valid)])
    assert_ranks_alike(end.ranks)
    single, left = AtEnd(), Leave(event, kind, 0, at, epoch, valid)
    seed(1)
    one.fit(2, cbs=[single, left])
    assert left.done and end.ranks[0][0][0] == single.rows[0][0]
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5
    assert [len(o) for o in learn.recorder.values] == [len(o) for o in one.recorder.values]


@pytest.mark.holds('Decisions', "The same while gradients accumulate")
@pytest.mark.spread
@pytest.mark.parametrize('event,kind,at', [
    ('before_batch', 'batch', 2),
    ('after_loss', 'batch', 1),
    ('after_pred', 'train', 3),
    ('after_loss', 'fit', 5),
    ('after_batch', 'train', 4)])
def test_one_rank_wants_to_leave_while_gradients_accumulate(ranks, event, kind, at):
    n, launcher = ranks
    learn, end = learner(train=41, bs=2, cbs=GradientAccumulation(n*5)), AtEnd()
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[end, Leave(event, kind, n-1, at)])
    assert_ranks_alike(end.ranks)
    single, left = AtEnd(), Leave(event, kind, 0, at)
    seed(1)
    one.fit(2, cbs=[single, left])
    assert left.done and end.ranks[0][0][0] == single.rows[0][0]
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5


class TwoLeave(Callback):
    "Each rank wants something else at the same moment"
    order = 51
    def after_loss(self):
        if self.training and self.epoch == 0 and self.iter == 1:
            raise (CancelBatchException, CancelEpochException, CancelTrainException)[group.rank()]()


@pytest.mark.holds('Decisions', "If ranks want different things, the strongest wish counts")
def test_the_strongest_wish_counts(ranks):
    n, launcher = ranks
    learn, end = data(), AtEnd()
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[end, TwoLeave()])
    assert_ranks_alike(end.ranks)
    # the first epoch was cancelled, its validation too
    assert len(learn.recorder.values[0]) == 0 and len(learn.recorder.values[1]) == 3


def with_nan(n, s=0):
    "Item 20 of the training set (s=0) is NaN"
    return [(x*float('nan') if i == 20 and s == 0 else x, y) for i, (x, y) in enumerate(items(n, s=s))]


@pytest.mark.holds('Decisions', "A NaN in one rank's shard stops all")
def test_nan_in_one_shard(ranks):
    n, launcher = ranks
    end = AtEnd()
    learn, one = fit_both(learner(train=33, bs=3, data=with_nan), n, launcher, 2, cbs=[end, TerminateOnNaNCallback()])
    assert_ranks_alike(end.ranks)
    assert len(learn.recorder.losses) == len(one.recorder.losses) <= len(one.dls.train)     # in the first epoch
    assert torch.isnan(learn.recorder.losses[-1]) == torch.isnan(one.recorder.losses[-1])


def nan_in_validation(n, s=0):
    "The last item of the validation set (s=1) is NaN"
    return [(x*float('nan') if i == n-1 and s else x, y) for i, (x, y) in enumerate(items(n, s=s))]


def test_nan_in_one_shard_of_validation(ranks):
    n, launcher = ranks
    end = AtEnd()
    learn, one = fit_both(learner(train=12, valid=22, bs=3, data=nan_in_validation), n, launcher, 3,
                          cbs=[end, TerminateOnNaNCallback()])
    assert_ranks_alike(end.ranks)
    assert end.ranks[0][0][0] == len(one.recorder.losses) == len(one.dls.train)     # in the first epoch
    assert len(learn.recorder.values) == len(one.recorder.values)


@pytest.mark.holds('Decisions', "`ShortEpochCallback`, and whatever else ends a phase early")
def test_short_epochs(ranks):
    n, launcher = ranks
    end = AtEnd()
    learn, one = fit_both(learner(train=60), n, launcher, 2, cbs=[end, ShortEpochCallback(.4)])
    assert_ranks_alike(end.ranks)
    assert len(learn.recorder.losses) == len(one.recorder.losses) < 2*len(one.dls.train)
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5


@pytest.mark.holds('Decisions', "`EarlyStoppingCallback`")
@pytest.mark.spread
@pytest.mark.parametrize('monitor', ['valid_loss', 'accuracy'])
def test_early_stopping(ranks, monitor):
    n, launcher = ranks
    end = AtEnd()
    learn, one = fit_both(learner(metrics=accuracy, lr=.5, opt_func=Adam), n, launcher, 12,
                          cbs=[end, EarlyStoppingCallback(monitor, patience=2)])
    assert_ranks_alike(end.ranks)
    assert len(learn.recorder.values) == len(one.recorder.values) < 12
    assert end.ranks[0][0][0] == len(one.recorder.losses)


@pytest.mark.holds('Decisions', "`ReduceLROnPlateau`")
def test_reduce_lr_on_plateau(ranks):
    n, launcher = ranks
    learn, one = fit_both(learner(lr=.5), n, launcher, 6, cbs=[ReduceLROnPlateau(patience=1)])
    assert_same(learn, one, 1e-4, 1e-5)
    assert learn.opt.hypers[-1]['lr'] == one.opt.hypers[-1]['lr'] < .5


@pytest.mark.holds('Decisions', "`SaveModelCallback` writes one file and loads it on all ranks")
@pytest.mark.spread
@pytest.mark.parametrize('with_opt', [False, True])
def test_the_best_model_is_saved_once_and_loaded_on_all_ranks(ranks, tmp_path, with_opt):
    n, launcher = ranks
    class Last(AtEnd): order = 100       # after `SaveModelCallback` has loaded
    end, save = Last(), SaveModelCallback(with_opt=with_opt)
    learn = learner(lr=.3, opt_func=Adam, path=tmp_path)
    learn, one = fit_both(learn, n, launcher, 5, cbs=[end, save])
    assert_ranks_alike(end.ranks)
    assert [o.name for o in (tmp_path/'models').iterdir()] == ['model.pth']
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5
    best = min(v[1] for v in values(learn))
    assert save.best == pytest.approx(best) and best < values(learn)[-1][1]
    assert float(learn.validate()[0]) == pytest.approx(best, rel=1e-4)


class IdleLoss(nn.Module):
    "Has two parameters that it doesn't use"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    def forward(self, pred, y): return nn.functional.cross_entropy(pred, y)


def test_one_rank_alone_may_load(tmp_path):
    learn = learner(path=tmp_path, cbs=SaveModelCallback())
    learn.distrib_fit(2, launcher=InProcess())
    assert (tmp_path/'models'/'model.pth').exists()


@pytest.mark.holds('Decisions', "Parameters beside the model that get no gradient are named once, with their number")
def test_parameters_beside_the_model_without_gradient(capfd):
    "They are counted: the model has no names for them"
    loss = IdleLoss()
    learn = learner(loss_func=loss, splitter=lambda m: [[*m.parameters(), loss.a, loss.b]])
    learn.distrib_fit(1, nprocs=2)
    assert "No gradient for 2 parameters that the optimizer has beside the model's in a step" in capfd.readouterr().out


SHADOWING = """
from parity import learner
from fastai.callback.core import Callback
class Named(Callback):
    def before_fit(self): self.distrib, self.distrib_fit, self.fit_one_cycle = 1, 2, 3
learn = learner(cbs=Named())
learn.fit(1)
print(learn.named.distrib, learn.named.distrib_fit)
"""


@pytest.mark.holds('Decisions', "A callback may have an attribute named like a method of fastddp's")
@pytest.mark.full
def test_an_attribute_named_like_a_method_of_ours():
    "fastai warns of attributes that the learner has, too: without fastddp it has only the third of these"
    r = subprocess.run([sys.executable, '-c', SHADOWING], cwd=Path(__file__).parent.parent, capture_output=True,
                       text=True, timeout=120)
    assert r.stdout == '1 2\n', r.stderr
    assert re.findall(r'shadowing an attribute \((\w+)\)', r.stderr) == ['fit_one_cycle'], r.stderr
