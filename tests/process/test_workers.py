"""`process.workers`, without ranks that do anything together."""
import contextlib, os, resource, signal, socket, subprocess, time
import psutil, pytest
from fastddp.base.errors import CantDistribute
from fastddp.payload.pickling import Payload, dump, load
from fastddp.payload.buffers import Block
from fastddp.process import helper, worker, workers
from fastddp.process.worker import Channel
from fastddp.process.workers import Workers


def run(w, entry, until='done'):
    "The news of a job of `entry` on the workers `w`, until one says `until`"
    with_it, news = Block(), []
    try:
        w.submit(entry, with_it.write(dump(None)), with_it, configs=[None]*len(w.ranks))
        while not any(what == until for _, what, *_ in news): news += w.poll(60)
    finally: with_it.close()
    return news


def result(w, r):
    block, packed = w.latest[r, 'result']
    return load(*Payload(packed.meta, block.read(packed)).copied())


@pytest.fixture
def started():
    "Makes `Workers`, which end with the test"
    made = []
    def start(*args, **kwargs):
        made.append(Workers(*args, **kwargs))
        return made[-1]
    yield start
    for w in made: w.stop()


def last_words(channel, meta, buffers, config):
    for i in range(100): channel.put(f'part {i}', dump(i))
    os._exit(3)


def test_all_that_a_worker_sent_is_heard_before_its_death(started):
    w = started([0])
    poll, w.poll = w.poll, lambda timeout: poll(timeout) if not w.procs[0].is_alive() else []
    news = [o for o in run(w, last_words, 'died') if o[1] in ('put', 'died')]
    assert news == [*((0, 'put', f'part {i}') for i in range(100)), (0, 'died', 3)]


@pytest.mark.parametrize('kind', ['result', 'state'])
def test_a_payload_without_room_leaves_no_descriptor(kind, monkeypatch):
    def no_room(block, payload): raise OSError('no room')
    monkeypatch.setattr(Block, 'write', no_room)
    channel = Channel.__new__(Channel)
    channel._blocks = []
    before = os.listdir('/proc/self/fd')
    with pytest.raises(OSError, match='no room'): channel.put(kind, dump(None))
    assert os.listdir('/proc/self/fd') == before


def with_a_child(channel, meta, buffers, config): return dump(subprocess.Popen(['sleep', '1000']).pid)


def test_what_a_killed_worker_started_ends_with_stop(started):
    w = started([0])
    run(w, with_a_child)
    child = psutil.Process(result(w, 0))
    os.kill(w.procs[0].pid, signal.SIGKILL)
    while w.alive(): w.poll(60)
    w.stop()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def who(channel, meta, buffers, config): return dump({k: os.environ[k] for k in ('RANK', 'LOCAL_RANK')})


def test_ranks_of_one_of_several_machines(started):
    w = started([3, 4], first=3)
    run(w, who)
    while len(w.latest) < 2: w.poll(60)
    assert [result(w, r) for r in w.ranks] == [dict(RANK='3', LOCAL_RANK='0'), dict(RANK='4', LOCAL_RANK='1')]


def test_a_start_that_is_refused_leaves_no_socket_open(monkeypatch):
    made, pair = [], socket.socketpair
    def noted():
        made.append(pair())
        return made[-1]
    def refuse(method, conn, *args):
        conn.close()
        raise OSError('no more processes')
    monkeypatch.setattr(workers.socket, 'socketpair', noted)
    monkeypatch.setattr(workers, 'start_worker', refuse)
    with pytest.raises(CantDistribute, match='no more processes'): Workers([0, 1])
    assert made and all(o.fileno() == -1 for both in made for o in both)


def puts(channel, meta, buffers, config):
    for i in range(40): channel.put(f'part {i}', dump(i))
    channel.put('result', dump(None))
    channel.send('done')


def test_out_of_descriptors_while_a_job_runs(started):
    "The sentence for it; and the workers can be ended then, with nothing left"
    before = len(os.listdir('/proc/self/fd'))
    w = started([0])
    run(w, nothing)
    with few_descriptors(8), pytest.raises(CantDistribute, match='too many files open.*ulimit'): run(w, puts)
    w.stop()
    assert len(os.listdir('/proc/self/fd')) <= before+2     # the helper's


def nothing(channel, meta, buffers, config):
    channel.put('result', dump(None))
    channel.send('done')


@contextlib.contextmanager
def few_descriptors(n, pid=0):
    "Inside, this or another process can open `n` more files"
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = [int(o) for o in os.listdir(f'/proc/{pid or os.getpid()}/fd')]
    # from the lowest free number on: the limit is the first number that isn't allowed
    free = [o for o in range(max(used)+n+2) if o not in used]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[n], limits[1]))
    try: yield
    finally: resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_out_of_descriptors_in_the_helper(started):
    first = started([0])
    popen = helper.ensure_helper().popen
    def n_open(): return len(os.listdir(f'/proc/{popen.pid}/fd'))
    n, end = n_open(), time.monotonic()+30
    first.stop()
    while n_open() >= n and time.monotonic() < end: time.sleep(.01)     # until it has closed the status pipe
    with few_descriptors(1, popen.pid), pytest.raises(CantDistribute, match='too many files open'): started([0])
    assert popen.poll() is None
    w = started([0])
    run(w, nothing)


def writes_to_its_pipe(channel, meta, buffers, config):
    "As code that closes a descriptor twice, and writes to the second one"
    os.write(channel._pipe.fileno(), b'epoch 1: loss .5\n'*100)
    time.sleep(600)


def test_other_code_writes_to_the_pipe(started):
    "It is no length of a message, to which the notebook would wait"
    w = started([0])
    with pytest.raises(CantDistribute, match='written to the descriptor'): run(w, writes_to_its_pipe)
    w.stop(0)


def test_a_message_that_is_too_large(monkeypatch):
    class Large(bytes):
        def __len__(self): return 5 << 30
    monkeypatch.setattr(worker.cloudpickle, 'dumps', lambda *args, **kwargs: Large())
    ours, theirs = map(worker.Pipe, socket.socketpair())
    with pytest.raises(CantDistribute, match='a pickle of 5.0 GB'): ours.send('event', None)
    for o in ours, theirs: o.close()
