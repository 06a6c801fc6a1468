"""What a fit says about where its time went."""
import json, sys, time
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.base.board import Board
from fastddp.fastai2.clock import Clock
from fastddp.launch import report
from fastddp.launch.report import FitNumbers, advice_for
from learners import make_learner
from parity import warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


STEPS = ['ship', 'join', 'load', 'first step', 'train', 'back']


def test_phases_of_a_fit_add_up():
    learn = make_learner()
    assert not learn.distrib_report.calls and 'distrib_fit' in str(learn.distrib_report)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        called = time.time()
        learn.fit(1)
        first, ended = learn.distrib_report, time.time()
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
    assert all(phase in repr(first) for phase in first.phases) and '\n1 epoch: ' in repr(first)


# What is slow, made up: numbers of ranks, and the first sentence

def rank(secs=None, waits=None, **more):
    res = dict(seconds=dict(forward=3., backward=4., optimizer=1., data=.5, other=.5), waits=waits or {}, uneven={},
               callbacks={}, slow=0., starts=0., slowest=(0., 0, 0), loaders=0, threads=1, grads=2**20,
               largest=('0.weight', 2**19), metrics=[], on_gpu=False, peak=2**30, gpu_peak=0,
               cpu=1., cores=8., sizes=(4., 4.))
    return res | dict(seconds=res['seconds'] | (secs or {})) | more


def fit(*ranks, cores=16, seconds=10., start=.1, steps=100, epochs=2):
    ranks = ranks or (rank(),)
    return FitNumbers(seconds, start, cores, epochs, steps, [*ranks]*(2 if len(ranks) == 1 else 1))


def in_turn(**more):
    "Each rank waits for the other one"
    return fit(*(rank(waits=dict(uneven=2.), uneven={1-r: {0: 2.}}, **more) for r in range(2)))


TROUBLES = {
    'data': (fit(rank(dict(data=5.))), 'raise num_workers from 0 to 8'),
    'no core for data': (fit(rank(dict(data=5.), loaders=1), cores=2), 'no core is free'),
    'data on one rank in turn': (fit(rank(dict(data=3.), dict(data=2.))), '50 % of the time the workers wait for data'),
    'loaders': (fit(rank(dict(data=5.), starts=4., loaders=2)), 'num_workers=0'),
    'slow items at the start, too': (fit(rank(dict(data=5.), starts=4.)), 'raise num_workers from 0'),
    'item': (fit(rank(dict(data=5.), slow=4.5, slowest=(1.5, 2, 17))), 'batch 17 of epoch 2 took 1.5 s'),
    'small': (fit(rank(dict(forward=1., backward=1., optimizer=1., exchange=2., other=4.)), steps=1000), 'one worker'),
    'layer': (fit(rank(dict(exchange=4.), grads=2**28, largest=('head.weight', 2**27+1))), 'head.weight'),
    'exchange': (fit(rank(dict(exchange=4.), grads=2**28, largest=('0.weight', 2**24))), 'bf16'),
    'rank': (fit(rank(waits=dict(uneven=6.), uneven={1: {0: .1, 3: 5.9}}), rank()), 'worker 1 since epoch 3'),
    'sizes': (in_turn(sizes=(4., 12.)), 'SortedDL'),
    'turns': (in_turn(), 'all batches are of one size'),
    'metrics': (fit(rank(dict(metrics=4.), metrics=['slow'])), '(slow)'),
    'callback': (fit(rank(dict(callbacks=4.), callbacks=dict(Saves=4., Other=.1)), rank(waits=dict(callbacks=4.))),
                 'into Saves'),
    'validation': (fit(rank(dict(forward=.5, backward=.5, optimizer=.1, validation=8.))), 'val_bs'),
    'start': (fit(seconds=30., start=22.), 'pays from epoch'),
    'threads': (fit(rank(threads=8), cores=2), '16 threads on 2 cores')}


@pytest.mark.parametrize('name', TROUBLES)
def test_the_first_sentence_names_the_cause(name):
    made_up, words = TROUBLES[name]
    first = advice_for(made_up)[0]
    assert words in first.text
    if name in ('loaders', 'item', 'small', 'rank', 'sizes', 'turns', 'start'): assert first.cause == name


@pytest.mark.parametrize('innocent', [
    fit(), fit(rank(), cores=2),
    fit(rank(dict(forward=.01, data=.02, exchange=.02)), seconds=.1),      # too short for a word
    fit(rank(dict(validation=3., metrics=.3, callbacks=.3), callbacks=dict(Recorder=.3)), seconds=13.),
    fit(rank(waits=dict(uneven=.4), uneven={1: {0: .4}}), rank(waits=dict(uneven=.3), uneven={0: {0: .3}})),
    fit(seconds=10., start=1.9)])
def test_no_advice_without_need(innocent): assert advice_for(innocent) == []


def test_at_most_three_sentences_the_best_first():
    found = advice_for(fit(rank(dict(data=4., exchange=3., metrics=5., validation=2.)), seconds=20., start=6.))
    assert [o.cause for o in found] == ['start', 'metrics', 'data']


class Uses(Callback):
    "Needs memory for a moment"
    def before_fit(self): np.ones(self.mb*2**17)


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='elsewhere a process has one peak')
def test_peak_memory_is_that_of_the_call(two):
    learn = make_learner(cbs=Uses())
    peaks = []
    for learn.uses.mb in 400, 1:
        learn.distrib_fit(1, nprocs=2, launcher=two)
        peaks.append([o['peak'] for o in learn.distrib_report.ranks])
    learn.distrib_validate(nprocs=2, launcher=two)
    peaks.append([o['peak'] for o in learn.distrib_report.ranks])
    for first, second, third in zip(*peaks): assert 0 < max(second, third) < first-300*2**20


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
        assert r['grads'] == sum(p.nbytes for p in learn.model.parameters()) and r['peak'] > 2**20
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


