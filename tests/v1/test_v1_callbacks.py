"""Callbacks of fastai v1 decide alike on all ranks, act once, and come back."""
import logging
import numpy as np, pandas as pd, pytest, torch
from learners_v1 import *
from fastai.callbacks import *
from fastai.train import *


class Mine(LearnerCallback):
    "A user's own: keeps what it sees, and stops one rank only"
    def __init__(self, learn, stop_at=None, skip_validate=False):
        super().__init__(learn)
        self.stop_at, self.skip_validate, self.seen, self.epochs = stop_at, skip_validate, [], 0
    def on_batch_end(self, train, last_loss, iteration, **kwargs):
        if not train: return
        self.seen.append(float(last_loss))
        if iteration == self.stop_at and int(os.environ.get('RANK', 1)) == 1:
            return {'stop_epoch': True, 'stop_training': True, 'skip_validate': self.skip_validate}
    def on_epoch_end(self, **kwargs): self.epochs += 1


def test_trackers_decide_alike_and_write_once(tmp_path):
    def make(bs):
        fns = [partial(SaveModelCallback, monitor='accuracy', name='best'),
               partial(EarlyStoppingCallback, patience=1, min_delta=.05),
               partial(ReduceLROnPlateauCallback, patience=0, min_delta=.5, min_lr=1e-9), CSVLogger]
        return plain(bs, callback_fns=fns, path=tmp_path/str(bs), model_dir='kept', metrics=[accuracy, squared])
    two, one = pair(make, lambda l: l.fit(6, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    assert len(one.recorder.val_losses) < 6     # it did stop early
    for k in 'early_stopping_callback', 'reduce_lr_on_plateau_callback', 'save_model_callback':
        a, b = getattr(two, k), getattr(one, k)
        assert float(a.best) == pytest.approx(float(b.best), abs=1e-6) and getattr(a, 'wait', 0) == getattr(b, 'wait',
                                                                                                            0)
    a, b = (pd.read_csv(tmp_path/n/'history.csv') for n in ('4', '8'))
    pd.testing.assert_frame_equal(a.drop(columns='time'), b.drop(columns='time'), atol=2e-6, rtol=0)
    assert two.opt.lr == pytest.approx(one.opt.lr) and two.csv_logger.read_logged_file().shape[0] == len(a)
    assert [o.name for o in (tmp_path/'4'/'kept').iterdir()] == ['best.pth']


def test_one_rank_without_a_number_stops_all(tmp_path):
    "One item's loss is no number: `TerminateOnNaNCallback` ends the fit at the batch at which one process's ends"
    def make(bs):
        learn = plain(bs, path=tmp_path)
        learn.data.train_ds.x[7] = float('nan')
        return learn
    two, one = pair(make, lambda l: l.fit(2, 1e-2, callbacks=[TerminateOnNaNCallback()]))
    assert 1 <= len(two.recorder.losses) == len(one.recorder.losses) <= 6
    assert not np.isfinite(float(two.recorder.losses[-1]))


class Looks(LearnerCallback):
    "Goes over the loaders by itself, and takes a batch"
    def __init__(self, learn):
        super().__init__(learn)
        self.seen = []
    def _look(self):
        data = self.learn.data
        self.seen += [torch.cat([y.cpu() for _, y in dl]).tolist() for dl in (data.train_dl, data.valid_dl)]
        self.seen.append(data.one_batch()[1].tolist())
    def on_epoch_begin(self, **kwargs): self._look()
    def on_batch_begin(self, num_batch, train, **kwargs):
        if train and num_batch == 1: self._look()


def test_a_callbacks_own_loop_sees_the_whole():
    "Also in the middle of the fit's loop, which goes on with its part"
    two, one = plain(4), plain(8)
    cbs = Looks(two), Looks(one)
    seed(5); two.distrib_fit(2, 1e-2, callbacks=[cbs[0]], nprocs=2)
    seed(5); one.fit(2, 1e-2, callbacks=[cbs[1]])
    assert len(cbs[0].seen) == 12 and cbs[0].seen == cbs[1].seen
    same_weights(two, one)


class Validates(LearnerCallback):
    "Validates in the middle of each validation, or before the first training batch"
    def __init__(self, learn, within):
        super().__init__(learn)
        self.within, self.seen = within, []
    def _validate(self): self.seen.append([float(o) for o in self.learn.validate()])
    def on_train_begin(self, **kwargs):
        if not self.within: self._validate()
    def on_batch_end(self, train, **kwargs):
        if self.within and not train: self._validate()


@pytest.mark.parametrize('within, n_valid, n', [(True, 9, 2), (True, 2, 3), (False, 2, 3)])
def test_a_callback_validates(within, n_valid, n):
    "In the batches of a validation, or at its end"
    two, one = (plain(8, n_valid=n_valid, metrics=[accuracy, squared]) for _ in range(2))
    cbs = Validates(two, within), Validates(one, within)
    # a validation draws a number, so the order of the next epoch isn't that of one process
    epochs = 1 if within else 2
    seed(5); two.distrib_fit(epochs, 1e-2, callbacks=[cbs[0]], nprocs=n, batch='global', timeout=30)
    seed(5); one.fit(epochs, 1e-2, callbacks=[cbs[1]])
    # every worker validates all batches
    np.testing.assert_allclose(cbs[0].seen, cbs[1].seen, atol=1e-6)
    assert cbs[1].seen
    same_weights(two, one)
    same_recorder(two, one)


@pytest.mark.parametrize('skip_validate', [False, True])
def test_a_users_callback(skip_validate):
    """On the learner, with its state, its loss that of all; stopped by one rank, all stop at the same batch, and
    validate or don't"""
    two, one = plain(4), plain(8)
    cbs = Mine(two, 7, skip_validate), Mine(one, 7, skip_validate)
    seed(5); two.distrib_fit(3, 1e-2, callbacks=[cbs[0]], nprocs=2, timeout=30)
    seed(5); one.fit(3, 1e-2, callbacks=[cbs[1]])
    assert cbs[0].seen == pytest.approx(cbs[1].seen,
                                        abs=1e-6) and len(cbs[0].seen) == 8 and cbs[0].epochs == cbs[1].epochs
    same_weights(two, one)
    assert (two.recorder.val_losses[-1] is None) == (one.recorder.val_losses[-1] is None) == skip_validate
    assert two.mine is cbs[0] and cbs[0].learn is two


class Accumulates(AccumulateScheduler):
    "A user's own kind"


@pytest.mark.parametrize('kind', ['mixup', 'clip', 'accumulate', 'own accumulate', 'weights', 'oversample', 'sum'])
def test_training_callbacks(kind, tmp_path):
    """Gradient clipping, accumulation and weighted losses are one process's; mixup and oversampling, which draw by
    rank, train"""
    weights = nn.CrossEntropyLoss(weight=torch.tensor([1., 3.]))
    accumulates = {'accumulate': AccumulateScheduler, 'own accumulate': Accumulates}
    def make(bs):
        learn = plain(bs, n=42, loss_func=dict(weights=weights, sum=nn.CrossEntropyLoss(reduction='sum')).get(kind),
                      callback_fns=[partial(accumulates[kind], n_step=2)] if kind in accumulates else [])
        if kind in accumulates: learn.loss_func = nn.CrossEntropyLoss(reduction='sum')
        if kind == 'mixup': learn.mixup()
        if kind == 'clip': learn.clip_grad(.05)
        if kind == 'oversample':
            learn.callback_fns.append(oversampled)
        return learn
    def run(learn):
        learn.given = Given(learn)
        learn.fit(2, 1e-3, callbacks=[learn.given])
    two, one = pair(make, run)
    assert type(two.loss_func) is nn.CrossEntropyLoss
    if kind in ('mixup', 'oversample'):
        n = 48 if kind == 'oversample' else 42
        assert len(two.recorder.losses) == len(one.recorder.losses) == 2*(n//8)
        assert two.given.strange() == one.given.strange() == (kind == 'mixup')
    else:
        same_weights(two, one)
        same_recorder(two, one)


class Given(LearnerCallback):
    "What the model is given to train with, after every other callback"
    _order = 1000
    def __init__(self, learn):
        super().__init__(learn)
        self.inputs = []
    def on_batch_begin(self, last_input, train, **kwargs):
        if train: self.inputs.append(last_input.clone())
    def strange(self):
        "Is most of it not in the dataset?"
        known = {tuple(o) for o in self.learn.data.train_ds.x.tolist()}
        rows = [tuple(o) for batch in self.inputs for o in batch.tolist()]
        return sum(o not in known for o in rows) > len(rows)/2


class oversampled(LearnerCallback):
    "As fastai's OverSamplingCallback, for plain datasets: another loader for the time of the fit"
    def on_train_begin(self, **kwargs):
        dl = self.learn.data.train_dl
        self.learn.data.train_dl = dl.new(shuffle=False,
                                          sampler=torch.utils.data.WeightedRandomSampler(torch.ones(len(dl.dataset)),
                                                                                         48))


def test_half_precision_travels():
    "The CPU has no half precision in torch 2.0: what a local fit says, a distributed one says"
    learn = plain(4).to_fp16()
    with pytest.raises(RuntimeError) as local: learn.fit(1)
    with pytest.raises(Exception) as ours: learn.distrib_fit(1, nprocs=2)
    assert str(local.value).split('\n')[0] in str(ours.value)
    learn.to_fp32()
    learn.distrib_fit(1, nprocs=2)


class Noise(Callback):
    "Each rank changes its weights in its own way"
    def __init__(self, learn): self.learn, self.seen = learn, []
    def on_step_end(self, **kwargs):
        for p in self.learn.model.parameters(): p.data.add_(torch.randn_like(p)*.01)
    def on_train_end(self, **kwargs):
        from fastddp.base import group
        own = sum(p.detach().double().pow(2).sum() for p in self.learn.model.parameters())
        self.seen = [float(o) for o in group.all_gather_object(own)]


@pytest.mark.filterwarnings('default:fastddp')
def test_weights_that_drift_become_rank_0s_with_one_warning(tmp_path, capfd):
    learn = plain(4, path=tmp_path)
    noise = Noise(learn)
    learn.distrib_fit(2, 1e-2, callbacks=[noise], nprocs=2)
    said = ' '.join(capfd.readouterr().err.split())
    assert len({*noise.seen}) == 1 and said.count('drifted apart') == 1, said
    assert 'the end of epoch 0 (' in said


class Logs(LearnerCallback):
    def on_epoch_end(self, epoch, **kwargs): logging.getLogger('tests.v1.logs').info('epoch %d', epoch)


def test_logging_as_the_notebook_has_set_it(tmp_path):
    log, handler = logging.getLogger('tests.v1.logs'), logging.FileHandler(tmp_path/'log')
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        learn = plain(8, callback_fns=Logs)
        with learn.distrib_ctx(nprocs=2): learn.fit(2, 1e-2)
    finally:
        log.removeHandler(handler)
        handler.close()
    assert (tmp_path/'log').read_text().splitlines() == ['epoch 0', 'epoch 1']


class OwnError(LearnerCallback):
    "A metric as v1's documentation writes it: of the batches of a validation, added to the table"
    _order = -20
    def on_train_begin(self, **kwargs): self.learn.recorder.add_metric_names(['own'])
    def on_epoch_begin(self, **kwargs): self.total = self.n = 0
    def on_batch_end(self, last_output, last_target, train, **kwargs):
        if train: return
        self.total += float((last_output.argmax(-1) != last_target).float().sum())
        self.n += len(last_target)
    def on_epoch_end(self, last_metrics, **kwargs): return add_metrics(last_metrics, [self.total/self.n])


def test_a_callback_that_adds_a_metric_sees_the_whole_validation_set():
    two, one = pair(lambda bs: plain(bs, callback_fns=[OwnError], metrics=[accuracy]), lambda l: l.fit(2, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    assert two.recorder.names == one.recorder.names and two.own_error.n == one.own_error.n
