"""Kernels as JupyterLab runs them: two that begin in the same second, one that is restarted in the middle of a fit, one
that is killed."""
import os, shutil, signal, stat, subprocess, sys, time
from pathlib import Path
import psutil, pytest
from jupyter_client.manager import KernelManager

HERE = Path(__file__).resolve().parent
SETUP = '''
import sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, {here!r})
from faults import Slow
from fastddp.all import *
from learners import make_learner
def fit(n_epoch, secs):
    learn = make_learner(n=64, cbs=[Slow(secs, {folder!r})])
    learn.distrib_fit(n_epoch, nprocs=2)
    assert len(learn.recorder.values) == n_epoch
'''


class Kernel:
    "A kernel with a folder of its own"
    def __init__(self, folder):
        folder.mkdir()
        self.folder, self.km = folder, KernelManager(kernel_name='python3')
        self.km.start_kernel(extra_arguments=['--HistoryManager.hist_file=:memory:', '--log-level=CRITICAL'])
    def connect(self):
        self.client = self.km.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        return self
    def send(self, code): return self.client.execute(code)
    def answer(self, sent):
        "None, or what went wrong in the cell"
        end = time.monotonic()+120
        while time.monotonic() < end:
            reply = self.client.get_shell_msg(timeout=120)
            if reply['parent_header'].get('msg_id') == sent: return reply['content'].get('evalue')
        raise TimeoutError
    def setup(self): return self.send(SETUP.format(here=str(HERE), folder=str(self.folder)))
    @property
    def pid(self): return self.km.provisioner.pid
    def processes(self): return psutil.Process(self.pid).children(recursive=True)
    def in_a_fit(self):
        "Begins a long fit; the kernel's processes when both ranks are training"
        for o in self.folder.iterdir(): o.unlink()
        self.send('fit(10_000, .05)')       # an hour
        end = time.monotonic()+120
        while not all((self.folder/f'done{r}').exists() for r in range(2)):
            assert time.monotonic() < end
            time.sleep(.02)
        return self.processes()
    def goes_on(self):
        "Waits for three more batches of the fit"
        def count(): return int((self.folder/'done0').read_text() or 0)
        end, enough = time.monotonic()+120, count()+3
        while count() < enough:
            assert time.monotonic() < end
            time.sleep(.02)
    def restart(self):
        self.client.stop_channels()
        self.km.restart_kernel(now=True)
        return self.connect()
    def close(self):
        self.client.stop_channels()
        self.km.shutdown_kernel(now=True)
        self.km.cleanup_resources()


@pytest.fixture
def kernels(tmp_path):
    "Two, started at once"
    made = []
    try:
        for name in 'ab': made.append(Kernel(tmp_path/name))
        yield [o.connect() for o in made]
    finally:
        for o in made: o.close()
        for left in folders(): shutil.rmtree(left, ignore_errors=True)


def folders(): return [*Path(os.environ['TMPDIR']).glob('fastddp-*')]


def still_there(procs, seconds=180):
    "Those of `procs` that don't end, though they are given time"
    _, alive = psutil.wait_procs(procs, seconds)
    return [o for o in alive if o.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.full
def test_two_at_once_then_restart_and_kill(kernels):
    "They don't meet; and when a kernel ends without a chance to clean up, its workers and its helper go by themselves"
    a, b = kernels
    assert [k.answer(o) for k, o in [(k, k.setup()) for k in kernels]] == [None, None]
    assert [k.answer(o) for k, o in [(k, k.send('fit(2, 0)')) for k in kernels]] == [None, None]
    decoy = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'fastddp-0'])
    try:
        of_a, of_b = a.in_a_fit(), b.in_a_fit()
        assert len(of_a) >= 3 and len(of_b) >= 3
        assert [stat.S_IMODE(o.stat().st_mode) for o in folders()] == [0o700]*2
        a.restart()
        assert still_there(of_a) == []
        b.goes_on()
        os.kill(b.pid, signal.SIGKILL)
        assert still_there(of_b) == [] and decoy.poll() is None
        assert a.answer(a.setup()) is None and a.answer(a.send('fit(1, 0)')) is None
        assert folders() == [], 'what the killed ones left goes at the next start'
    finally:
        decoy.kill()
        decoy.wait()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_twenty_pairs_of_fits(kernels):
    "Both begin each of their fits in the same moment"
    assert [k.answer(o) for k, o in [(k, k.setup()) for k in kernels]] == [None, None]
    for _ in range(20): assert [k.answer(o) for k, o in [(k, k.send('fit(1, 0)')) for k in kernels]] == [None, None]
