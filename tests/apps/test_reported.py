"""What public reports of users of several processes are about: each trains as in one process, or is refused by one
sentence before anything starts."""
import threading
import pytest, torch
from fastai.callback.core import Callback
from fastddp.all import InProcess, NotPicklable
from torch import nn
from parity import fit_both, learner, warm


@pytest.fixture(scope='module')
def launcher():
    with warm(2) as w: yield w


class Share:
    "The share of right predictions, as an object without a name"
    def __call__(self, pred, y): return (pred.argmax(1) == y).float().mean()


@pytest.mark.parametrize('metric', [Share, nn.CrossEntropyLoss])
def test_a_metric_without_a_name(metric, launcher):
    many, one = fit_both(learner(metrics=metric()), 2, launcher, 2)
    assert [*many.recorder.metric_names] == [*one.recorder.metric_names]
    torch.testing.assert_close(torch.tensor(many.recorder.values), torch.tensor(one.recorder.values))
    assert metric.__name__ in many.distrib_report.to_dict()['ranks'][0]['metrics']


class Writes(Callback):
    "Logs to a writer of the notebook, more entries than its queue takes"
    def __init__(self, writer): self.writer = writer
    def after_batch(self): self.writer.add_scalar('loss', self.loss.item(), self.train_iter)
    def after_epoch(self):
        self.writer.add_scalars('both', dict(a=1., b=2.), self.epoch)
        self.writer.flush()


@pytest.mark.parametrize('how', ['attribute', 'variable', 'in one process'])
def test_a_writer_of_the_notebook(how, tmp_path, launcher):
    tensorboard = pytest.importorskip('torch.utils.tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    writer = tensorboard.SummaryWriter(tmp_path/'run', max_queue=3)
    writer.add_scalar('before', 1.)
    class OfACell(Callback):
        def after_batch(self): writer.add_scalar('loss', self.loss.item(), self.train_iter)
    cb = OfACell() if how == 'variable' else Writes(writer)
    learn = learner(cbs=cb)
    learn.distrib_fit(2, nprocs=2, launcher=InProcess() if how == 'in one process' else launcher)
    writer.add_scalar('after', 1.)
    writer.close()
    assert how == 'variable' or learn.writes.writer is writer
    read = EventAccumulator(str(tmp_path/'run'))
    read.Reload()
    assert {*read.Tags()['scalars']} == {'before', 'loss', 'after'}
    # a callback sees the batches of its rank, of training and of validation
    assert len(read.Scalars('loss')) >= len(learn.recorder.losses) > 3
    # one file of the notebook, and one of rank 0 for the fit
    assert len([*(tmp_path/'run').glob('events*')]) == (1 if how == 'in one process' else 2)


class Prefetches(Callback):
    def __init__(self):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, name='prefetch')


def test_a_thread_that_runs_is_refused_at_once_and_an_idle_one_is_not(launcher):
    cb = Prefetches()
    learn = learner(cbs=cb)
    learn.distrib_fit(1, nprocs=2, launcher=launcher)
    cb.thread.start()
    try:
        with pytest.raises(NotPicklable, match="learn.prefetches.thread .*a running thread: 'prefetch'"):
            learn.distrib_fit(1, nprocs=2, launcher=launcher)
    finally:
        cb.stop.set()
        cb.thread.join()
    learn.distrib_fit(1, nprocs=2, launcher=launcher)
    assert not cb.thread.is_alive()
