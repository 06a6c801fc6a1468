"""The workers of a block begin when it opens, and form their group while the cell goes on"""
import contextlib, os, time, types
import pytest
from fastddp.all import *
from fastddp.launch import session
from fastddp.process.helper import marks_of_helper
from learners import make_learner
from traces import children


def wait_until(is_so):
    end = time.monotonic()+60
    while not is_so() and time.monotonic() < end: time.sleep(.02)
    assert is_so()


def test_block_starts_its_workers():
    "Before the first call its workers are in their group; the call has the phases that it waited for"
    marks_of_helper()       # the helper is ready, as it is some seconds after `import fastddp.all`
    before = children()
    learn = make_learner()
    with learn.distrib_ctx(nprocs=2), learn.no_bar(), learn.no_logging():
        workers = children()-before
        assert len(workers) == 2
        launcher = learn.distrib_session['session'].launcher
        # the file at which the ranks of a group meet
        wait_until(lambda: os.path.exists(launcher._rendezvous))
        pids = [p.pid for p in launcher.workers.procs.values()]
        learn.fit(1)
        assert [p.pid for p in launcher.workers.procs.values()] == pids
    assert [*learn.distrib_report.phases][0] == 'snapshot' and 'fork' not in learn.distrib_report.phases
    assert not children()-before


@pytest.mark.parametrize('call', [lambda learn: learn.distrib_fit('three', nprocs=2),
                                  lambda learn: learn.distrib_fit(1, cbs=['none'], nprocs=2)])
def test_call_that_is_refused_starts_none(call, monkeypatch):
    from fastddp.launch.local import Local
    started = []
    monkeypatch.setattr(Local, '_ensure_workers', lambda *args: started.append(args))
    with pytest.raises(CantDistribute): call(make_learner())
    assert not started


def test_job_that_is_refused_starts_none(monkeypatch):
    "A job on the GPU of another learner's open block (made up: there is no GPU, and nothing runs)"
    started = []
    launcher = types.SimpleNamespace(workers_are_local=True, prepare=started.append)
    monkeypatch.setattr(session, 'engine_for',
                        lambda given, asked: contextlib.nullcontext((launcher, 2, given['gpus'])))
    monkeypatch.setattr(session, 'helper_is_importing', lambda: False)
    with make_learner().distrib_ctx(gpus=[0, 1]):
        assert started.pop() == 2
        with pytest.raises(CantDistribute, match='another learner has GPU 1'):
            make_learner().distrib_fit(1, gpus=[1, 2], wait=False)
    assert not started
