"""What used to keep the notebook waiting for ever: each ends with an error that says what it was, or simply works.

Limits are bounds of tests that wait for events: nothing here asks how long something takes."""
import os, signal, socket, sys, threading, time, weakref
import pytest, torch, torch.distributed as dist
from fastai.callback.core import Callback
from fastddp.all import Local, RankDied, RankRaised, TorchDDPCtx, ranch
from fastddp.base import forks, group
from fastddp.base.errors import GroupTimeout
from fastddp.launch.engine import Job
from fastddp.process import helper, worker
from fastddp.process.helper import is_stopped
from learners import make_learner


def half_a_message(ctx, what):
    "Rank 1 is stopped, or killed, in the middle of a message; a child of its keeps the pipe open"
    ctx.beat('step 1')
    if ctx.rank == 1:
        ctx._channel._pipe.sock.sendall(worker._HEAD.pack(worker._MAGIC, False, 400_000_000)+b'the beginning')
        if what == 'killed' and not os.fork(): time.sleep(60)       # in the worker's group: it ends with it
        os.kill(os.getpid(), signal.SIGKILL if what == 'killed' else signal.SIGSTOP)
    group.barrier()


@pytest.mark.parametrize('what,error,timeout', [
    ('killed', RankDied, 60), pytest.param('stopped', GroupTimeout, 10, marks=pytest.mark.full)])
def test_in_the_middle_of_a_message(what, error, timeout):
    with pytest.raises(error) as caught: Local(gpus=[], timeout=timeout).run(Job.of(half_a_message, what), 2)
    assert caught.value.rank == 1


def test_interrupt_in_the_middle_of_a_message():
    local = Local(gpus=[])
    def when_stopped():
        while not (local.workers and 1 in local.workers.procs and is_stopped(local.workers.procs[1].pid)):
            time.sleep(.02)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=when_stopped, daemon=True).start()
    with pytest.raises(KeyboardInterrupt): local.run(Job.of(half_a_message, 'stopped'), 2)


class SetsTimeout(Callback):
    "As user code does that opens connections"
    def before_fit(self): socket.setdefaulttimeout(10)


@pytest.mark.parametrize('where', ['notebook', 'worker'])
def test_a_default_timeout_of_sockets_is_not_ours(where):
    learn = make_learner(cbs=[SetsTimeout()] if where == 'worker' else [])
    if where == 'notebook': socket.setdefaulttimeout(10)
    try:
        with learn.distrib_ctx(nprocs=2, timeout=60):
            for _ in range(2): learn.fit(2)
    finally: socket.setdefaulttimeout(None)
    assert len(learn.recorder.values) == 2


def deaf(ctx, _):
    "The inbox thread of rank 1 meets an exception"
    def fails(): raise ValueError('wrong on purpose')
    if ctx.rank == 1: ctx._channel.on_stop = fails
    ctx.beat('step 1')
    ctx.emit('ready')
    while True: time.sleep(.02)


def test_a_worker_that_hears_nothing_ends():
    local = Local(gpus=[])
    ready = set()
    def heard(rank, e):
        ready.add(rank)
        if len(ready) == 2: local.workers.ask_stop()
    with pytest.raises(RankDied) as caught: local.run(Job.of(deaf, None), 2, on_event=heard)
    assert caught.value.rank == 1 and 'wrong on purpose' in str(caught.value)


def me(ctx, _): return ctx.rank


@pytest.mark.full
def test_a_stopped_helper_is_replaced():
    def ranks(): return Local(gpus=[]).run(Job.of(me, None), 2).results
    assert ranks() == [0, 1]
    os.kill(pid := helper.ensure_helper().popen.pid, signal.SIGSTOP)
    assert ranks() == [0, 1] and helper.ensure_helper().popen.pid != pid


class Exhausted(Callback):
    "Its iterator ends, on some ranks"
    def __init__(self, ranks): self.ranks = ranks
    def before_batch(self):
        if self.training and self.iter == 3 and group.rank() in self.ranks: raise StopIteration('wrong on purpose')


@pytest.mark.parametrize('ranks', [(1,), (0, 1)])
def test_stop_iteration_in_a_callback(ranks):
    "fastai's own `L.map` takes it for the end of the callbacks"
    with pytest.raises(RankRaised, match='StopIteration in before_batch') as caught:
        make_learner(cbs=[Exhausted(ranks)]).distrib_fit(1, nprocs=2, timeout=60)
    assert caught.value.rank in ranks


class Asserts(Callback):
    def after_batch(self): assert self.training is None


def test_an_exception_without_text_in_a_callback():
    "fastai shows an IndexError of its own in its place (test_upstream.py)"
    with pytest.raises(RankRaised, match='raised AssertionError') as caught:
        make_learner(cbs=[Asserts()]).distrib_fit(1, nprocs=2, timeout=60)
    report = str(caught.value)
    assert 'Your code:' in report and 'assert self.training is None' in report and 'IndexError' not in report


