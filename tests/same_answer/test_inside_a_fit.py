"""A callback that validates or predicts in the middle of a fit: its numbers, and what follows, are one process's."""
import copy, functools, random
import numpy as np, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.metrics import F1Score, accuracy
from fastcore.basics import noop
from torch.utils.data import DataLoader as TorchLoader
from parity import assert_same, items, largest, learner, seed, alone_like, warm
from fastddp.base import group

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture(scope='module')
def three():
    with warm(3) as launcher: yield launcher


class Asks(Callback):
    "Notes what `ask(learn)` gives at an event, unless that event is of its own making"
    def __init__(self, at, ask): self.at, self.ask, self.got, self.asking = at, ask, [], False
    def __call__(self, event):
        if event == self.at and not self.asking:
            self.asking = True
            self.got.append(list(self.ask(self.learn)))
            self.asking = False
        return super().__call__(event)


def drop_times(learn):
    learn.recorder.values = [[v for v in row if not isinstance(v, str)] for row in learn.recorder.values]


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
        drop_times(o)
        res.append((o, cb.got, drawn))
    return res


ASKS = dict(train=lambda learn: learn.get_preds(0, inner=True), valid=lambda learn: learn.get_preds(inner=True),
            apart=lambda learn: learn.get_preds(),
            as_it_comes=lambda learn: learn.get_preds(0, inner=True, reorder=False),
            validate=lambda learn: learn.validate(), validate_train=lambda learn: learn.validate(0))


@pytest.mark.holds('Losses', "`learn.validate()` and `learn.get_preds()` of any loader in a callback: their numbers, "
                   "and the weights and random streams afterwards")
@pytest.mark.spread
@pytest.mark.parametrize('batch', ['global', 'per_worker'])
@pytest.mark.parametrize('at', ['after_train', 'after_epoch'])
@pytest.mark.parametrize('ask', [*ASKS])
def test_values_weights_and_random_streams(ask, at, batch, two):
    (learn, got, drawn), (one, expected, drawn_one) = asked_in_both(at, ASKS[ask], two, batch)
    assert_same(learn, one)
    assert drawn == drawn_one
    assert len(got) == len(expected) == 2
    for a, b in zip(got, expected): assert largest(a, b) < 1e-4


@pytest.mark.holds('Losses', "A loader that a callback validates at the beginning of training is the one that fastai "
                   "then trains on")
@pytest.mark.parametrize('ask', ['validate', 'validate_train'])
def test_a_loader_that_is_validated_before_training_is_trained_on(ask, two):
    "fastai leaves it in `learn.dl`, and its training goes over `learn.dl`"
    (learn, got, drawn), (one, expected, drawn_one) = asked_in_both('before_train', ASKS[ask], two, 'global')
    assert_same(learn, one)
    assert drawn == drawn_one and len(learn.recorder.losses) == len(one.recorder.losses)
    for a, b in zip(got, expected, strict=True): assert largest(a, b) < 1e-4


@pytest.mark.parametrize('ask', ['validate', 'valid'])
def test_a_validation_of_one_batch_draws_as_in_one_process(ask, two):
    "Every rank goes over all of it"
    learn, cb = learner(valid=3), Asks('after_train', {**ASKS, **LOOPS}[ask])
    one, cb_one = alone_like(learn, 2), copy.deepcopy(cb)
    seed(1)
    learn.distrib('fit', 2, nprocs=2, launcher=two, cbs=[cb])
    drawn = random.random(), float(torch.rand(1))
    seed(1)
    one.fit(2, cbs=[cb_one])
    assert drawn == (random.random(), float(torch.rand(1)))
    assert len(cb.got) == 2 and all(largest(a, b) < 1e-5 for a, b in zip(cb.got, cb_one.got, strict=True))


OWN = dict(get_preds=lambda learn: learn.get_preds(dl=learn.dls.train.new(shuffle=True), inner=True)[1].sort()[:1],
           validate=lambda learn: learn.validate(dl=learn.dls.train.new(shuffle=True, drop_last=False)))


@pytest.mark.parametrize('ask', [*OWN])
def test_each_rank_made_a_shuffled_loader(ask, two):
    "Each would have an order of its own, and the parts no whole: items would be missing, others be there twice"
    (learn, got, _), (one, expected, _) = asked_in_both('after_train', OWN[ask], two, 'global')
    assert_same(learn, one)
    for a, b in zip(got, expected): assert largest(a, b) < 1e-4


class TensorBoardProjectorCallback(Callback):
    "Stands for fastai's, which is known by its name, and which rank 0 alone has"


def test_a_callback_of_rank_0_that_wants_all_batches(two):
    "All ranks go over all batches: they decide by rank 0's callbacks"
    learn, cb = learner(), Asks('after_epoch', ASKS['valid'])
    learn.add_cb(TensorBoardProjectorCallback())
    one, cb_one = alone_like(learn, 2), copy.deepcopy(cb)
    seed(1)
    learn.distrib('fit', 1, nprocs=2, launcher=two, cbs=[cb], timeout=30)
    seed(1)
    one.fit(1, cbs=[cb_one])
    for a, b in zip(cb.got, cb_one.got, strict=True): assert largest(a, b) < 1e-4


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


