"""Tests on simulated GPUs: `@on_gpus()` runs a test in a process that has some. See device.cpp and device.py."""
import functools, os, subprocess, sys, tempfile
from multiprocessing import Pipe
from pathlib import Path
from . import build

TESTS = Path(__file__).resolve().parents[1]
LONGEST = 240.      # seconds that a test may take


class Server:
    "A process with `n` simulated GPUs, which runs tests one after the other, as a notebook runs cells"
    def __init__(self, n):
        self.n = n
        self.folder = tempfile.TemporaryDirectory(prefix='vgpu-')
        self.log = Path(self.folder.name, 'log')
        self.conn, theirs = Pipe()
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get('PYTHONPATH', '')])
        env = os.environ | dict(PYTHONPATH=path, VGPU_COUNT=str(n), VGPU_LEDGER=str(Path(self.folder.name, 'ledger')))
        with theirs, open(self.log, 'w') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-W', 'ignore', '-m', 'simulated_gpu.server', str(theirs.fileno())], env=env,
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self.answer(None)

    def answer(self, request):
        "What came of a test: None, or the text of its failure"
        try:
            if request: self.conn.send(request)
            if self.conn.poll(LONGEST): return self.conn.recv()
            why = f'no end after {LONGEST:.0f} s'
        except (EOFError, OSError): why = 'the process has ended'
        self.process.kill()
        return f'{why}\n{self.log.read_text()[-6000:]}'

    def run(self, file, name, kwargs):
        seen = self.log.stat().st_size
        failure = self.answer((str(file), name, kwargs))
        with open(self.log, errors='replace') as log:
            log.seek(seen)
            print(log.read(), end='')       # pytest shows it with a failure
        return failure

    def end(self):
        self.conn.close()
        try: self.process.wait(20)
        except subprocess.TimeoutExpired: self.process.kill()
        self.process.wait()
        self.folder.cleanup()


_servers = {}       # number of GPUs -> the `Server` of this session of tests


def start(n):
    "Start a server unless there is one that lives"
    if n in _servers and _servers[n].process.poll() is not None: _servers.pop(n).end()
    if n not in _servers: _servers[n] = Server(n)
    return _servers[n]


def end_all():
    while _servers: _servers.popitem()[1].end()


def on_gpus(n=3):
    "Decorator of a test that runs in a process with `n` simulated GPUs; its arguments must be picklable"
    def decorate(test):
        @functools.wraps(test)
        def run(**kwargs):
            if 'VGPU_LEDGER' in os.environ: return test(**kwargs)       # this is that process
            if failure := start(n).run(test.__code__.co_filename, test.__name__, kwargs): raise AssertionError(failure)
        run.needs_gpus = n
        return run
    return decorate
