"""Ray's machines: a head on this one and a node in a network namespace, two ranks on each."""
import builtins, os, re, shutil, signal, subprocess, sys, tempfile, threading, time
from pathlib import Path
import psutil, pytest, torch
from faults import OneFault, Slow
from parity import assert_same, fit_both, learner, seed, alone_like
from ray_cluster import (Cluster, WarmRay, connected, groups, needs_ray, skip_without_ray, wait_until,
                         wait_until_free)
from test_interrupt import shell_wait, wait_for
from traces import running
from two_hosts import leaves_nothing, leaves_nothing_at_last, net
from fastddp.all import CantDistribute, RankDied, RankRaised, Ray
from fastddp.machines import ray as launch_ray
from fastddp.launch.engine import Job
from fastddp.process.helper import sweep

pytestmark = pytest.mark.timeout(600)


# Without a cluster

@pytest.mark.parametrize('environ', [{}, pytest.param(dict(RAY_ADDRESS='ray://head:10001'), marks=skip_without_ray)])
def test_a_client_is_refused(environ, monkeypatch):
    for k, v in environ.items(): monkeypatch.setenv(k, v)
    with pytest.raises(CantDistribute, match='ray://head:10001: a Ray client is outside the cluster') as caught:
        learner().distrib_fit(1, launcher=Ray(None if environ else 'ray://head:10001'))
    assert '\n' not in str(caught.value)


def test_ray_is_not_there(monkeypatch):
    "One sentence says how to install it"
    real = builtins.__import__
    def without(name, *args, **kwargs):
        if name.split('.')[0] == 'ray' and not (args and args[0].get('__package__') == 'ray'): raise ImportError(name)
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', without)
    with pytest.raises(CantDistribute, match=r"^Ray\(\) needs Ray: pip install 'fastddp\[ray\]'.$"): Ray().place()


@skip_without_ray
@pytest.mark.parametrize('address', ['nobody-listens:1', 'no address'])
def test_no_cluster(address):
    "One line, and nothing of Ray's stays"
    import ray
    with pytest.raises(CantDistribute, match='^Ray has no cluster to connect to: .*names one.$') as caught:
        learner().distrib_fit(1, launcher=Ray(address))
    assert '\n' not in str(caught.value) and not ray.is_initialized()


@pytest.mark.full
def test_fastddp_does_not_import_ray():
    code = "import sys, fastddp.all; fastddp.all.Ray; assert not [o for o in sys.modules if o.split('.')[0] == 'ray']"
    subprocess.run([sys.executable, '-c', code], check=True, timeout=200)


# With one

@pytest.fixture(scope='module')
def cluster(net, leaves_nothing_at_last):
    cluster = Cluster(net)
    try:
        cluster.start()
        with connected(cluster): yield cluster
    finally: cluster.stop()


@pytest.fixture(scope='module')
def machines(cluster):
    launcher = WarmRay(per_node=2, link_timeout=10., start_timeout=240.)
    try:
        learner(train=8, valid=1).distrib_fit(1, nprocs=4, launcher=launcher)
        yield launcher
    finally: launcher.end()


@needs_ray
def test_a_fit_equals_one_process(machines, cluster, capsys):
    assert_same(*fit_both(learner(), 4, machines, 2))
    said = capsys.readouterr().out
    assert said.startswith('4 workers (2 machines x 2 on the CPU, gloo over '), said


@needs_ray
def test_a_block(machines):
    "A fit, a validation and predictions on the same workers"
    learn = learner()
    one = alone_like(learn, 4)
    for o, ctx in (learn, learn.distrib_ctx(nprocs=4, launcher=machines)), (one, one.no_bar()):
        seed(1)
        with ctx:
            o.fit(1)
            o.found = o.validate(), o.get_preds()[0]
    assert_same(learn, one)
    assert list(learn.found[0]) == pytest.approx(list(one.found[0]), abs=1e-5)
    assert torch.allclose(learn.found[1], one.found[1], atol=1e-5)


@needs_ray
def test_a_job(machines):
    "In the background as in the foreground"
    one, learn = learner(), learner()
    seed(1)
    one.distrib_fit(2, nprocs=4, launcher=machines)
    seed(1)
    learn.distrib_fit(2, nprocs=4, launcher=machines, wait=False).result(120)
    assert_same(learn, one)


def where(ctx, obj):
    return os.environ['LOCAL_RANK'], os.readlink('/proc/self/ns/net'), float(obj.sum())


@needs_ray
def test_much_data(machines):
    "More than one piece, to two ranks at home and two on the other machine"
    res = machines.run(Job.of(where, torch.ones(10_000_000)), 4).results
    nets = [o[1] for o in res]
    assert [o[0] for o in res] == list('0101') and {o[2] for o in res} == {1e7}
    assert nets[0] == nets[1] == os.readlink('/proc/self/ns/net') != nets[2] == nets[3]


@pytest.fixture
def shared():
    "A folder that both machines see, which have a /tmp of their own"
    path = Path(tempfile.mkdtemp(dir='/var/tmp'))
    yield path
    shutil.rmtree(path)


def faulty(what, rank, folder):
    return learner(cbs=[OneFault(what, 'before_batch/train', rank, 1, 1, marker=str(folder/'fired'))])


@needs_ray
def test_a_rank_raises(machines, shared):
    "On the other machine: its own traceback, and the last complete epoch"
    learn = faulty('library', 3, shared)
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(3, nprocs=4, launcher=machines)
    assert caught.value.rank == 3 and 'wrong on purpose' in str(caught.value) and 'faults.py' in str(caught.value)
    assert len(learn.recorder.values) == 1


