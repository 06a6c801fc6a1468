"""Ray's machines: a head on this one and a node in a network namespace, two ranks on each."""
import builtins, importlib.util, os, re, shutil, socket, subprocess, sys, tempfile, time
from pathlib import Path
import psutil, pytest, torch
from faults import OneFault, Slow
from parity import assert_same, fit_both, learner, seed, alone_like
from traces import running
from two_hosts import ENTER, leaves_nothing, leaves_nothing_at_last, net
from fastddp.all import CantDistribute, RankDied, RankRaised, Ray
from fastddp.launch.engine import Job
from fastddp.launch.ray import as_it_was

pytestmark = pytest.mark.timeout(600)
_skip = pytest.mark.skipif(not importlib.util.find_spec('ray'), reason='Ray is not installed')


def needs_ray(test): return pytest.mark.ray(_skip(test))


# Without a cluster

@pytest.mark.parametrize('environ', [{}, pytest.param(dict(RAY_ADDRESS='ray://head:10001'), marks=_skip)])
def test_a_client_is_refused(environ, monkeypatch):
    for k, v in environ.items(): monkeypatch.setenv(k, v)
    with pytest.raises(CantDistribute, match='ray://head:10001: a Ray client has no part in the cluster') as caught:
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


def test_fastddp_does_not_import_ray():
    code = "import sys, fastddp.all; fastddp.all.Ray; assert not [o for o in sys.modules if o.split('.')[0] == 'ray']"
    subprocess.run([sys.executable, '-c', code], check=True, timeout=200)


# With one

def start_node(command, script, *args, tries=3):
    "A node's process, once it is ready: a raylet gives up on a busy machine"
    env = os.environ | dict(RAY_USAGE_STATS_ENABLED='0', RAY_health_check_period_ms='1000')
    for last in reversed(range(tries)):
        p = subprocess.Popen([*command, sys.executable, script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True, env=env, start_new_session=True)
        if p.stdout.readline() == 'ready\n': return p
        end_node(p)
    raise AssertionError('no node of Ray came up')


def end_node(p):
    procs = psutil.Process(p.pid).children(recursive=True)
    p.stdin.close()
    try: p.wait(10)
    except subprocess.TimeoutExpired: p.kill()
    for o in procs:
        if running(o): o.kill()
    p.wait()
    p.stdout.close()


def _port():
    "A port that nobody has now"
    with socket.create_server(("", 0)) as s: return s.getsockname()[1]


class Cluster:
    "A head on this machine and a node in another namespace"
    def __init__(self, net):
        self.net, self.head, self.other = net, f'{net.net}.129', f'{net.net}.130'
        self.port, self.folder, self.nodes = _port(), tempfile.mkdtemp(prefix='fr', dir='/tmp'), []
        self.address = f'{self.head}:{self.port}'
    def start(self):
        script = Path(__file__).with_name('ray_node.py')
        inside = ['ip', 'netns', 'exec', self.net.b, 'unshare', '-m', 'sh', ENTER]
        for command, own in ([], self.head), (inside, self.other):
            self.nodes.append(start_node(command, script, own, self.head, str(self.port), '2', self.folder))
    def stop(self):
        for o in reversed(self.nodes): end_node(o)
        shutil.rmtree(self.folder)


@pytest.fixture(scope='module')
def cluster(net):
    cluster = Cluster(net)
    try:
        cluster.start()
        with as_it_was():
            import ray
            ray.init(cluster.address, _node_ip_address=cluster.head, log_to_driver=False, configure_logging=False)
        yield cluster
        ray.shutdown()
    finally: cluster.stop()


class WarmRay(Ray):
    "Agents and workers stay from test to test, until `end`"
    def __exit__(self, *_): pass
    def end(self): self.leave()


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


def where(ctx, obj):
    return os.environ['LOCAL_RANK'], os.readlink('/proc/self/ns/net'), float(obj.sum())


@needs_ray
def test_data_comes_by_the_object_store(machines):
    "More of it than one piece, to two ranks at home and two on the other machine"
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


def free(n):
    "Waits until Ray has so many cores again"
    import ray
    wait_until(lambda: ray.available_resources().get('CPU') == n)


def wait_until(true, seconds=60):
    end = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(.05)


@needs_ray
def test_what_others_use(machines):
    "The cluster is all ours: another one is told what is free, and more than there is can't be"
    says = 'asked for 2 machines with 2 CPUs each, and others use them: free are 0 CPUs'
    with pytest.raises(CantDistribute, match=says):
        Ray(per_node=2).place()
    with pytest.raises(CantDistribute, match='0 machines of the cluster have 3 CPUs, and Ray was asked for at least 1'):
        Ray(per_node=3).place()


@needs_ray
def test_all_is_given_back(machines, cluster, shared):
    "After a block, and after a call that fails"
    machines.end()
    free(4)
    with pytest.raises(RankRaised): faulty('library', 3, shared).distrib_fit(3, launcher=Ray(per_node=2))
    free(4)


@needs_ray
def test_a_machine_dies(cluster, shared, capsys):
    "The error names it, and a restart goes on from the last complete epoch with the machine that is there"
    learn = learner(train=400, cbs=[Slow(.02, shared)])
    raylet = next(o for o in psutil.Process(cluster.nodes[1].pid).children() if 'raylet/raylet' in o.cmdline()[0])
    wait = f'until grep -qx 60 {shared}/done3; do sleep .01; done'
    killer = subprocess.Popen(['sh', '-c', f'{wait}; kill -9 {raylet.pid}'])
    launcher = Ray(per_node=2, link_timeout=10., start_timeout=240.)
    try: learn.distrib_fit(30, launcher=launcher, restarts=1)       # Ray notices a dead node after seconds
    finally:
        killer.kill()
        killer.wait()
    said = capsys.readouterr().out
    assert re.search(rf'on {cluster.other} died: .*Going on with epoch [1-9]\d* on fresh workers', said), said
    assert '2 workers (1 machine x 2 on the CPU' in said and len(learn.recorder.values) == 30, said
