"""What people put around `fit`: a tracker's wrapper, a cell's, an own `fit`. It runs once, in the notebook, and the
loop that fastai's `fit` ends with runs on workers."""
import contextlib, functools
import pytest
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastcore.foundation import L
from faults import OneFault
from parity import alone_like, assert_same, fit_both, learner, seed, warm
from fastddp.all import RankRaised


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Rows(Callback):
    "As a tracker's callback: notes what the recorder has logged"
    def __init__(self): self.rows = []
    def after_epoch(self): self.rows.append(round(float(self.recorder.log[1]), 4))


class Tracker:
    "What a tracker's switch does, such as mlflow's `autolog`: a callback more for each fit, and a note when it is over"
    def __init__(self): self.seen = []
    def around(self, fit):
        @functools.wraps(fit)
        def logged(*args, **kwargs):
            cb = Rows()
            try: return fit(*args, **{**kwargs, 'cbs': L(kwargs.get('cbs'))+cb})
            finally: self.seen.append(cb.rows)
        return logged


@pytest.fixture
def tracker(monkeypatch):
    "On fastai's class, as libraries have it"
    res = Tracker()
    monkeypatch.setattr(Learner, 'fit', res.around(Learner.fit))
    return res


CALLS = dict(fit=lambda o: o.fit(2), cycle=lambda o: o.fit_one_cycle(2), tune=lambda o: o.fine_tune(1),
             of_the_class=lambda o: Learner.fit(o, 2), with_cbs=lambda o: o.fit(2, cbs=[Rows()]))


def in_block(o, ctx, call):
    seed(1)
    with ctx, o.no_bar(): return call(o)


@pytest.mark.parametrize('call', CALLS.values(), ids=CALLS)
def test_a_tracker_sees_each_fit(two, tracker, call):
    learn = learner()
    one = alone_like(learn, 2)
    in_block(learn, learn.distrib_ctx(nprocs=2, launcher=two), call)
    seen, tracker.seen = tracker.seen, []
    in_block(one, contextlib.nullcontext(), call)
    assert seen and seen == tracker.seen and all(seen)
    assert_same(learn, one)
    assert not [o for o in learn.cbs if isinstance(o, Rows)]


def test_a_tracker_sees_a_call_and_a_job(two, tracker):
    learn, job = learner(), learner()
    for o, kwargs in (learn, {}), (job, dict(wait=False)):
        seed(1)
        res = o.distrib_fit(2, nprocs=2, launcher=two, **kwargs)
        if kwargs: res.result(120)
    assert_same(learn, job)
    assert [len(o) for o in tracker.seen] == [2, 2] and tracker.seen[0] == tracker.seen[1]


def test_a_wrapper_on_the_object(two):
    "As a cell sets it"
    tracker, learn = Tracker(), learner()
    learn.fit = tracker.around(learn.fit)
    mine = learn.fit
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert [len(o) for o in tracker.seen] == [2] and learn.fit is mine


def test_a_tracker_sees_a_resumed_fit(tracker, tmp_path):
    learn = learner(cbs=[OneFault('library', 'before_batch/train', 1, 1, 1, marker=str(tmp_path/'fired'))])
    with pytest.raises(RankRaised): learn.distrib_fit(3, nprocs=2)
    learn.distrib_resume()
    assert len(learn.recorder.values) == 3 and [len(o) for o in tracker.seen][-1] == 3


class Counts(Learner):
    calls = 0
    def fit(self, n, *args, **kwargs):
        self.calls += 1
        super().fit(n, *args, **kwargs)
        return 'done'


class Looks(Learner):
    def fit(self, *args, **kwargs):
        self.asked = args[0]
        return super().fit(*args, **kwargs)


class Twice(Learner):
    "Two fits in one, and a look between"
    def fit(self, n_epoch, lr=None):
        super().fit(n_epoch, lr)
        self.between = len(self.recorder.losses)
        super().fit(n_epoch, lr, reset_opt=True)


@pytest.mark.parametrize('cls', [Counts, Looks, Twice])
def test_an_own_fit_runs_once_in_the_notebook(two, cls):
    learn = learner(kind=cls)
    learn, one = fit_both(learn, 2, two, 2, .05) if cls is not Twice else both_plain(learn, two)
    assert_same(learn, one)
    state = [{k: vars(o).get(k) for k in ('calls', 'asked', 'between')} for o in (learn, one)]
    assert state[0] == state[1]


def both_plain(learn, two):
    "As `fit_both`, for a `fit` without `cbs`"
    one = alone_like(learn, 2)
    for o, ctx in (learn, learn.distrib_ctx(nprocs=2, launcher=two)), (one, contextlib.nullcontext()):
        in_block(o, ctx, lambda o: o.fit(2, .05))
    return learn, one


def test_what_an_own_fit_returns(two):
    learn = learner(kind=Counts)
    with learn.distrib_ctx(nprocs=2, launcher=two): assert learn.fit(1) == 'done'


def test_restarts_of_an_own_fit_are_one_call(tmp_path):
    learn = learner(kind=Counts, cbs=[OneFault('SIGKILL', 'before_batch/train', 1, 1, 1, marker=str(tmp_path/'fired'))])
    learn.distrib_fit(3, nprocs=2, restarts=1)
    assert learn.calls == 1 and len(learn.recorder.values) == 3


class ByHand(Learner):
    "A loop without the door: nothing of it can run on workers"
    def fit(self, n_epoch):
        self.create_opt()
        self.n_epoch = n_epoch
        self('before_fit')
        self._do_fit()
        self('after_fit')


def test_a_fit_that_does_not_come_to_the_workers_says_so(two, capsys):
    learn = learner(kind=ByHand)
    with learn.distrib_ctx(nprocs=2, launcher=two): learn.fit(1)
    assert "Trained in this process: this fit calls no learn._with_events(..., 'fit', ...)" in capsys.readouterr().out
