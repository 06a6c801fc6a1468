"""A long block, and a launcher that is used again: nothing piles up from run to run."""
import os, signal, subprocess, sys
from pathlib import Path
import pytest, torch
from fastddp.all import Local, RankRaised
from fastddp.base import group
from fastddp.launch.engine import Job
from learners import make_learner


def add(ctx, obj):
    "A step, and something that needs the group"
    ctx.beat('step 1')
    return group.all_sum([ctx.rank, obj.sum()])


def left_waiting(ctx, obj):
    "Rank 0 waits for a rank that failed"
    ctx.beat('step 1')
    if ctx.rank == 1: raise ValueError('on purpose')
    return group.all_sum([0])


def files_of(local):
    "But for the one that says whose folder it is"
    return sorted(o.name.split('-')[0] for o in Path(local.workers.dir).iterdir() if o.name != 'owner')
def descriptors(): return len(os.listdir('/proc/self/fd'))


def test_many_runs_in_one_block_leave_no_files():
    job = Job.of(add, torch.ones(3))
    with Local(gpus=[], see=()) as local:
        for _ in range(2): local.run(job, 2)        # a rank's results go to two blocks by turns
        files, fds = files_of(local), descriptors()
        for _ in range(5): assert local.run(job, 2).results == [[1., 6.]]*2
        assert files_of(local) == files == ['rank0.log', 'rank1.log', 'rendezvous']
        assert descriptors() == fds


def test_many_fits_in_one_block_leave_no_files():
    learn, local = make_learner(n=64), Local(gpus=[], see=())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2, launcher=local):
        for _ in range(2): learn.fit(1)
        files, fds = files_of(local), descriptors()
        for _ in range(3): learn.fit(1)
        learn.validate()
        assert files_of(local) == files == ['rank0.log', 'rank1.log', 'rendezvous']
        assert descriptors() == fds


def test_a_group_that_is_formed_anew_leaves_no_file():
    "Each failure breaks the group; the next job's ranks meet at a new file, and the old one goes"
    with Local(gpus=[], see=(), keep_on_failure=True) as local:
        for _ in range(3):
            with pytest.raises(RankRaised, match='on purpose'): local.run(Job.of(left_waiting, None), 2)
            assert local.run(Job.of(add, torch.ones(3)), 2).results == [[1., 6.]]*2
        assert files_of(local) == ['rank0.log', 'rank1.log', 'rendezvous']


def test_a_launcher_is_used_again():
    "In a block, outside of one, after a failure and in another block: new workers where the old ones are gone"
    job, bad, local = Job.of(add, torch.ones(3)), Job.of(left_waiting, None), Local(gpus=[], see=())
    with local:
        local.run(job, 2)
        pids = [o.pid for o in local.workers.procs.values()]
        with pytest.raises(RankRaised): local.run(bad, 2)
        assert local.workers is None        # they may be in any state
        assert local.run(job, 2).results == [[1., 6.]]*2
        assert not {o.pid for o in local.workers.procs.values()} & set(pids)
        assert local.run(job, 1).results == [[0., 3.]]      # fewer ranks are another group
    assert local.workers is None
    assert local.run(job, 2).results == [[1., 6.]]*2 and local.workers is None
    with local: assert local.run(job, 2).results == [[1., 6.]]*2


def test_a_beat_of_an_earlier_run_counts_for_nothing():
    "The first run says where it is; the second dies before its first step, and isn't said to be there"
    with Local(gpus=[], see=()) as local:
        local.run(Job.of(add, torch.ones(3)), 2)
        with pytest.raises(Exception) as caught: local.run(Job.of(ends_at_once, None), 2)
    assert 'rank 1 died' in str(caught.value) and 'before its first step' in str(caught.value)


def ends_at_once(ctx, obj):
    if ctx.rank == 1: os._exit(4)
    ctx.beat('step 1')
    return group.all_sum([0])


def test_the_sweep_touches_what_is_ones_own_alone(tmp_path):
    "Others may put a FIFO or a link there, on which one would wait or which leads elsewhere"
    elsewhere = tmp_path/'elsewhere'
    for o in 'fastddp-gone', 'fastddp-fifo', 'fastddp-link', 'fastddp-others', 'elsewhere': (tmp_path/o).mkdir()
    os.mkfifo(tmp_path/'fastddp-fifo'/'owner')
    for o in 'fastddp-gone', 'fastddp-others', 'elsewhere': (tmp_path/o/'owner').touch()
    (tmp_path/'fastddp-link'/'owner').symlink_to(elsewhere/'owner')
    (tmp_path/'fastddp-there').symlink_to(elsewhere)
    if os.getuid() == 0: os.chown(tmp_path/'fastddp-others', 12345, 12345)
    env = os.environ | dict(TMPDIR=str(tmp_path))
    sweeps = 'from fastddp.process.owner import sweep; sweep()'
    subprocess.run([sys.executable, '-c', sweeps], env=env, check=True, timeout=60)
    left = {o.name for o in tmp_path.iterdir()}
    others = {'fastddp-others'} if os.getuid() == 0 else set()
    assert left == {'fastddp-fifo', 'fastddp-link', 'fastddp-there', 'elsewhere'} | others
    assert (elsewhere/'owner').exists()


def test_a_number_that_is_a_strangers_by_now(monkeypatch):
    "The system gives the number of a process that is gone to another one"
    with Local(gpus=[], see=(), keep_on_failure=True) as local:
        local.run(Job.of(add, torch.ones(3)), 2)
        p = local.workers.procs[1]
        os.kill(p.pid, signal.SIGKILL)
        while local.workers.alive() != [0]: local.workers.poll(1)
        with subprocess.Popen(['sleep', '60'], start_new_session=True) as stranger:
            monkeypatch.setattr(p._popen, 'pid', stranger.pid)
            local.close()
            with pytest.raises(subprocess.TimeoutExpired): stranger.wait(.5)
            stranger.kill()