def test_predictions_that_wait_for_data(two):
    learn = make_learner()
    learn.dls.valid.dataset = SlowItems(learn.dls.valid.dataset)
    learn.distrib_get_preds(nprocs=2, launcher=two)
    assert learn.distrib_report.advice[0].cause == 'data', learn.distrib_report


def test_the_start_of_loader_processes_is_what_first_batches_take_longer():
    clock = Clock(Board(0, 1))
    def phase(*waits):
        for i, secs in enumerate(waits): clock.batches.note(secs, 0, i)
    phase(.5, .1, .1)
    phase(.3, .1, .1)
    assert clock.totals()['starts'] == pytest.approx(.6)
    clock = Clock(Board(0, 1))     # one batch: nothing to compare it with
    phase(.5)
    assert clock.totals()['starts'] == 0


def test_the_exchange_of_a_sampled_backward_pass_counts_once():
    "On a GPU the host launches a pass at once; samples show how long the device took, the exchange included"
    clock = Clock(Board(0, 1))
    clock.seconds.update(data=9.5, backward=.5)
    clock.samples.n_steps, clock.samples.n_samples = 64, 2
    clock.samples.sampled['backward'] = .25
    clock.exchange_secs = 3.
    secs = clock.totals()['seconds']
    assert (secs['backward'], secs['exchange']) == (5., 3.) and sum(secs.values()) == pytest.approx(10.)


class Stops(Callback):
    def before_batch(self):
        if self.epoch == 1: raise KeyboardInterrupt


def test_a_fit_that_was_stopped_has_a_report(two):
    learn = make_learner(cbs=Stops())
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.distrib_report.what == '2 epochs' and len(learn.distrib_report.ranks) == 2


@pytest.mark.parametrize('on_gpu,causes', [(False, ['callback', 'data']), (True, ['data'])])
def test_of_inference_only_what_its_clock_can_tell(on_gpu, causes):
    "On a GPU the host's clock says what it waited for: a callback that copies predictions, perhaps"
    one = rank(dict(data=3., callbacks=5.), callbacks=dict(Slow=5.), on_gpu=on_gpu)
    assert [o.cause for o in advice_for(fit(one, steps=0, epochs=0))] == causes


def test_on_a_gpu_the_cores_are_no_cause():
    uneven = [rank(waits=dict(uneven=6.), uneven={1: {3: 6.}}, on_gpu=True), rank()]
    assert 'another program on its GPU,' in advice_for(fit(*uneven))[0].text
    assert not advice_for(fit(rank(threads=8, on_gpu=True), cores=2))


def test_waits_that_loading_explains_altogether():
    "No second is left for uneven computing"
    assert not advice_for(fit(rank(uneven={1: {0: 0.}}), rank()))


@pytest.mark.parametrize('on_gpu', [False, True])
def test_memory_of_gpus_where_there_are_some(on_gpu):
    r = report.Report('1 epoch')
    ranks = [rank(on_gpu=on_gpu, gpu_peak=o*2**30) for o in (3, 5)]
    r.add_results([dict(first_batch_at=r.began, epochs=1, steps=10, report=o) for o in ranks])
    assert [o for o in report.facts_of(r) if 'GPU' in o] == ['on GPUs 3,072 MB, 5,120 MB']*on_gpu


class Sleeps(Callback):
    "After each step of rank 0, `secs`"
    rank0_only = True
    def __init__(self, secs): self.secs = secs
    def after_step(self): time.sleep(self.secs)


def test_a_slow_callback_of_one_rank_is_named(two):
    "Rank 1 has waited for it"
    learn = make_learner(cbs=Sleeps(.1))
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, nprocs=2, launcher=two)
    r = learn.distrib_report
    assert any('into Sleeps' in o.text for o in r.advice)
    assert r.ranks[0]['callbacks']['Sleeps'] > .5 and r.ranks[1]['waits']['callbacks'] > .4


def test_a_cause_is_named_once_in_a_session(monkeypatch):
    monkeypatch.setattr(report, '_printed_causes', set())
    def line(seconds):
        r = report.Report('1 epoch')
        r.phase_ends.append(('train', r.began+seconds))
        r.add_results([dict(first_batch_at=r.began, epochs=1, steps=10, report=rank(dict(data=.6*seconds)))]*2)
        return report.advice_line(r)
    assert line(2.) is None and 'wait for data' in line(20.) and line(20.) is None


class Sizes(list):
    "Each step has items of a size of its own, one of `n`"
    def __init__(self, items, n): super().__init__(items); self.n = n
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x.repeat(1+i//32%self.n), y


class Narrow(torch.nn.Module):
    "Takes the first numbers of each item"
    def __init__(self, net): super().__init__(); self.net = net
    def forward(self, x): return self.net(x[:, :8])


@pytest.mark.parametrize('n', [1, 4])
def test_sizes_of_batches_are_measured(two, n):
    learn = make_learner()
    learn.model, learn.dls.train.shuffle = Narrow(learn.model), False
    learn.dls.train.dataset = Sizes(learn.dls.train.dataset, n)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    sizes = [o['sizes'] for o in learn.distrib_report.ranks]
    assert (min(sizes)[0], max(most for _, most in sizes)) == (8, 8*n)