# A collective without end

def stopped_neighbour(folder):
    "Rank 1 is stopped, and all others wait for it in a collective"
    import torch.distributed as dist
    dist.barrier()
    if dist.get_rank() == 1:
        (folder/'pid').write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def interrupt_when_stopped(folder):
    def go():
        while not ((folder/'pid').exists() and is_stopped(int((folder/'pid').read_text()))): time.sleep(.05)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=go, daemon=True).start()


def test_interrupt_while_a_rank_waits_in_a_collective(tmp_path):
    "Python doesn't run there, so the rank can't answer"
    interrupt_when_stopped(tmp_path)
    with pytest.raises(KeyboardInterrupt): ranch(2, stopped_neighbour, tmp_path, ctx=TorchDDPCtx(use_gpu=False))


@pytest.mark.full
@pytest.mark.parametrize('n', [2, 3])
def test_the_notebook_does_not_wait_for_ever(n, tmp_path):
    with pytest.raises(GroupTimeout) as caught:
        ranch(n, stopped_neighbour, tmp_path, ctx=TorchDDPCtx(use_gpu=False, timeout=8))
    assert caught.value.rank == 1 and 'does not react' in str(caught.value)


def collect(ctx, n):
    "How many tensors of `n` rounds of collectives somebody else still refers to when a collective is over"
    sent = []
    def noting(f):
        def noted(*args, **kwargs):
            ts = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            sent[:] = [(weakref.ref(t), sys.getrefcount(t)-1) for t in ts]
            return f(*args, **kwargs)
        return noted
    for name in 'all_gather', 'all_reduce', 'broadcast':
        setattr(torch.distributed, name, noting(getattr(torch.distributed, name)))
    held, x = 0, torch.ones(3)
    for _ in range(n):
        for f in lambda: group.all_sum([1.]), lambda: group.average_([x]), lambda: group.broadcast_([x]):
            f()
            held += sum(t._use_count() > 1 or sys.getrefcount(t) > count for o, count in sent if (t := o()) is not None)
    return held


@pytest.mark.skipif(not forks.FORKS_MAY_HANG, reason='this Python forks safely')
def test_no_thread_holds_what_a_collective_sent():
    "It would need Python's list of threads, maybe while a DataLoader forks: the child would wait for ever"
    assert Local(gpus=[]).run(Job.of(collect, 500), 2).results == [0, 0]


class Releases(Callback):
    "Counts the backward passes whose context somebody else still refers to when they are over"
    n_held = 0
    def before_backward(self): self.loss_grad.register_hook(self.note)
    def note(self, grad): self.context = torch._C._get_obj_in_tls('context')
    def after_backward(self):
        # this attribute, and the argument of `getrefcount`
        self.n_held += sys.getrefcount(self.context) > 2
    def after_fit(self): self.context = None


@pytest.mark.skipif(not forks.FORKS_MAY_HANG or not hasattr(torch._C, '_remove_obj_from_tls'),
                    reason='this Python forks safely, or this torch keeps the context')
def test_no_thread_holds_the_context_of_a_backward_pass():
    "As above. torch hands Python's context variables on to the threads that exchange gradients"
    learn = make_learner(n=400, bs=4, cbs=Releases())
    learn.distrib_fit(1, nprocs=2)
    assert learn.releases.n_held == 0


class OwnCollective(Callback):
    "Rank 1 alone makes a collective: no other rank comes to it"
    def after_batch(self):
        if group.rank() == 1 and self.training and self.iter == 1: torch.distributed.all_reduce(torch.zeros(1))


@pytest.mark.full
def test_a_collective_of_one_rank_is_blamed_on_it():
    "Both ranks wait: rank 0 at the board, for rank 1"
    with pytest.raises(GroupTimeout) as e: make_learner().distrib_fit(1, nprocs=2, timeout=20, cbs=OwnCollective())
    assert e.value.rank == 1


class OnOneRank(Callback):
    "As a metric of a library computes: it sums over all ranks if there is a group. Here only rank 0 calls it"
    def __init__(self, rank0_only): self.rank0_only, self.found = rank0_only, []
    def after_epoch(self):
        if int(os.environ.get('RANK', 0)): return
        ones = torch.ones(1)
        if dist.is_initialized():
            dist.all_reduce(ones)
            dist.barrier()
        self.found.append((float(ones), dist.get_rank(), dist.get_world_size()))


def test_a_collective_of_a_callback_of_rank_0_alone_waits_for_no_one():
    learn = make_learner(n=32, n_valid=16, cbs=OnOneRank(True))
    learn.distrib_fit(2, nprocs=2, timeout=20)
    assert learn.on_one_rank.found == [(1., 0, 1)]*2
    learn.distrib_fit(1, nprocs=2, timeout=20)
    assert len(learn.on_one_rank.found) == 3
