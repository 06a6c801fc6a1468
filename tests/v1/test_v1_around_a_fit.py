"""What callbacks of fastai v1 make before a fit, collect in a validation, and raise, and a stop from another thread: as
in one process."""
import threading, time
import pytest
from learners_v1 import *
from fastddp.all import InProcess


class Makes(LearnerCallback):
    "Makes what can't be sent when a fit begins, as the message advises"
    def on_train_begin(self, **kwargs):
        self._open()
        self.numbers = (i for i in range(3))
        self.learn.stream = iter(self.learn.data.train_dl)
    def _open(self): self.letters = (c for c in 'abc')
    def on_epoch_end(self, **kwargs): next(self.numbers), next(self.letters), next(self.learn.stream)


@pytest.mark.filterwarnings('default:fastddp')
@pytest.mark.parametrize('then', ['validate', 'get_preds', 'fit'])
def test_what_is_made_before_a_fit_is_not_sent(then):
    learn = plain(4)
    learn.callbacks.append(Makes(learn))
    learn.fit(1)
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        getattr(learn, then)(*[1][then != 'fit':])
    assert 'stream' in vars(learn)


@pytest.mark.filterwarnings('default:fastddp')
def test_what_is_not_made_there_stays(capsys):
    learn = plain(4)
    learn.callbacks.append(Makes(learn))
    learn.makes.other = (i for i in range(3))
    learn.distrib_fit(1, nprocs=2)
    assert "Makes.other can't be sent to the workers and stays here" in capsys.readouterr().out


class Wrong(LearnerCallback):
    "Numbers of the items that the model gets wrong, and losses, by hand"
    def on_epoch_begin(self, **kwargs): self.items, self.losses, self.at = [], [], 0
    def on_batch_end(self, last_output, last_target, train, **kwargs):
        if train: return
        bad = (last_output.argmax(1) != last_target).nonzero().flatten()+self.at
        self.items += bad.tolist()
        self.losses.append(round(float(kwargs['last_loss']), 4))
        self.at += len(last_target)


@pytest.mark.parametrize('call', [('fit', 1), ('validate',)])
def test_what_is_collected_in_a_validation_is_all_of_it(call):
    def collected(learn, **kwargs):
        learn.callbacks.append(Wrong(learn))
        if kwargs: learn.distrib(*call, **kwargs)
        else: getattr(learn, call[0])(*call[1:])
        return learn.wrong.items, learn.wrong.losses, learn.wrong.at
    seed(5); there = collected(plain(4), nprocs=2)
    seed(5); here = collected(plain(8))
    assert there == here and there[2] == 13


class GivesUp(Exception): pass


class Trial(LearnerCallback):
    "Raises at an event of an epoch, on all ranks"
    def __init__(self, learn, event, at):
        super().__init__(learn)
        self.event, self.at, self.seen = event, at, []
    def on_batch_end(self, epoch, num_batch, train, **kwargs):
        if self.event == 'batch' and train and (epoch, num_batch) == (self.at, 3): raise GivesUp('no better')
    def on_epoch_end(self, epoch, **kwargs):
        self.seen.append(epoch)
        if self.event == 'epoch' and epoch == self.at: raise GivesUp('no better')


@pytest.mark.parametrize('event', ['batch', 'epoch'])
@pytest.mark.parametrize('bs, at, options', [(4, 2, dict(nprocs=2)), (8, 2, dict(launcher=InProcess()))])
def test_an_exception_of_all_ranks_leaves_what_one_process_has(event, bs, at, options):
    two, one = plain(bs), plain(8)
    cbs = Trial(two, event, at), Trial(one, event, at)
    seed(5)
    with pytest.raises(GivesUp) as e: two.distrib_fit(4, 1e-2, callbacks=[cbs[0]], **options)
    seed(5)
    with pytest.raises(GivesUp): one.fit(4, 1e-2, callbacks=[cbs[1]])
    assert cbs[0].seen == cbs[1].seen
    same_weights(two, one)
    same_recorder(two, one)
    if 'nprocs' in options: assert 'holds the last finished batch' in str(e.value)


def test_another_thread_stops_a_call():
    learn = plain(4)
    assert not learn.distrib_stop()
    stopped = []
    def stop():
        while not learn.distrib_stop(): time.sleep(.05)
        stopped.append(True)
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(KeyboardInterrupt): learn.fit(100, 1e-2)
        thread.join()
    assert stopped and len(learn.recorder.val_losses) < 100
    learn.fit(1)
