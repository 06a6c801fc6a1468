"Every callback of fastai's on two workers: its effect, its state in the notebook afterwards, its files, written once."
import csv, math, os, re
from functools import partialmethod
import numpy as np, pytest, torch
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException,
                                  CancelFitException, CancelStepException, CancelTrainException, CancelValidException,
                                  FetchPredsCallback,
                                  event)
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.data import CollectDataCallback     # patches weighted_dataloaders
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.hook import ActivationStats
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
from fastai.callback.rnn import ModelResetter, RNNCallback
from fastai.callback.schedule import ParamScheduler, SchedLin
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import BnFreeze, GradientAccumulation, GradientClip
from fastai.data.all import DataLoaders, Datasets
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.torch_core import TensorImage
from torch import nn
from fastddp.all import *
from applications import as_one, weights
from learners import make_learner, points, seed_all
from parity import Collect
from spread import long_but


def learner(*cbs, **kwargs): return make_learner(cbs=list(cbs), **dict(opt_func=SGD) | kwargs)


def images(*cbs, n=48, bn=(), **kwargs):
    seed_all()
    g = torch.Generator().manual_seed(0)
    items = [((a := torch.randn(3, 8, 8, generator=g)), (a.mean() > 0).long()) for _ in range(n+16)]
    dls = DataLoaders.from_dsets(items[:n], items[n:], bs=8, device='cpu')
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *bn, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=list(cbs), opt_func=SGD,
                   **kwargs)


def fit(learn, n_epoch=2, **kwargs):
    learn.distrib_fit(n_epoch, 0.05, nprocs=2, **kwargs)
    return learn


def test_progress_and_table(capsys):
    "One table with the columns of a local fit, from one rank"
    learn = fit(learner())
    assert any(isinstance(o, ProgressCallback) for o in learn.cbs)
    said = capsys.readouterr().out
    rows = [o for line in said.splitlines() for o in line.split('\r') if o[:1] in '01'
            and re.search(r'\d\d:\d\d$', o.rstrip())]
    assert said.count('train_loss') == 1 and len(rows) == 2 and learn.logger is print


def test_show_graph():
    "The figure is the worker's; what it draws is in the notebook's recorder"
    learn = fit(learner(ShowGraphCallback()))
    assert learn.show_graph.nb_batches == learn.recorder.iters == [7, 14] and len(learn.recorder.losses) == 14


def test_csv_logger(tmp_path):
    "One file, a row per epoch; `append` goes on in a second fit"
    log = CSVLogger(append=True)
    learn = learner(log, path=tmp_path)
    fit(learn)
    fit(learn, 1)
    rows = [*csv.reader(open(tmp_path/'history.csv'))]
    assert [o[0] for o in rows] == ['epoch', '0', '1', 'epoch', '0'] and len(log.read_log()) == 4
    assert float(rows[-1][1]) == pytest.approx(float(learn.recorder.values[-1][0]), abs=1e-5)
    assert learn.logger is print


def test_save_every_epoch(tmp_path, capsys):
    learn = fit(learner(SaveModelCallback(every_epoch=True, fname='m'), path=tmp_path), 3)
    assert sorted(o.name for o in tmp_path.rglob('*.pth')) == ['m_0.pth', 'm_1.pth', 'm_2.pth']
    state = torch.load(tmp_path/'models'/'m_2.pth')
    assert all(torch.equal(v, state[k]) for k, v in weights(learn).items())
    assert learn.save_model.last_saved_path == tmp_path/'models'/'m_2.pth'


def test_early_stopping_and_plateau(capsys):
    "Both decide on the metric of all ranks, so all ranks decide alike"
    stop = EarlyStoppingCallback(monitor='valid_loss', min_delta=100., patience=2)
    plateau = ReduceLROnPlateau(monitor='valid_loss', min_delta=100., patience=1)
    learn = learner(stop, plateau)
    fit(learn, 8)
    assert len(learn.recorder.values) == 3 and stop.wait == 2 and not math.isinf(stop.best)
    assert learn.opt.hypers[-1]['lr'] == pytest.approx(0.05/100)
    assert capsys.readouterr().out.count('early stopping') == 1


