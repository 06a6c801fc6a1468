"""What a fit says about where its time went."""
import json, sys, time
import numpy as np, pytest
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.base.board import Board
from fastddp.fastai2.clock import Clock
from fastddp.launch import report
from learners import make_learner
from parity import warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


STEPS = ['ship', 'join', 'load', 'first step', 'train', 'back']


def test_phases_of_a_fit_add_up():
    learn = make_learner()
    assert not learn.distrib_report.calls and 'distrib_fit' in str(learn.distrib_report)
    with learn.no_bar(), learn.no_logging():
        called = time.time()
        learn.distrib_fit(1, nprocs=2)
        first, ended = learn.distrib_report, time.time()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        learn.fit(1)
        second = learn.distrib_report.calls[-1]
        learn.get_preds()
        preds = learn.distrib_report.calls[-1]
    # workers that have just started meet while the notebook still writes
    assert list(first.phases) == ['snapshot', 'helper', 'fork', 'join', 'ship', *STEPS[2:]]
    assert list(second.phases) == ['snapshot', *STEPS]      # the workers are there
    assert list(preds.phases) == ['snapshot', *['validate' if o == 'train' else o for o in STEPS]]
    assert all(secs > 0 for secs in first.phases.values())
    assert called <= first.began and first.began+first.total <= ended
    assert abs(first.phase_ends[-1][1]-first.began-first.total) < 1e-6   # nothing is missing, nothing twice
    assert all(phase in repr(first) for phase in first.phases) and repr(first).startswith('1 epoch: ')


# What ranks say, made up

def rank(secs=None, waits=None, **more):
    res = dict(seconds=dict(forward=3., backward=4., optimizer=1., data=.5, other=.5), waits=waits or {}, uneven={},
               callbacks={}, slowest=(0., 0, 0), loaders=0, grads=2**20, largest=('0.weight', 2**19),
               cpu=1., cores=8.)
    return res | dict(seconds=res['seconds'] | (secs or {})) | more


def fit(*ranks, seconds=10., start=.1, steps=100, epochs=2, **more):
    ranks = ranks or (rank(**more),)
    r = report.Report('2 epochs')
    r.phase_ends.append(('train', r.began+seconds))
    r.add_results([dict(first_batch_at=r.began+start, epochs=epochs, steps=steps, report=o)
                   for o in ([*ranks]*2)[:max(len(ranks), 2)]])
    return r


def test_reports_of_a_block(two):
    "A row for each call; the numbers of each rank add up to its fit, and are plain values"
    learn = make_learner()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        learn.fit(2)
        learn.validate()
        report = learn.distrib_report
        reports = report.calls
    assert [o.what for o in reports] == ['1 epoch', '2 epochs', 'inference']
    assert report.total == max(o.total for o in reports)
    rows = str(report).splitlines()[1:4]
    assert [float(o.split()[0]) for o in rows] == sorted((round(o.total, 2) for o in reports), reverse=True)
    whole = json.loads(json.dumps(reports[1].to_dict()))
    assert len(whole['ranks']) == 2 and whole['state'] > whole['ranks'][0]['grads']
    for r in whole['ranks']:
        assert {'data', 'forward', 'backward', 'optimizer', 'validation', 'metrics'} <= {*r['seconds']}
        assert 0 < sum(r['seconds'].values())+sum(r['waits'].values()) <= whole['seconds']
        assert r['grads'] == sum(p.nbytes for p in learn.model.parameters())
    preds = reports[2].to_dict()
    assert len(preds['ranks']) == 2 and preds['nbytes'] > 0 and 'per step' not in str(reports[2])
    for r in preds['ranks']:
        assert r['seconds']['validation'] > 0 and 'forward' not in r['seconds']
        assert 0 < sum(r['seconds'].values())+sum(r['waits'].values()) <= preds['seconds']
    assert 0 < whole['nbytes'] < 2**20 and ' sent to the workers' in str(reports[1])
    assert ' of state sent back' in str(reports[1])
    assert 'rank 1' in str(reports[1]) and 'waiting for data' in reports[1]._repr_html_()


class SlowItems(list):
    def __getitem__(self, i):
        time.sleep(.05)
        return super().__getitem__(i)


class SlowItem(list):
    i = 0
    def __getitem__(self, i):
        time.sleep(.5*(i == self.i))
        return super().__getitem__(i)


def test_predictions_that_wait_for_data(two):
    learn = make_learner()
    learn.dls.valid.dataset = SlowItems(learn.dls.valid.dataset)
    learn.distrib_get_preds(nprocs=2, launcher=two)
    assert learn.distrib_report.lost('data') > .5, learn.distrib_report


def test_the_longest_wait_for_a_batch_is_a_fact(two):
    learn = make_learner()
    learn.dls.train.shuffle = False
    slow = learn.dls.train.dataset = SlowItem(learn.dls.train.dataset)
    slow.i = 4*learn.dls.train.bs       # the third batch of rank 0, which has the first half of each
    learn.distrib_fit(1, nprocs=2, launcher=two)
    found = [o['slowest'] for o in learn.distrib_report.ranks]
    assert found[0][0] > .3 and found[0][1:] == (0, 2), found
    assert any('epoch 0, batch 2' in o for o in report.facts_of(learn.distrib_report))


def test_the_exchange_of_a_sampled_backward_pass_counts_once():
    "On a GPU the host launches a pass at once; samples show how long the device took, the exchange included"
    clock = Clock(Board(0, 1))
    clock.seconds.update(data=9.5, backward=.5)
    clock.samples.n_steps, clock.samples.n_samples = 64, 2
    clock.samples.sampled['backward'] = .25
    secs = clock.totals(exchange_secs=3.)['seconds']
    assert (secs['backward'], secs['exchange']) == (5., 3.) and sum(secs.values()) == pytest.approx(10.)


class Stops(Callback):
    def before_batch(self):
        if self.epoch == 1: raise KeyboardInterrupt


def test_epochs_that_are_passed_over_are_not_counted(two, capfd):
    learn = make_learner()
    learn.distrib_fit(3, nprocs=2, start_epoch=1, launcher=two)
    assert learn.distrib_report.what == '2 epochs' and '2 epochs in' in capfd.readouterr().out


def test_a_fit_that_was_stopped_has_a_report(two):
    learn = make_learner(cbs=Stops())
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.distrib_report.what == '1 epoch' and len(learn.distrib_report.ranks) == 2


class Sleeps(Callback):
    "After each step of rank 0, `secs`"
    rank0_only = True
    def __init__(self, secs): self.secs = secs
    def after_step(self): time.sleep(self.secs)


def test_a_slow_callback_of_one_rank_is_counted(two):
    "Rank 1 has waited for it"
    learn = make_learner(cbs=Sleeps(.1))
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, nprocs=2, launcher=two)
    r = learn.distrib_report
    assert r.ranks[0]['seconds']['callbacks'] > .5 and r.ranks[1]['waits']['callbacks'] > .4
