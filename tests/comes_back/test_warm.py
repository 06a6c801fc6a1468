"""What stays from call to call: the workers. What does not: files."""
import gc, os, sys, tempfile, time
from pathlib import Path
import psutil, pytest
from fastddp.all import RankRaised
from fastddp.launch.local import Local
from fastddp.launch.engine import Job
from fastddp.payload import patches
from learners import make_learner
from traces import children


# Workers of a launcher

def _pid(ctx, fails):
    "A job: who is it? `fails`: rank 1 fails"
    if fails and ctx.rank == 1: raise ValueError('wrong on purpose')
    return os.getpid()


def run(launcher, n=2, fails=False): return launcher.run(Job.of(_pid, fails), n).results


def wait_until_gone(pids):
    end = time.monotonic()+60
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < end, pids
        time.sleep(.02)


def test_a_warm_launcher_keeps_its_workers():
    "In rank order, until its block ends"
    with Local() as launcher:
        first, *others = [run(launcher) for _ in range(4)]
        assert len({*first}) == 2 and os.getpid() not in first and others == [first]*3
        assert all(map(psutil.pid_exists, first))
    wait_until_gone(first)


def test_without_a_block_each_job_has_workers_of_its_own():
    launcher = Local()
    first, second = run(launcher), run(launcher)
    assert not {*first} & {*second}
    wait_until_gone(first+second)


def test_another_number_of_ranks_has_workers_of_its_own():
    with Local() as launcher:
        two, three = run(launcher, 2), run(launcher, 3)
        assert len({*three}) == 3 and not {*two} & {*three} and run(launcher, 3) == three
        wait_until_gone(two)


def test_after_a_failure_the_workers_are_new():
    with Local() as launcher:
        first = run(launcher)
        with pytest.raises(RankRaised, match='wrong on purpose'): run(launcher, fails=True)
        wait_until_gone(first)
        second = run(launcher)
        assert not {*first} & {*second} and run(launcher) == second


def test_a_worker_that_died_between_jobs_is_replaced_with_all_others():
    with Local() as launcher:
        first = run(launcher)
        psutil.Process(first[1]).kill()
        assert launcher.workers.procs[1].join(60)       # the helper tells of it after the process is gone
        second = run(launcher)
        assert not {*first} & {*second} and run(launcher) == second


def test_idle_workers_leave_and_the_next_job_has_new_ones():
    with Local(idle=.1) as launcher:
        first = run(launcher)
        wait_until_gone(first)
        assert not {*first} & {*run(launcher)}


# Workers of a block

def quiet(**kwargs):
    learn = make_learner(n=64, **kwargs)
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    return learn


def test_a_block_keeps_its_workers(tmp_path):
    "Through fits, validation, predictions and `lr_find`"
    learn, seen, before = quiet(path=tmp_path), [], children()
    calls = [lambda: learn.fit(1), lambda: learn.fit(1), learn.validate, learn.get_preds,
             lambda: learn.fit_one_cycle(1),
             lambda: learn.lr_find(show_plot=False, num_it=4), lambda: learn.fit(1)]
    with learn.distrib_ctx(nprocs=2):
        for call in calls:
            call()
            seen.append(children() - before)
    assert len(seen[0]) == 2 and seen == seen[:1]*7, seen
    assert not children() & seen[0]


# Files

def lying_there():
    "All paths below the temporary folder of this run"
    folder = Path(tempfile.gettempdir())
    return {str(o.relative_to(folder)) for o in folder.rglob('*')}


def test_many_fits_in_one_block_leave_no_files():
    "No fit after the second adds any to the block's folder, nor elsewhere to the temporary folder"
    learn, seen = quiet(), []
    with learn.distrib_ctx(nprocs=2):
        for _ in range(8):
            learn.fit(1)
            seen.append(lying_there())
    assert [sorted(now-was) for was, now in zip(seen[1:], seen[2:])] == [[]]*6


def test_a_block_takes_its_folder_with_it():
    def ours(): return {o for o in lying_there() if o.startswith('fastddp-')}
    learn, before = quiet(), ours()
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        assert len(ours()-before) > 1
    assert ours() == before


# what it is -> the thing, given a learner


def test_modules_may_be_imported_meanwhile():
    "By a thread, or by what a collection of garbage runs"
    imported, threshold = [], gc.get_threshold()
    def imports(*_):
        imported.append(f'while_walking_{len(imported)}')
        sys.modules[imported[-1]] = sys
    gc.callbacks.append(imports)
    try:
        gc.set_threshold(1)
        patches._namespaces(patches._selectors())
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(imports)
        for k in imported: sys.modules.pop(k, None)
    assert imported