class Poison(Callback):
    "Rank 1 meets a NaN in its third batch"
    def after_loss(self):
        if self.training and self.iter == 2 and os.environ['RANK'] == '1':
            self.learn.loss_grad = self.loss_grad*float('nan')
        if self.training and self.iter == 2 and os.environ['RANK'] == '1': self.learn.loss = self.loss*float('nan')


def test_terminate_on_nan():
    "The batch with the NaN is the last one, and is not recorded"
    learn = fit(learner(TerminateOnNaNCallback(), Poison()), 3)
    assert len(learn.recorder.losses) == 2 and learn.train_iter == 3 and learn.recorder.values == []


def test_param_scheduler():
    "The schedule of one process, and `recorder.hps` afterwards"
    learn = fit(learner(), cbs=ParamScheduler({'lr': SchedLin(0.1, 0.), 'mom': SchedLin(.8, .9)}))
    n = len(learn.recorder.losses)
    assert learn.recorder.hps['lr'] == pytest.approx([0.1*(1-i/n) for i in range(n)], abs=1e-6)
    assert len(learn.recorder.hps['mom']) == n


class Mixes(Collect):
    """Of each item of a training batch, as the model gets it: the sum of its numbers, and the weight of its own
    picture in it"""
    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer
    def before_fit(self): self.rows = []
    def before_batch(self):
        if not self.training: return
        for x, own in zip(self.x, self.mixer.lam.expand(len(self.x)), strict=True): self.note(x.sum(), own)


@pytest.mark.parametrize('cb', [MixUp, CutMix])
def test_mixed_images(cb):
    "Each rank mixes its own, as it draws; the loss function is the user's again afterwards"
    mixes = Mixes(mixer := cb(.4))
    learn = images(mixer, mixes)
    loss, plain = learn.loss_func, {round(float(x.sum()), 3) for x, _ in learn.dls.train_ds}
    fit(learn)
    sums, owns = zip(*(zip(*rows) for rows in mixes.ranks))
    assert [len(o) for o in sums] == [48, 48]
    assert all(sum(round(o, 3) not in plain for o in of_rank) > 24
               for of_rank in sums), 'pictures as they are in the dataset'
    assert owns[0] != owns[1] and all(0 <= o <= 1 for of_rank in owns for o in of_rank)
    assert learn.loss_func is loss and len(learn.recorder.values) == 2
    assert torch.isfinite(torch.stack(learn.recorder.losses)).all()


def test_gradient_accumulation():
    "`n_acc` counts the items of all ranks, so the steps are those of one process"
    learn = as_one(lambda: learner(GradientAccumulation(32)))
    assert len(learn.recorder.losses) == 2*13


def test_gradient_clip(): as_one(lambda: learner(GradientClip(.05)))


def frozen_bn(*cbs):
    "A learner whose layer of batch norm isn't trained"
    learn = images(*cbs, bn=[nn.BatchNorm2d(4)])
    learn.model[1].requires_grad_(False)
    return learn


def test_freeze_bn():
    "With it the statistics of frozen batch norm stay as they were, on every rank; without it they move"
    kept, moved = as_one(lambda: frozen_bn(BnFreeze())).model[1], fit(frozen_bn()).model[1]
    assert not kept.running_mean.any() and (kept.running_var == 1).all() and kept.num_batches_tracked == 0
    assert moved.running_mean.all() and (moved.running_var != 1).all() and moved.num_batches_tracked > 0


class Around(Callback):
    "Of each batch that is trained: does `MixedPrecision` stand around it?"
    order = 100
    def __init__(self): self.inside = []
    def after_pred(self):
        if self.training:
            self.inside.append(self.learn.mixed_precision.autocast is not None and self.learn.scaler is not None)


