"""Interrupt, failure and what is left: fastai v1 has the same launch and process, a few tests prove it."""
import os, signal, subprocess, sys
from pathlib import Path as P
from unittest import mock
import numpy as np, pandas as pd, pytest, torch
from learners_v1 import *
from fastai.callbacks import CSVLogger
from fastddp.all import InProcess, RankDied, RankRaised
from fastddp.base.errors import CantDistribute
from fastddp.launch.engine import Launcher


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
            assert ('no such luck' if what == 'raise' else 'exited with code 3') in str(e.value)
            assert len(learn.recorder.val_losses) == 1 and not torch.equal(before, learn.model[0].weight)
        learn.fit(1, 1e-2)
    assert len(learn.recorder.val_losses) == 1


class Fails(LearnerCallback):
    "In the second epoch, on rank 1"
    def on_batch_end(self, epoch, train, **kwargs):
        if train and epoch == 1 and os.environ['RANK'] == '1': 1/0


def test_the_last_complete_epoch_is_not_what_the_next_one_makes_of_it():
    expected, learn = plain(4), plain(4)
    for o, epochs in (expected, 1), (learn, 3):
        seed(5)
        cbs = [Fails(o)] if epochs > 1 else []
        try: o.distrib_fit(epochs, 1e-2, callbacks=cbs, nprocs=2)
        except ZeroDivisionError: assert cbs
    for a, b in zip(expected.model.parameters(), learn.model.parameters()): assert torch.equal(a, b)


class Dies(LearnerCallback):
    "Rank 1 dies in the second epoch, as long as fewer than `times` marks lie in `folder`"
    def __init__(self, learn, folder, times):
        super().__init__(learn)
        self.folder, self.times, self.seen = folder, times, []
    def on_batch_begin(self, iteration, train, **kwargs):
        if not train: return
        self.seen.append(iteration)
        n = len(list(self.folder.glob('mark*')))
        if iteration == 8 and os.environ.get('RANK') == '1' and n < self.times:
            (self.folder/f'mark{n}').touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_restarts(tmp_path, capsys):
    """A rank that is killed in its second epoch: with a restart the fit is, to the bit, the one that nobody
    disturbed; without one left, the first epoch is kept"""
    def train(name, times, **options):
        (tmp_path/name).mkdir()
        learn = plain(4, path=tmp_path/name, callback_fns=[CSVLogger])
        cb = Dies(learn, tmp_path/name, times)
        seed(5)
        try: learn.distrib_fit_one_cycle(3, 1e-2, nprocs=2, callbacks=[cb], **options)
        except RankDied as e: assert 'last complete epoch' in str(e) and 'rank 1' in str(e)
        return learn, cb, torch.rand(1).item()
    (calm, a, after_calm), (killed, b, after_killed) = train('calm', 0), train('killed', 2, restarts=2)
    said = capsys.readouterr().out
    assert said.count('begins anew') == 2 and '(0 restarts left)' in said and 'rank 1' in said
    same_weights(killed, calm, 0)
    same_recorder(killed, calm, 0)
    assert len(killed.recorder.losses) == 18 and a.seen == b.seen == list(range(18)) and after_calm == after_killed
    rows = [pd.read_csv(tmp_path/name/'history.csv').drop(columns='time') for name in ('calm', 'killed')]
    pd.testing.assert_frame_equal(*rows)
    lost, c, _ = train('lost', 2, restarts=1)
    assert len(lost.recorder.val_losses) == 1 and lost.recorder.val_losses[0] == calm.recorder.val_losses[0]
    assert c.seen == list(range(6))
    # a restart is left, and no machine for it
    with mock.patch.object(Launcher, 'place_after_failure', side_effect=CantDistribute('No machine is left.')):
        left, *_ = train('left', 1, restarts=1)
    assert left.recorder.val_losses == lost.recorder.val_losses


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
    with pytest.raises(Exception, match="can't be sent"): learn.distrib_fit(1, nprocs=2)
    learn = plain(4)
    for p in learn.model.parameters(): p.requires_grad_(False)
    with pytest.raises(Exception, match='unfreeze'): learn.distrib_fit(1, nprocs=2)
    learn = plain(4)
    sampler = torch.utils.data.DistributedSampler(learn.data.train_ds, num_replicas=2, rank=0)
    learn.data.train_dl = learn.data.train_dl.new(shuffle=False, sampler=sampler)
    for options in (dict(nprocs=2), dict(launcher=InProcess())):
        with pytest.raises(Exception, match='its `DistributedSampler`'): learn.distrib_fit(1, **options)
    with pytest.raises(Exception, match="no method 'fit_all'"): learn.distrib('fit_all', nprocs=2)


def test_without_workers_it_runs_here(capsys):
    learn = plain(4)
    learn.distrib_fit(1)
    assert 'running in this process' in capsys.readouterr().out and len(learn.recorder.val_losses) == 1
    seed(5); learn = plain(4); learn.distrib_fit(1, launcher=InProcess())      # the only rank, for the debugger
    seed(5); one = plain(4); one.fit(1)
    same_weights(learn, one)


@pytest.mark.full
def test_nothing_of_fastai_2_is_imported():
    code = ("import sys, fastddp.all, fastddp.fastai1.learner, fastddp.magics\n"
            "print(*[m.split('.')[1] for m in sys.modules if m.startswith('fastddp.')])")
    loaded = set(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120,
                                check=True).stdout.split())
    assert 'fastai1' in loaded and 'fastai2' not in loaded