@pytest.mark.holds('Losses', "One rank leaves the fit after a callback predicted in the middle of training")
@pytest.mark.parametrize('batch', ['global', 'per_worker'])
def test_one_rank_leaves_after_predictions_in_the_middle_of_training(batch, two):
    learn = learner()
    one = alone_like(learn, 2, batch)
    seed(1)
    learn.distrib('fit', 2, nprocs=2, launcher=two, batch=batch, cbs=[AsksMidway()], timeout=60)
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


# A callback's own loop over one of the learner's loaders

def targets(batches): return [torch.cat([y for _, y in batches])]


LOOPS = dict(valid=lambda learn: targets(learn.dls.valid), train=lambda learn: targets(learn.dls.train),
             one_batch=lambda learn: learn.dls.one_batch(), valid_one=lambda learn: learn.dls.valid.one_batch(),
             first_only=lambda learn: next(iter(learn.dls.train)))


@pytest.mark.holds('Batches', "A callback that loops over `learn.dls.train` or `learn.dls.valid`, or takes "
                   "`dls.one_batch()`, sees the whole, in batches of the loader's own size, at any event; what "
                   "follows is that of one process. In events of validation batches, which ranks don't have equally "
                   "many of, and on rank 0 alone, the random streams stay where they were")
@pytest.mark.spread
@pytest.mark.parametrize('at', ['before_fit', 'before_train', 'after_train', 'after_epoch'])
@pytest.mark.parametrize('ask', [*LOOPS])
def test_a_callbacks_own_loop_sees_the_whole(ask, at, two):
    (learn, got, drawn), (one, expected, drawn_one) = asked_in_both(at, LOOPS[ask], two, 'global')
    assert_same(learn, one)
    assert drawn == drawn_one
    assert got and len(got) == len(expected)
    for a, b in zip(got, expected): assert largest(a, b) == 0


@pytest.mark.parametrize('ask', ['valid', 'train'])
def test_the_whole_comes_in_batches_of_the_loaders_own_size(ask, two):
    (learn, got, drawn), (one, expected, drawn_one) = asked_in_both('after_train', LOOPS[ask], two, 'per_worker')
    assert_same(learn, one)
    assert drawn == drawn_one
    for a, b in zip(got, expected): assert largest(a, b) == 0
    (_, got, _), _ = asked_in_both('after_train', lambda learn: [len(y) for _, y in learn.dls.valid], two, 'per_worker')
    assert got == [[4]*5+[1]]*2


def torch_loaders(learn):
    train, valid = (TorchLoader(dl.dataset, batch_size=4, shuffle=not i) for i, dl in enumerate(learn.dls.loaders))
    learn.dls = DataLoaders(train, valid)
    return learn


def with_processes(learn):
    learn.dls = DataLoaders(*(DataLoader(dl.dataset, bs=4, num_workers=1, shuffle=not i)
                              for i, dl in enumerate(learn.dls.loaders)))
    return learn


@pytest.mark.spread
@pytest.mark.parametrize('change', [torch_loaders, with_processes])
@pytest.mark.parametrize('ask', ['valid', 'train', 'first_only'])
def test_other_loaders_are_seen_whole(ask, change, two):
    learn, cb = change(learner()), Asks('after_train', LOOPS[ask])
    one, cb_one = copy.deepcopy(learn), copy.deepcopy(cb)
    seed(1)
    learn.distrib('fit', 2, nprocs=2, launcher=two, batch='global', cbs=[cb])
    seed(1)
    one.fit(2, cbs=[cb_one])
    assert_same(learn, one)
    for a, b in zip(cb.got, cb_one.got, strict=True): assert largest(a, b) == 0


class LooksInBatches(Callback):
    "Takes a batch of the training loader in each batch of one phase"
    def __init__(self, training): self.in_training, self.seen = training, 0
    def after_batch(self):
        if self.training != self.in_training: return
        self.learn.dls.one_batch()
        self.seen += 1


def test_a_loop_in_each_training_batch(two):
    learn = learner()
    one = alone_like(learn, 2, 'global')
    for o, how in (learn, lambda *a, **kw: learn.distrib('fit', *a, nprocs=2, launcher=two, batch='global', **kw)), (
            one, one.fit):
        seed(1)
        how(2, cbs=[LooksInBatches(True)])
    assert_same(learn, one)


class LooksOnRank0(LooksInBatches): rank0_only = True


@pytest.mark.parametrize('cb', [LooksInBatches(False), LooksOnRank0(True), LooksOnRank0(False)])
def test_a_loop_that_not_all_ranks_make_leaves_the_order_alone(cb, two):
    "One rank has a validation batch more than the other: were the streams drawn from, the ranks' orders would differ"
    learn = learner(valid=17)
    one = alone_like(learn, 2)
    seed(1)
    learn.distrib('fit', 3, nprocs=2, launcher=two, cbs=[cb])
    seed(1)
    one.fit(3)
    assert cb.seen and torch.equal(torch.tensor(learn.recorder.lrs), torch.tensor(one.recorder.lrs))
    assert_same(learn, one)