def test_mixed_precision():
    "fastai's is for CUDA only; on the CPU it goes its way around every batch, and the fit is the one without it"
    options = dict(amp_mode='bf16') if 'amp_mode' in MixedPrecision.__init__.__code__.co_varnames else {}
    learn = as_one(lambda: learner(MixedPrecision(**options), Around()))
    assert len(learn.around.inside) == 2*13 and all(learn.around.inside)
    assert all(p.dtype == torch.float32 for p in learn.model.parameters())
    assert learn.distrib_validate(nprocs=2)[0] == pytest.approx(learn.validate()[0], abs=1e-2)


class Layout(Callback):
    "Are the weights of convolutions where they are trained in the format that `ChannelsLast` wants?"
    def after_batch(self):
        self.wanted = all(p.is_contiguous(memory_format=torch.channels_last) for p in self.model.parameters()
                          if p.dim() == 4)


def test_channels_last():
    layouts, losses = [], []
    for cbs in ([], [ChannelsLast()]):
        learn = fit(images(layout := Layout(), *cbs))
        layouts.append(layout.wanted)
        losses.append([float(o) for o in learn.recorder.losses])
        assert type(learn.model) is nn.Sequential
    assert layouts == [False, True] and losses[0] == pytest.approx(losses[1], abs=1e-5)


class Net(nn.Module):
    "An RNN as `RNNCallback` wants it: output, raw outputs, outputs after dropout"
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(8, 4, batch_first=True), nn.Linear(4, 2)
    def reset(self): pass
    def forward(self, x):
        raw, _ = self.rnn(x[:, None])
        return self.head(raw[:, -1]), raw, raw


def test_rnn_callbacks(): as_one(lambda: learner(ModelResetter(), RNNCallback(), model=Net))


def labelled(n=64):
    items = points(n+16)
    dsets = Datasets(list(range(n+16)), [[lambda i: items[i][0]], [lambda i: int(items[i][1])]],
                     splits=[list(range(n)), list(range(n, n+16))])
    return dsets


class Drawn(Collect):
    "The first number of each item that a rank trains with"
    def before_fit(self): self.rows = []
    def before_batch(self):
        if not self.training: return
        for x in self.x: self.note(x[0])


def test_weighted_data():
    "Only what has a weight is drawn, on every rank"
    seed_all()
    dsets, w = labelled(), [1.]*32+[0.]*32
    dls = dsets.weighted_dataloaders(w, bs=8, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Linear(8, 2), loss_func=CrossEntropyLossFlat())
    learn.distrib_fit(1, nprocs=2, cbs=(drawn := Drawn()))
    may = {float(dsets.train[i][0][0]) for i in range(32)}
    assert len(learn.recorder.losses) == 4 and [len(o) for o in drawn.ranks] == [32, 32]
    assert all({x for x, in rows} <= may for rows in drawn.ranks)


def test_part_of_the_data():
    "Each epoch draws so many items anew: in the sum over the ranks, and the ones that one process draws"
    def make():
        seed_all()
        return Learner(labelled().partial_dataloaders(partial_n=24, bs=8, num_workers=0, device='cpu'), nn.Linear(8, 2),
                       loss_func=CrossEntropyLossFlat(), opt_func=SGD)
    assert len(as_one(make).recorder.losses) == 2*3


class Seen(Callback):
    "Keeps a list, a tensor, a figure and the learner"
    def __init__(self): self.losses, self.last, self.fig, self.who = [], None, None, None
    def after_batch(self):
        if self.training: self.losses.append(float(self.loss))
    def after_epoch(self):
        import matplotlib.pyplot as plt
        self.last, self.who = self.pred.detach().clone() if self.pred is not None else torch.zeros(1), self.learn
        self.fig, ax = plt.subplots()
        ax.plot(self.losses)
        plt.close(self.fig)


def test_a_callback_of_ones_own():
    seen = Seen()
    mine = seen.losses
    learn = fit(learner(seen))
    assert len(seen.losses) == len(learn.recorder.losses) and seen.losses is mine
    assert isinstance(seen.last, torch.Tensor) and seen.who is learn
    assert seen.fig.axes[0].lines[0].get_ydata()[0] == mine[0]


