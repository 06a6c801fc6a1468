"""What public reports of users of several processes are about: each trains as in one process, or is refused by one
sentence before anything starts."""
import threading
import pytest, torch
from fastai.callback.core import Callback
from fastddp.all import NotPicklable
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


class Writes(Callback):
    "Logs to a writer of the notebook, more entries than its queue takes"
    def __init__(self, writer): self.writer = writer
    def after_batch(self): self.writer.add_scalar('loss', self.loss.item(), self.train_iter)
    def after_epoch(self):
        self.writer.add_scalars('both', dict(a=1., b=2.), self.epoch)
        self.writer.flush()


def test_a_writer_of_the_notebook(tmp_path, launcher, capsys):
    "As an attribute it stays in the notebook, with a line; as a variable the fit is refused"
    tensorboard = pytest.importorskip('torch.utils.tensorboard')
    with tensorboard.SummaryWriter(tmp_path/'run') as writer:
        class OfACell(Callback):
            def after_batch(self): writer.add_scalar('loss', self.loss.item(), self.train_iter)
        with pytest.raises(NotPicklable, match='writer'): learner(cbs=OfACell()).distrib_fit(1, nprocs=2)
        learn = learner(cbs=Writes(writer))
        with pytest.raises(AttributeError, match="Writes.writer can't be pickled, so it stayed in the notebook"):
            learn.distrib_fit(1, nprocs=2)
        assert learn.writes.writer is writer
        assert "Writes.writer can't be sent to the workers" in capsys.readouterr().out


class Opens(Writes):
    "Opens its writer where it is used"
    def __init__(self, path): self.path, self.writer = path, None
    def before_fit(self):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(self.path)
    def after_fit(self): self.writer.close()


def test_a_writer_that_is_opened_where_it_is_used(tmp_path, launcher):
    pytest.importorskip('torch.utils.tensorboard')
    learn = learner(cbs=Opens(tmp_path/'run'))
    learn.distrib_fit(2, nprocs=2, launcher=launcher)
    assert [*(tmp_path/'run').glob('events*')] and learn.opens.writer is None


class Prefetches(Callback):
    def __init__(self):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, name='prefetch')


def test_a_thread_that_runs_stays_in_the_notebook(launcher, capsys):
    cb = Prefetches()
    learn = learner(cbs=cb)
    learn.distrib_fit(1, nprocs=2, launcher=launcher)
    cb.thread.start()
    try:
        learn.distrib_fit(1, nprocs=2, launcher=launcher)
        assert "Prefetches.thread can't be sent to the workers" in capsys.readouterr().out
    finally:
        cb.stop.set()
        cb.thread.join()
    learn.distrib_fit(1, nprocs=2, launcher=launcher)
    assert not cb.thread.is_alive()
