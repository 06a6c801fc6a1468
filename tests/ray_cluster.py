"""A Ray cluster made of network namespaces: a head on this machine, a node in a namespace, and others if asked for."""
import contextlib, importlib.util, json, os, shutil, signal, socket, subprocess, sys, tempfile, time, venv
from pathlib import Path
import psutil, pytest
from traces import running
from namespaces import ENTER, ip
from fastddp.machines.ray import Ray

skip_without_ray = pytest.mark.skipif(not importlib.util.find_spec('ray'), reason='Ray is not installed')


def needs_ray(test): return pytest.mark.ray(skip_without_ray(test))


def start_node(command, args, env, tries=3):
    "A node's process, once it is ready: a raylet gives up on a busy machine"
    env = env | dict(RAY_USAGE_STATS_ENABLED='0', RAY_health_check_period_ms='1000')
    argv = [*command, Path(__file__).with_name('ray_node.py'), *args]
    for last in reversed(range(tries)):
        # elsewhere than in the repository, where everybody finds fastddp
        p = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd='/',
                             start_new_session=True)
        if p.stdout.readline() == 'ready\n': return p
        end_node(p)
    raise AssertionError('no node of Ray came up')


def end_node(p):
    "Ends a node and all of its processes: those it has now, and those it starts meanwhile, which are in its session"
    procs = psutil.Process(p.pid).children(recursive=True)
    p.stdin.close()
    try: p.wait(10)
    except subprocess.TimeoutExpired: p.kill()
    p.wait()
    for o in {*procs, *(o for o in psutil.process_iter() if _session(o) == p.pid)}:
        if running(o): o.kill()
    p.stdout.close()


def _session(proc):
    try: return os.getsid(proc.pid)
    except ProcessLookupError: return None


def _port():
    "A port that nobody has now"
    with socket.create_server(("", 0)) as s: return s.getsockname()[1]


def python_without_fastddp(folder):
    "An interpreter that finds what ours does, but no fastddp"
    venv.create(folder, symlinks=True)
    there, = Path(folder).glob('lib/python*/site-packages')
    for o in Path(importlib.util.find_spec('ray').origin).parents[1].iterdir():
        if 'fastddp' not in o.name: (there/o.name).symlink_to(o)
    return str(Path(folder, 'bin', 'python'))


class Cluster:
    "A head on this machine and a node in another namespace, which have what is said here"
    def __init__(self, net, **has):
        self.net, self.has, self.head, self.other = net, has, f'{net.net}.129', f'{net.net}.130'
        self.port, self.folder, self.nodes = _port(), tempfile.mkdtemp(prefix='fr', dir='/tmp'), []
        self.address = f'{self.head}:{self.port}'
    def start(self, **other):
        "`other`: what only the other one has"
        inside = ['ip', 'netns', 'exec', self.net.b, 'unshare', '-m', 'sh', ENTER, sys.executable]
        self._add([sys.executable], self.head, os.environ, self.has)
        self._start_other = lambda: self._add(inside, self.other, os.environ, self.has | other)
        self._start_other()
    def replace_other(self):
        "Ends the other machine, and starts one at its address, when Ray knows that the first is gone"
        import ray
        end_node(self.nodes.pop())
        wait_until(lambda: sum(o['Alive'] for o in ray.nodes()) == len(self.nodes))
        self._start_other()
    def add_without_fastddp(self, **has):
        "A third one, at another address of this machine"
        own = f'{self.net.net}.131'
        ip('addr', 'add', f'{own}/25', 'dev', self.net.here)
        python = python_without_fastddp(f'{self.folder}/venv')
        self._add([python], own, {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}, has)
        return own
    def _add(self, command, own, env, has):
        self.nodes.append(start_node(command, [own, self.head, str(self.port), self.folder, json.dumps(has)], env))
    def stop(self):
        for o in reversed(self.nodes): end_node(o)
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def as_it_was():
    "What Ray sets for the whole process is as before, afterwards"
    own, env = signal.getsignal(signal.SIGTERM), dict(os.environ)
    try: yield
    finally:
        os.environ.clear()
        os.environ.update(env)
        signal.signal(signal.SIGTERM, own)


@contextlib.contextmanager
def connected(cluster):
    "This process is a notebook that has called `ray.init`, in a folder that other machines have, too"
    was = os.getcwd()
    os.chdir('/')
    try:
        with as_it_was():
            import ray
            ray.init(cluster.address, _node_ip_address=cluster.head, log_to_driver=False, configure_logging=False)
    finally: os.chdir(was)
    try: yield
    finally: ray.shutdown()


class WarmRay(Ray):
    "Actors and workers stay from test to test, until `end`"
    def __exit__(self, *_): pass
    def end(self): self.leave()


def wait_until(true, seconds=60):
    end = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(.05)


def groups(*states):
    "The placement groups that are in one of the states"
    import ray
    return [o for o in ray.util.placement_group_table().values() if o['state'] in states]


def wait_until_free(**has):
    "Waits until Ray has all of this again, and no placement group"
    import ray
    wait_until(lambda: {k: ray.available_resources().get(k) for k in has} == has)
    wait_until(lambda: not groups('PENDING', 'CREATED', 'RESCHEDULING'))


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


@pytest.fixture
def shared():
    "A folder that all machines see, which have a /tmp of their own"
    path = Path(tempfile.mkdtemp(dir='/var/tmp'))
    yield path
    shutil.rmtree(path)