def test_activation_stats():
    "It hooks into `learn.model[i]`; the statistics are those of rank 0's part of each batch"
    there, here = [learner(ActivationStats(with_hist=True, every=2), n=41) for _ in range(2)]
    there.distrib_fit(2, 0.05, nprocs=2, batch='global')
    here.fit(2, 0.05)
    a, b = there.activation_stats, here.activation_stats
    assert len(a.stats) == len(b.stats) > 2 and not any(m._forward_hooks for m in there.model.modules())
    for i in range(2): assert len(a.layer_stats(i)) == 3 and a.hist(i).shape == b.hist(i).shape


def test_collect_data():
    "Rank 0's part of each training batch, and all batches of a validation"
    there, here = learner(CollectDataCallback(), n=41), learner(CollectDataCallback(), n=41)
    seed_all(1)
    there.distrib_fit(2, 0.05, nprocs=2, batch='global')
    seed_all(1)
    here.fit(2, 0.05)
    a, b = there.collect_data.data, here.collect_data.data
    assert len(a) == len(b) == 2*(3+3)
    for i, ((xb, yb, pred, _), (xb1, yb1, pred1, _)) in enumerate(zip(a, b)):
        part = slice(None, None, 2 if i % 6 < 3 else 1)
        n = len(xb1[0][part])
        assert torch.equal(xb[0][:n], xb1[0][part]) and torch.equal(yb[0][:n], yb1[0][part])
        assert torch.allclose(pred[:n], pred1[part], atol=1e-5)


def test_fetch_preds():
    fetch = FetchPredsCallback()
    learn = fit(learner(), cbs=fetch)
    for a, b in zip(fetch.preds, learn.get_preds(), strict=True): assert torch.allclose(a.float(), b.float(), atol=1e-5)


class Saves(Callback):
    "Saves predictions to files in the middle of a fit"
    def __init__(self, path): self.path, self.preds = path, None
    def after_epoch(self):
        self.learn.get_preds(inner=True, save_preds=self.path/f'{self.epoch}',
                             save_targs=self.path/f'targs{self.epoch}')
        self.preds = self.learn.get_preds(inner=True)[0]


def test_predictions_saved_in_a_fit(tmp_path):
    "One file per batch, under the names of one process; as many as there are"
    for o in '0', '1', 'targs0', 'targs1': (tmp_path/o).mkdir()
    cb = Saves(tmp_path)
    learn = fit(learner(cb))
    files = sorted((tmp_path/'1').iterdir(), key=lambda o: int(o.stem))
    assert [o.stem for o in files] == [str(i) for i in range(len(learn.dls.valid))]
    assert sorted(o.name for o in (tmp_path/'targs1').iterdir()) == sorted(o.name for o in files)
    learn.remove_cb(cb)     # `get_preds` ends with an `after_epoch` of its own
    preds = torch.softmax(torch.cat([torch.load(o) for o in files]), -1)
    assert torch.allclose(preds, torch.softmax(learn.get_preds()[0], -1), atol=1e-5) and len(cb.preds) == 41


class Leave(Callback):
    "Raises at one event, on the last rank only, or in the only process"
    order = 70      # after the recorder
    def __init__(self, event, error): self.event, self.error, self.left = event, error, False
    def __call__(self, event_name):
        inner = event_name in ('before_batch', 'before_backward', 'before_step', 'after_batch')
        here = event_name == self.event and os.environ.get('RANK', '1') == '1' and getattr(self.learn, 'epoch', 0) == 0
        if not here or (inner and not (self.learn.training and self.learn.iter == 1)): return
        self.left = True
        raise self.error()


CANCELS = dict(batch=('before_batch', CancelBatchException), backward=('before_backward', CancelBackwardException),
               train=('after_batch', CancelTrainException),
               valid=('before_validate', CancelValidException), epoch=('after_train', CancelEpochException),
               fit=('before_epoch', CancelFitException))