class LooksAtItsOwn(Callback):
    "Trains and validates on loaders of its own, and loops over them first"
    def __init__(self): self.got = []
    def before_fit(self): self.learn.dls.loaders = [DataLoader(items(n), bs=4, num_workers=0) for n in (16, 9)]
    def look(self): self.got += targets(self.learn.dl)
    before_train = before_validate = look


def test_a_loader_that_a_callback_puts_in_is_seen_whole(two):
    learn, cb = learner(), LooksAtItsOwn()
    one, cb_one = alone_like(learn, 2, 'global'), LooksAtItsOwn()
    learn.distrib('fit', 2, nprocs=2, launcher=two, batch='global', cbs=[cb])
    one.fit(2, cbs=[cb_one])
    assert_same(learn, one)
    for a, b in zip(cb.got, cb_one.got, strict=True): assert largest(a, b) == 0


class Grows(Asks):
    "Doubles the batch for the second epoch, and asks after each"
    def before_epoch(self):
        if self.epoch == 1 and not self.asking: self.learn.dls.train.bs *= 2


@pytest.mark.spread
@pytest.mark.parametrize('batch', ['global', 'per_worker'])
@pytest.mark.parametrize('ask', [LOOPS['train'], ASKS['validate_train']])
def test_a_changed_batch_size_holds_after_a_look_at_the_whole(ask, batch, two):
    learn = learner()
    one = alone_like(learn, 2, batch)
    for o, how in (learn, lambda *a, **kw: learn.distrib('fit', *a, nprocs=2, launcher=two, batch=batch, **kw)), (
            one, one.fit):
        seed(1)
        how(3, cbs=[Grows('after_epoch', ask)])
        drop_times(o)
    assert len(learn.recorder.losses) == len(one.recorder.losses)
    assert_same(learn, one)


def test_a_rank_that_has_seen_no_batch_yet(three):
    "Three ranks, two batches, before the first of training; F1Score needs all of them again"
    def make(): return learner(valid=20, bs=12, metrics=F1Score(average='macro'))
    learn, one, seen = make(), make(), []
    for fit in functools.partial(learn.distrib_fit, nprocs=3, launcher=three, batch='global'), one.fit:
        cb = Asks('before_train', lambda learn: learn.validate())
        seed(1)
        fit(1, cbs=[cb])
        seen.append(cb.got[0])
    assert len(seen[1]) == 2
    np.testing.assert_allclose(*seen, rtol=1e-5)


class MidValidation(Callback):
    "Validates in the middle of each validation"
    order = 60      # the recorder has seen the batch
    asking = False
    def after_batch(self):
        if self.training or self.iter != 1 or self.asking: return
        self.asking = True
        self.learn.validate()
        self.asking = False


@pytest.mark.holds('Limits', "A callback that validates in the middle of a batch of a validation: the worker that has "
                   "the batch goes over all batches; the metrics of the outer validation go on as if it had not been")
def test_a_validation_within_a_validation(two):
    "It is this rank's, of all batches, and the outer one goes on as in one process"
    def make(): return learner(valid=32, bs=8, metrics=[accuracy, F1Score(average='macro')])
    learn, one = make(), make()
    for o, fit, cbs in ((learn, functools.partial(learn.distrib_fit, nprocs=2, launcher=two, batch='global'),
                         [MidValidation()]), (one, one.fit, [MidValidation()])):
        seed(1)
        fit(2, cbs=cbs)
    # the inner one begins a row anew, and its time comes into the middle
    numbers = [[[v for v in row if not isinstance(v, str)] for row in o.recorder.values] for o in (learn, one)]
    for row, own in zip(*numbers, strict=True): np.testing.assert_allclose(row, own, rtol=1e-5)


class SeesItems(torch.nn.Module):
    "A loss without weights that adds up how many items it has seen outside of training"
    def __init__(self):
        super().__init__()
        self.seen = 0
    def forward(self, pred, y):
        if not torch.is_grad_enabled(): self.seen += len(y)
        return torch.nn.functional.cross_entropy(pred, y)*len(y)**.5


def test_a_loss_that_changes_its_state_in_a_validation(two, capfd):
    "Nothing says so before the first one: a line does, and from the second one on all ranks see all of it"
    learn = learner(valid=32, bs=8, loss_func=SeesItems())
    learn.distrib_fit(3, nprocs=2, launcher=two, batch='global')
    assert learn.loss_func.seen == 16+2*32
    assert capfd.readouterr().out.count('it is that of the batches that worker 0 had') == 1


@pytest.mark.parametrize('train', [37, 41])
@pytest.mark.parametrize('workers', [2, 3])
def test_a_training_loader_of_whole_batches_is_validated_item_by_item(workers, train, two, three):
    "In training a rank without a batch, or with a single item, is fed items that don't count"
    cb = Asks('after_epoch', lambda learn: learn.validate(0))
    learn = learner(train=train, metrics=accuracy)
    learn.dls.train.reads_whole = True
    learn.distrib_fit(1, nprocs=workers, launcher={2: two, 3: three}[workers], cbs=[cb])
    assert largest(cb.got[0], learn.validate(0)) < 1e-5