@needs_ray
def test_what_others_use(machines):
    "The cluster is all ours: another one is told what is free, and more than there is can't be"
    machines.place(4)
    says = 'asked for 2 machines with 2 CPU each, and others use them: free are 0 CPU'
    with pytest.raises(CantDistribute, match=says):
        Ray(per_node=2).place()
    says = r'0 machines of the cluster have what Ray was asked for \(3 CPU on at least 1'
    with pytest.raises(CantDistribute, match=says):
        Ray(per_node=3).place()


@needs_ray
def test_all_is_given_back(machines, cluster, shared):
    "After a block, and after a call that fails"
    machines.end()
    wait_until_free(CPU=4)
    with pytest.raises(RankRaised): faulty('library', 3, shared).distrib_fit(3, launcher=Ray(per_node=2))
    wait_until_free(CPU=4)


@pytest.fixture
def others(cluster, monkeypatch):
    "Somebody else has all cores; Ray has a second to say that there is room"
    import ray
    monkeypatch.setattr(launch_ray, '_SOON', 1.)
    wait_until_free(CPU=4)
    group = ray.util.placement_group([{'CPU': 2}]*2, 'STRICT_SPREAD')
    assert group.wait(60)
    yield group
    ray.util.remove_placement_group(group)
    wait_until_free(CPU=4)


def when_it_waits(do):
    "Calls `do` when a call has waited for longer than one that doesn't want to wait would"
    def run():
        wait_until(lambda: groups('PENDING'))
        time.sleep(4)
        do()
    thread = threading.Thread(target=run)
    thread.start()
    return thread


@needs_ray
def test_waits_for_what_others_use(others, monkeypatch):
    "A line says so meanwhile"
    import ray
    said = []
    monkeypatch.setattr(launch_ray.StatusLine, 'show', lambda self, text: said.append(text))
    with pytest.raises(CantDistribute, match='others use them: free are 0 CPU.* wait= says for how many seconds'):
        Ray(per_node=2).place()
    wait_until(lambda: not groups('PENDING'))
    thread = when_it_waits(lambda: ray.util.remove_placement_group(others))
    learn = learner(train=16, valid=4)
    learn.distrib_fit(1, launcher=Ray(per_node=2, wait=120, start_timeout=240.))
    thread.join()
    assert len(learn.recorder.values) == 1 and said[-1] == ''
    assert 'asked for 2 machines with 2 CPU each. Waiting' in said[1]


@needs_ray
def test_an_interrupt_while_it_waits(others):
    "What is asked for isn't asked for any more"
    thread = when_it_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt): learner().distrib_fit(1, launcher=Ray(per_node=2, wait=120))
    thread.join()
    wait_until(lambda: not groups('PENDING'))
    assert len(groups('CREATED')) == 1


def gone(procs, seconds):
    "Waits until the processes have ended; those that didn't"
    end = time.monotonic()+seconds
    while (left := [o for o in procs if running(o)]) and time.monotonic() < end: time.sleep(.05)
    return left


def ours(node):
    "The actor of ours that a node of the cluster has, and its workers"
    there = psutil.Process(node.pid).children(recursive=True)
    actors = [o for o in there if 'ray::Node' in ' '.join(o.cmdline())]
    return [p for o in actors for p in (o, *o.children(recursive=True))]


@needs_ray
def test_the_notebook_connects_by_itself_and_dies(cluster, shared):
    """`Ray(address)` connects, and disconnects at the end of the call; so does Ray() with RAY_ADDRESS. Nothing of Ray's
    appears in the notebook. When it is killed, nothing is left anywhere, and the cluster has its resources again"""
    wait_until_free(CPU=4)
    argv = [sys.executable, '-Wignore', Path(__file__).parent.with_name('script_ray.py'), cluster.address, shared]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        try:
            said = [p.stdout.readline() for _ in range(4)]
            assert said[0].startswith('2 workers (1 machine x 2 on the CPU, gloo over '), said+[p.stdout.readline()]
            assert said[2] == 'as before\n' and said[3].startswith('4 workers (2 machines x 2 on the CPU, '), said
            wait_for(shared/'done3')
            at_home, there = ours(cluster.nodes[0]), ours(cluster.nodes[1])
            assert len(at_home) >= 3 and len(there) >= 3
        finally: p.kill()
        assert gone([*at_home, *there], 30) == []
        assert p.stdout.read() == ''
    wait_until_free(CPU=4)
    sweep()     # a worker that the system ends with its helper leaves a folder, which goes with the next start


@needs_ray
def test_a_machine_dies(cluster, shared, capsys):
    "The error names it, and a restart goes on from the last complete epoch with the machine that is there"
    learn = learner(train=400, cbs=[Slow(.02, shared)])
    raylet = next(o for o in psutil.Process(cluster.nodes[1].pid).children() if 'raylet/raylet' in o.cmdline()[0])
    killer = subprocess.Popen(['sh', '-c', f'{shell_wait(shared/"done3", 60)}; kill -9 {raylet.pid}'])
    launcher = Ray(per_node=2, link_timeout=10., start_timeout=240.)
    try: learn.distrib_fit(30, launcher=launcher, restarts=1)       # Ray notices a dead node after seconds
    finally:
        killer.kill()
        killer.wait()
    said = capsys.readouterr().out
    assert re.search(rf'on {cluster.other} died: .*Going on with epoch [1-9]\d* on fresh workers', said), said
    assert '2 workers (1 machine x 2 on the CPU' in said and len(learn.recorder.values) == 30, said