@pytest.mark.parametrize('what', long_but(CANCELS, 'batch', 'epoch'))
def test_every_cancel_on_one_rank(what):
    "All ranks leave together, as one process does, and the learner is fine afterwards"
    made = []
    def make():
        made.append(learner(Leave(*CANCELS[what])))
        return made[-1]
    learn = as_one(make)
    assert made[1].leave.left and not made[0].leave.left      # here, and by rank 1 instead of rank 0
    learn.remove_cb(Leave)
    fit(learn, 1)
    assert len(learn.recorder.values) == 1


def test_a_step_that_one_rank_leaves(capfd):
    "After the backward pass, too, all ranks leave together"
    as_one(lambda: learner(Leave('before_step', CancelStepException)))
    assert "the workers' weights had drifted apart" not in capfd.readouterr().err


IN_BATCH = ('before_batch', 'before_step', 'after_batch')


class Loads(Callback):
    "Loads the file `begun` at some events of the first epoch; `rank` alone, or all"
    def __init__(self, *events, rank=None): self.events, self.rank = events, rank
    def __call__(self, event_name):
        elsewhere = os.environ.get('RANK', '0') not in (self.rank or '01')
        if event_name not in self.events or getattr(self.learn, 'epoch', 0) or elsewhere: return
        if event_name not in IN_BATCH+('after_loss',) or (self.learn.training and self.learn.iter == 1):
            self.learn.load('begun', with_opt=False)


def begun(cb, path):
    learn = learner(cb, path=path, n=64)
    learn.save('begun')
    return learn


AROUND = ('before_epoch', 'before_train', 'after_train', 'before_validate', 'after_validate', 'after_epoch')


@pytest.mark.parametrize('n_acc', [1, 24])
def test_load_on_all_ranks(tmp_path, n_acc):
    "Whenever it may be in one process, also while gradients are gathered"
    def make():
        learn = begun(Loads(*IN_BATCH, *AROUND), tmp_path)
        return learn.add_cb(GradientAccumulation(n_acc)) if n_acc > 1 else learn
    as_one(make)


@pytest.mark.few(5)
@pytest.mark.parametrize('event,rank',
                         [(e, '01'[i % 2]) for i, e in enumerate(('before_fit', *AROUND, *IN_BATCH, 'after_fit'))])
def test_load_on_one_rank_only(tmp_path, event, rank):
    "Refused at once, with the remedy; nobody waits for ever"
    with pytest.raises(RankRaised, match=f'Rank {rank} called learn.load.*Call it on all workers') as e:
        fit(begun(Loads(event, rank=rank), tmp_path), 1)
    assert e.value.rank == int(rank)


def test_load_within_a_step(tmp_path):
    with pytest.raises(RankRaised, match='Load before or after the batch'): fit(begun(Loads('after_loss'), tmp_path), 1)


class LoadsAlone(Loads): rank0_only = True


def test_load_by_a_callback_of_rank_0(tmp_path):
    with pytest.raises(RankRaised, match='without `rank0_only`'): fit(begun(LoadsAlone('after_epoch'), tmp_path), 1)


class LoadsIfThere(Callback):
    "Goes on without a file, and with one of another model, of which torch loads what fits"
    def __init__(self, name, error): self.name_of_file, self.error = name, error
    def before_epoch(self):
        try: self.learn.load(self.name_of_file, with_opt=False)
        except self.error: self.n_failed = getattr(self, 'n_failed', 0)+1


@pytest.mark.parametrize('name,error', [('missing', FileNotFoundError), ('other', RuntimeError)])
def test_load_that_fails_on_all_ranks(tmp_path, name, error):
    "The exception of rank 0 is raised on all ranks, whose callbacks may catch it; then all have rank 0's weights"
    def make():
        learn = learner(cb := LoadsIfThere(name, error), path=tmp_path)
        first, *_ = learn.model.state_dict().items()
        (tmp_path/'models').mkdir(exist_ok=True)
        torch.save(dict([first]), tmp_path/'models'/'other.pth')
        return learn
    learn = as_one(make)
    assert learn.loads_if_there.n_failed == 2


class WritesOnce(Callback):
    "A callback that says for itself that it acts outside"
    rank0_only = True
    def __init__(self, path): self.path = path
    def after_epoch(self): open(self.path, 'a').write(f"{os.environ['RANK']} {self.epoch}\n")


