"""Interrupt, failure and what is left: fastai v1 shares the rooms that see to it, a few tests prove it."""
import os, signal
import numpy as np, pytest, torch
from learners_v1 import *
from fastddp.all import NotPicklable, RankDied, RankRaised


class At(LearnerCallback):
    "Does `what` on rank 1 at batch `iteration`"
    def __init__(self, learn, what, at=8): 
        super().__init__(learn)
        self.what, self.at = what, at
    def on_batch_begin(self, iteration, train, **kwargs):
        if not train or iteration != self.at or os.environ.get('RANK') != '1': return
        if self.what == 'raise': raise ValueError('no such luck')
        if self.what == 'die': os._exit(3)
        if self.what == 'interrupt': raise KeyboardInterrupt
        if self.what == 'kernel': os.kill(self.parent, signal.SIGINT)


def test_failures_keep_the_last_epoch_and_the_next_fit_works():
    learn = plain(4)
    with learn.distrib_ctx(nprocs=2):
        for what, error in ('raise', RankRaised), ('die', RankDied):
            before = learn.model[0].weight.clone()
            with pytest.raises(error) as e: learn.fit(3, 1e-2, callbacks=[At(learn, what)])
            assert 'rank 1' in str(e.value) and 'last complete epoch' in str(e.value)
            assert len(learn.recorder.val_losses) == 1 and not torch.equal(before, learn.model[0].weight)
        assert 'no such luck' in str(e.value) or error is RankDied
        learn.fit(1, 1e-2)
    assert len(learn.recorder.val_losses) == 1


@pytest.mark.parametrize('what', ['interrupt', 'kernel'])
def test_interrupt_keeps_what_was_trained(what):
    "Raised in a callback of one rank, or the kernel's own: all ranks stop at the same batch"
    learn = plain(4)
    before = learn.model[0].weight.clone()
    cb = At(learn, what)
    cb.parent = os.getpid()
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(30, 1e-2, nprocs=2, callbacks=[cb])
    assert 8 <= len(learn.recorder.losses) < 170 and len(learn.recorder.val_losses) >= 1
    assert not torch.equal(before, learn.model[0].weight)
    learn.fit(1)


def test_refusals():
    learn = plain(4, n=6)
    with pytest.raises(Exception, match='no full batch of 8'): learn.distrib_fit(1, nprocs=2)
    learn = plain(4)
    learn.metrics.append((i for i in ()))
    with pytest.raises(Exception): learn.distrib_fit(1, nprocs=2)
    learn = plain(4)
    for p in learn.model.parameters(): p.requires_grad_(False)
    with pytest.raises(Exception, match='unfreeze'): learn.distrib_fit(1, nprocs=2)
    with pytest.raises(Exception, match="no method 'fit_all'"): learn.distrib('fit_all', nprocs=2)


def test_without_workers_it_runs_here(capsys):
    learn = plain(4)
    learn.distrib_fit(1)
    assert 'training in this process' in capsys.readouterr().out and len(learn.recorder.val_losses) == 1