class Looks(Callback):
    "Acts on rank 0 only, predicts there, draws random numbers, and adds a callback that predicts, too"
    rank0_only = True
    def before_fit(self):
        self.fetch, self.said = FetchPredsCallback(), []
        self.learn.add_cb(self.fetch)
    def before_epoch(self): self.said.append(float(self.dls.train.one_batch()[0].sum()))
    def after_fit(self):
        self.said.append(len(self.fetch.preds[0]))
        self.learn.remove_cb(self.fetch)


def test_rank0_only(tmp_path):
    "Also where it is one of the fit's own; what it predicts and draws keeps nobody waiting and changes nothing"
    cb, looks = WritesOnce(tmp_path/'log'), Looks()
    learn, plain = learner(looks), learner()
    seed_all(1)
    fit(learn, cbs=cb)
    assert (tmp_path/'log').read_text() == '0 0\n0 1\n'
    assert len(looks.said) == 3 and looks.said[-1] == 41
    seed_all(1)
    fit(plain)
    assert all(torch.equal(v, weights(plain)[k]) for k, v in weights(learn).items())


class LeavesBatch(Callback):
    "All ranks leave the first epoch in the middle of its second batch, and there the second one with the whole fit"
    def after_loss(self):
        if self.training and self.iter == 1: raise (CancelEpochException,CancelFitException)[self.epoch]


class LooksAtGradients(Callback):
    "Makes backward passes on rank 0 before, between and after the epochs"
    rank0_only, order = True, 70
    def before_fit(self): self.norms = []
    def backward(self):
        x, = self.dls.valid.one_batch()[:-1]
        self.model(x.detach()).sum().backward()
        self.norms.append(sum(float(p.grad.norm()) for p in self.model.parameters()))
        self.model.zero_grad()
    def before_epoch(self): self.backward()
    def after_epoch(self): self.backward()
    def after_fit(self): self.backward()


def test_backward_passes_of_rank_0_after_a_batch_that_was_left():
    "They are no passes of the batch that was left, so no other rank waits, and no gradient is averaged"
    looks = LooksAtGradients()
    learn, plain = learner(LeavesBatch(), looks), learner(LeavesBatch())
    seed_all(1)
    fit(learn)
    assert len(looks.norms) == 4 and all(o > 0 for o in looks.norms)
    seed_all(1)
    fit(plain)
    assert all(torch.equal(v, weights(plain)[k]) for k, v in weights(learn).items())


class Told(Callback):
    "Notes each event, and where the learner is"
    def __init__(self, log, label, order): self.log, self.label, self.order = log, label, order
    @property
    def name(self): return self.label
    def note(self, event):
        learn = self.learn
        self.log.append((self.label, event, getattr(learn, 'epoch', None), getattr(learn, 'iter', None),
                         getattr(learn, 'training', None)))


for _event in filter(lambda o: o[0] != '_', vars(event)): setattr(Told, _event, partialmethod(Told.note, _event))


class Busy(Callback):
    "Rank 0's own: adds and removes others, predicts in each phase, and leaves wherever it may"
    rank0_only, order = True, 60      # after the recorder
    def __init__(self, log): self.log, self.sizes, self.loop = log, [], ''
    def at(self, *where): return self.training and (self.epoch, self.iter) == where
    def before_epoch(self):
        self.loop = type(vars(self.learn).get('_call_one')).__name__
        self.learn.add_cb(Told(self.log, 'between', 61))
        if self.epoch == 4: raise CancelFitException()
        self.predict()
    def before_train(self):
        if self.epoch == 3: raise CancelEpochException()
    def before_batch(self):
        if self.at(0, 1): self.learn.add_cb(Told(self.log, 'in_between', 62))
        if self.at(1, 1): raise CancelBatchException()
    def before_backward(self):
        if self.at(1, 2): raise CancelBackwardException()
    def before_step(self):
        if self.at(0, 2): raise CancelStepException()
    def after_batch(self):
        if self.at(2, 1): raise CancelTrainException()
    def after_train(self):
        if self.epoch == 0: self.learn.add_cb(FetchPredsCallback())
    def before_validate(self):
        if self.epoch == 1 and not self.inner: raise CancelValidException()
    def after_epoch(self):
        if self.epoch == 0: self.sizes.append(len(self.learn.fetch_preds.preds[0]))
        self.learn.remove_cbs([cb for cb in self.learn.cbs if cb.name in ('between', 'fetch_preds')])
        self.run = False        # a validation ends an epoch, too; its `after_fit` sets `run` back
        self.learn.validate()
    def predict(self):
        self.inner = True
        self.sizes.append(len(self.learn.get_preds(inner=True)[0]))
        self.inner = False


def test_events_of_a_busy_callback_of_rank0s_own():
    "Every callback is asked for the events of a local fit, in its order, and by the loop that asks only who has a say"
    def told(how):
        log = []
        seed_all()
        learn = learner(Told(log, 'first', -20), Busy(log), Told(log, 'last', 70), n=24, n_valid=8, bs=8)
        with learn.no_logging(): how(learn)
        return learn.busy.log, learn.busy
    here, one = told(lambda learn: learn.fit(6, .01))
    there, busy = told(lambda learn: learn.distrib_fit(6, .01, nprocs=2, batch='global'))
    assert there == here and len({label for label, *_ in here}) == 4
    assert busy.sizes == one.sizes and busy.loop == 'EventDispatcher'


class PredictsInside(Callback):
    rank0_only = True
    def after_batch(self): self.learn.get_preds()


def test_rank0s_own_predictions_in_the_middle_of_training_are_refused():
    with pytest.raises(RankRaised, match='acts on rank 0 only predicts or validates in the middle of training'):
        learner(PredictsInside()).distrib_fit(1, nprocs=2)


def test_tensorboard(tmp_path):
    "One event file per fit, from one process; the model is traced with a batch that is no other rank's affair"
    pytest.importorskip('tensorboard', reason='tensorboard is not installed')
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn, plain = learner(), learner()
    seed_all(1)
    fit(learn, cbs=TensorBoardCallback(log_dir=tmp_path, trace_model=True, log_preds=False))
    files = [*tmp_path.glob('events*')]
    assert len(files) == 1
    log = EventAccumulator(str(tmp_path)).Reload()
    # it writes after validation batches, too
    assert len(log.Scalars('train_loss')) == len(learn.recorder.losses) + 2*2
    assert [o.value for o in log.Scalars('valid_loss')] == pytest.approx([o[1] for o in learn.recorder.values])
    seed_all(1)
    fit(plain)
    assert all(torch.equal(v, weights(plain)[k]) for k, v in weights(learn).items())


def shades():
    "A learner of 16+8 grey pictures"
    from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, IndexSplitter
    seed_all()
    block = DataBlock((ImageBlock, CategoryBlock), get_items=lambda _: list(range(24)),
                      splitter=IndexSplitter(list(range(16, 24))),
                      get_x=lambda i: np.full((8, 8, 3), 10*i, dtype=np.uint8), get_y=lambda i: 'ab'[i % 2])
    return Learner(block.dataloaders('.', bs=3, num_workers=0, device='cpu'),
                   nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), opt_func=SGD)


@pytest.mark.full
def test_tensorboard_with_predictions(tmp_path, monkeypatch):
    "`log_preds` shows what the model makes of a batch: once per epoch, by rank 0 alone"
    pytest.importorskip('tensorboard', reason='tensorboard is not installed')
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn, plain = shades(), shades()
    seed_all(1)
    fit(learn, cbs=TensorBoardCallback(log_dir=tmp_path, trace_model=False, n_preds=3))
    assert len([*tmp_path.glob('events*')]) == 1
    log = EventAccumulator(str(tmp_path)).Reload()
    shown = [log.Images(o) for o in log.Tags()['images']]
    assert shown and all([o.step for o in images] == [2, 4] for images in shown)
    seed_all(1)
    fit(plain)
    assert all(torch.equal(v, weights(plain)[k]) for k, v in weights(learn).items())


class Images(Callback):
    "fastai's projector wants the images that its own `CastToTensor` has made plain tensors (2.7.19 and 2.8.12)"
    order = 10
    def before_batch(self): self.learn.xb = (TensorImage(self.x),)


def test_tensorboard_projector(tmp_path, capsys):
    "Features of the whole set in one piece: for their sake predictions are made in the notebook, and a line says so"
    pytest.importorskip('tensorboard', reason='tensorboard is not installed')
    from fastai.callback.tensorboard import TensorBoardProjectorCallback
    learn = shades()
    learn.add_cbs([TensorBoardProjectorCallback(log_dir=tmp_path, layer=learn.model[1]), Images()])
    preds = learn.distrib_get_preds(nprocs=2)[0]
    assert 'Running in this process, not on workers: TensorBoardProjectorCallback writes' in capsys.readouterr().out
    [features] = tmp_path.rglob('tensors.tsv')
    assert len(features.read_text().splitlines()) == len(preds) == 8


class Few:
    "A dataset as `WandbCallback` can describe it"
    def __init__(self, n, seed=0): self.n, self.pairs = n, dict(enumerate(points(n, seed)))
    def __len__(self): return self.n
    def __getitem__(self, i): return self.pairs[i]


@pytest.mark.full
def test_wandb(tmp_path, monkeypatch, capsys):
    "The notebook's offline run goes on over two fits on the workers, and a third in the notebook"
    wandb = pytest.importorskip('wandb', reason='wandb is not installed')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    from fastai.callback import wandb as theirs
    plain_args = theirs.init_args
    class Wandb(theirs.WandbCallback):
        def before_fit(self):
            # fastai 2.8.12 asks plain values for their arguments, which the `init_args` of fastcore 2.2 refuses
            theirs.init_args = lambda o: plain_args(o) if hasattr(o, '__dict__') else {}
            super().before_fit()
            if wandb.run: wandb.config.update({f'rank{os.environ.get("RANK")}': 1})
    seed_all()
    dls = DataLoaders.from_dsets(Few(40), Few(16, 1), bs=4, device='cpu')
    learn = Learner(dls, nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, opt_func=SGD,
                    path=tmp_path,
                    cbs=Wandb(valid_dl=dls.valid.new(Few(6))))
    run = wandb.init(project='tests', dir=tmp_path, config=dict(mine=1))
    try:
        with learn.distrib_ctx(nprocs=2):
            learn.fit(2, .01)
            assert run.step == 2*5 and dict(run.summary)['epoch'] == 2
            assert dict(run.summary)['accuracy'] == pytest.approx(learn.recorder.values[-1][2])
            learn.fit(1, .01)
        assert run.step == 3*5 and run.config['mine'] == 1 and 'rank1' not in run.config.keys()
        run.log(dict(by_hand=1))
        learn.fit(1, .01)
        assert run.step == 3*5+1+10 and dict(run.summary)['epoch'] == 4 and wandb.run is run
    finally:
        theirs.init_args = plain_args
        wandb.finish()
        wandb.teardown()
    assert len([*tmp_path.glob('wandb/offline-run-*/*.wandb')]) == 1
    assert not any(isinstance(cb, FetchPredsCallback) for cb in learn.cbs)


class Watches(Callback):
    "Acts on rank 0 only, and has a say in every phase"
    rank0_only = True
    def __init__(self): self.seen = []
    def before_train(self): self.seen.append(('train', self.epoch))
    def after_train(self): self.seen.append(('trained', self.epoch))


def test_rank0_only_with_torchs_own_loaders():
    ds = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
    dl = torch.utils.data.DataLoader(ds, batch_size=4, shuffle=True)
    learn = Learner(DataLoaders(dl, dl), nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss(), lr=.1, cbs=Watches())
    learn.distrib_fit(2, nprocs=2)
    assert learn.watches.seen == [('train', 0), ('trained', 0), ('train', 1), ('trained', 1)]
