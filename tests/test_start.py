"""Workers start where the helper process can't, and data is shared where no memory file can be made. What the
system refuses is told in words, and the next start is as if nothing had been. The first call in a kernel
says at once what it waits for, the stop button ends it, and the next call is fine."""
import contextlib, errno, json, os, resource, shutil, signal, subprocess, sys, tempfile
import textwrap, warnings
from pathlib import Path
import multiprocessing, pytest, torch
from fastai.callback.core import Callback
from jupyter_client.manager import KernelManager
from fastddp.all import *
from fastddp.base import group
from fastddp.launch import local
from fastddp.launch.engine import Job
from fastddp.process import helper
from learners import make_learner
from spread import long_but


CRASH = '''
import torch
from fastddp.base import group
from fastddp.process import helper
from fastddp.launch.local import Local
from fastddp.launch.engine import Job

def add(ctx, obj): return group.all_sum([ctx.rank, obj.sum()])

if __name__ == '__main__':
    helper.preload('crashes')
    for i in range(2): print('sums', Local(see=()).run(Job.of(add, torch.ones(3)), 1).results[0])
    print(helper.start_method())
'''


@pytest.mark.full
def test_helper_that_crashes(tmp_path):
    "A library that ends the helper when it is imported: spawn does it, and one line says so"
    (tmp_path/'crashes.py').write_text('import os\nos._exit(3)\n')
    (tmp_path/'run.py').write_text(textwrap.dedent(CRASH))
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])}
    r = subprocess.run([sys.executable, 'run.py'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    assert r.stdout.split('\n') == ['sums [0.0, 3.0]']*2 + ['spawn', '']
    assert r.stderr.count('UserWarning') == 1 and 'workers start by spawn' in r.stderr, r.stderr


TOUCHED = '''
from fastddp.launch.local import start_workers
from fastddp.process import helper

if __name__ == '__main__':
    helper.preload('touches:cuda')
    for on_gpu in False, True:
        workers = start_workers([0, 1], on_gpu, lambda: False)
        print(workers.method)
        workers.stop()
'''


@pytest.mark.full
def test_helper_that_touches_a_gpu(tmp_path):
    "Workers that need none are forked all the same; the others are spawned, and one line says so"
    (tmp_path/'touches.py').write_text('import torch\ndef cuda(): torch.cuda._is_in_bad_fork = lambda: True\n')
    (tmp_path/'run.py').write_text(TOUCHED)
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])}
    r = subprocess.run([sys.executable, 'run.py'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (r.returncode, r.stdout) == (0, 'forkserver\nspawn\n'), r.stderr
    assert r.stderr.count('UserWarning') == 1 and 'touches CUDA' in r.stderr, r.stderr


NOTED = """
import sys, warnings
warnings.simplefilter('ignore')
from IPython.core.interactiveshell import InteractiveShell
def run(cell): exec(cell, globals())
typed = InteractiveShell.instance().run_cell if {interactive} else run

def helper(): return getattr(sys.modules.get('fastddp.process.helper'), '_helper', None)

class Notes:
    "Whether there is a helper when a library is imported"
    def __init__(self): self.seen = {{}}
    def find_spec(self, name, *args):
        if name in ('torch', 'fastai'): self.seen.setdefault(name, helper() is not None)

notes = Notes()
sys.meta_path.insert(0, notes)
typed({cell!r})
print(sorted(notes.seen.items()), helper() is not None)
"""


@pytest.mark.parametrize('cell,interactive,seen,there', [
    ('import fastddp', True, {}, True), ('import fastddp', False, {}, False),
    ('import fastddp.process.helper', True, {}, False),
    *(pytest.param(*o, marks=pytest.mark.full) for o in [
        ('%load_ext fastddp', True, dict(torch=False), True),
        ('from fastddp.ranch import *', True, dict(torch=False), False),
        ('from fastddp.all import *', True, dict(fastai=True, torch=True), True),
        ('from fastddp.all import *', False, dict(fastai=False, torch=False), False)])])
def test_the_helper_is_asked_for_before_fastai_is_imported(cell, interactive, seen, there):
    "and `import fastddp` imports neither torch nor fastai"
    r = subprocess.run([sys.executable, '-c', NOTED.format(cell=cell, interactive=interactive)], capture_output=True,
                       text=True, timeout=120)
    assert r.stdout.splitlines()[-1:] == [f'{sorted(seen.items())} {there}'], (r.stdout, r.stderr)


def test_data_through_a_temporary_file(monkeypatch):
    "No anonymous memory files here: the notebook's data goes through a file without a name, and comes back"
    def refused(*args): raise OSError(errno.ENOSYS, 'Function not implemented')
    monkeypatch.setattr(os, 'memfd_create', refused, raising=False)
    monkeypatch.setattr('fastddp.payload.buffers._warned', set())
    learn = make_learner(n=64)
    before = [p.clone() for p in learn.model.parameters()]
    with warnings.catch_warnings(record=True) as said, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.distrib_fit(1, nprocs=2)
    assert len([o for o in said if 'temporary file' in str(o.message)]) == 1
    assert any((a != b).any() for a, b in zip(before, learn.model.parameters()))


# What the system refuses

@pytest.fixture(autouse=True)
def small_helpers(monkeypatch):
    "Most tests here end the helper: the next one imports no application of fastai"
    monkeypatch.setattr(helper, '_preload_if_imported', [])


def me(ctx, _):
    ctx.beat('step 1')
    return group.all_sum([ctx.rank])


def run(): return Local(gpus=[]).run(Job.of(me, None), 2).results


def works():
    "On workers that the helper has given"
    with Local(gpus=[]) as local:
        assert local.run(Job.of(me, None), 2).results == [[1.]]*2
        assert local.workers.method == 'forkserver'


@contextlib.contextmanager
def few_descriptors():
    "Enough for a payload and a folder, not for a pipe"
    (soft, hard), full = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd')))+5, hard))
    try:
        with contextlib.suppress(OSError):
            while True: full.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(3): os.close(full.pop())
        yield
    finally:
        for fd in full: os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_cwd():
    was, gone = os.getcwd(), tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)
    try: yield
    finally: os.chdir(was)


@contextlib.contextmanager
def no_temporary_folder():
    was, tempfile.tempdir = tempfile.tempdir, '/proc/there is no such folder'
    try: yield
    finally: tempfile.tempdir = was


REFUSED = {few_descriptors: 'ulimit -n', no_cwd: 'working directory', no_temporary_folder: 'temporary folder'}


@pytest.mark.parametrize('refused', REFUSED, ids=lambda o: o.__name__)
def test_what_the_system_refuses(refused):
    works()
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)     # nobody says that there will be no helper
        with refused(), pytest.raises(CantDistribute, match=REFUSED[refused]): run()
    works()


def end_helper():
    process = helper.ensure_helper().popen
    process.kill()
    process.wait()


@pytest.mark.full
def test_a_long_path_of_the_temporary_folder(monkeypatch):
    "A socket's can't be that long; ours have none"
    works()
    end_helper()
    folder = Path(tempfile.mkdtemp(), 'x'*100)
    folder.mkdir()
    try:
        monkeypatch.setattr(tempfile, 'tempdir', str(folder))
        works()
        end_helper()
        assert [*folder.iterdir()] == []
    finally: shutil.rmtree(folder.parent)


@pytest.mark.full
def test_a_cleaned_temporary_folder():
    "As systems do with what is old: a block goes on, on new workers, and so does the helper"
    learn = make_learner(n=64)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        for folder in Path(tempfile.gettempdir()).glob('fastddp-*'): shutil.rmtree(folder)
        learn.fit(1)
    works()


def kills_the_helper(ctx, pid):
    "In the middle of a job"
    ctx.beat('step 1')
    if ctx.rank == 1: os.kill(pid, signal.SIGKILL)
    while True: signal.pause()


def test_a_helper_that_dies_is_named():
    works()
    with pytest.raises(RankDied, match='helper process was killed'):
        Local(gpus=[]).run(Job.of(kills_the_helper, helper.ensure_helper().popen.pid), 2)
    works()


@pytest.mark.parametrize('gpus', [[], [0, 1]])
def test_workers_that_need_gpus_are_asked_for(monkeypatch, gpus):
    asked = []
    monkeypatch.setattr(local, 'start_workers', lambda ranks, on_gpu, *_: asked.append(on_gpu))
    monkeypatch.setattr(Local, '_form_group', lambda *_: None)
    engine = Local(gpus=gpus)
    engine._ensure_workers(2, None)
    engine.close()
    assert asked == [bool(gpus)]


def test_workers_that_die_before_they_are_ready(monkeypatch):
    "On GPUs it is asked first whether the helper has touched one"
    real = local.start_workers
    def start(ranks, on_gpu, *args): return real(ranks, True, *args)
    def dying(*args):
        workers = new(*args)
        for r, p in workers.procs.items():
            os.kill(p.pid, signal.SIGKILL)
            p.join()
            workers._read(r)        # it was too quick
        return workers
    new = local._new_workers
    monkeypatch.setattr(local, 'start_workers', start)
    monkeypatch.setattr(local, '_new_workers', dying)
    with pytest.raises(RankDied, match='SIGKILL'): Local(gpus=[], timeout=60).run(Job.of(me, None), 2)


class Destroys(Callback):
    "As code does that was written for a script of one's own"
    def after_epoch(self): torch.distributed.destroy_process_group()


def test_a_process_group_that_user_code_destroys():
    with pytest.raises(RankRaised, match='group was destroyed'):
        make_learner(cbs=[Destroys()]).distrib_fit(2, nprocs=2, timeout=60)


class Forks(Callback):
    "A process that leaves the callback, not by an exit of its own; or processes that work for it"
    codes = ()
    def __init__(self, how): self.how = how
    def before_batch(self):
        if not self.training or self.iter != 1: return
        if self.how == 'pool':
            with multiprocessing.Pool(2) as p: self.codes = p.map(abs, [-1])
            return
        if not (pid := os.fork()):
            if self.how == 'raises': raise ValueError('wrong on purpose')
            raise SystemExit(3)
        self.codes = [*self.codes, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


@pytest.mark.parametrize('how,code', [('raises', 1), ('exits', 3), ('pool', 1)])
def test_processes_of_a_callback(how, code):
    "One that leaves it goes neither the way of a rank's failure, nor to the sync points of the others"
    learn = make_learner(cbs=[Forks(how)])
    learn.distrib_fit(1, nprocs=2, timeout=60)
    assert len(learn.recorder.values) == 1 and learn.forks.codes == [code]


OFF = 'from fastddp.process.helper import turn_off_helper; turn_off_helper("a test")'


@pytest.mark.parametrize('method', long_but(['forkserver', 'spawn'], 'forkserver'))
def test_files_of_the_working_directory_named_like_pythons_own(method, tmp_path):
    "`python -c`, by which workers start, looks there first"
    folder, script = tmp_path/'cwd', tmp_path/'script.py'
    folder.mkdir()
    for name in 'random', 'signal', 'tempfile': (folder/f'{name}.py').write_text('raise RuntimeError("not this one")')
    script.write_text("import sys; sys.path.append('')\n"
                      "from fastddp.launch.local import Local\nfrom fastddp.launch.engine import Job\n"
                      "def f(ctx, _): return ctx.rank\n"
                      "if __name__ == '__main__':\n"
                      f"    {OFF if method == 'spawn' else ''}\n"
                      "    print(Local(gpus=[]).run(Job.of(f, None), 2).results)\n")
    p = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert p.stdout == '[0, 1]\n' and 'not this one' not in p.stderr, p.stderr


# The first call in a kernel. The helper's imports last until the test wants them to end, so no clock is asked.

HERE = Path(__file__).resolve().parent
IMPORTS = '''
import time
from pathlib import Path
end = time.monotonic()+200
while not Path({go!r}).exists() and time.monotonic() < end: time.sleep(.02)
'''
SETUP = '''
import os, sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, {here!r})
os.environ['PYTHONPATH'] = os.pathsep.join([{folder!r}, os.environ.get('PYTHONPATH', '')])
from fastddp.process import helper
helper.preload('imports_for_long')
from fastddp.all import *
from learners import make_learner
learn = make_learner()
'''
WHO = '''
import json, psutil
procs = psutil.Process().children(recursive=True)
print(json.dumps(dict(of_group=sum(os.getpgid(p.pid) == os.getpgrp() for p in procs), all=len(procs))))
'''


class Kernel:
    "A kernel that the test talks to, cell by cell"
    def __init__(self):
        self.km = KernelManager(kernel_name='python3')
        self.km.start_kernel(extra_arguments=['--HistoryManager.hist_file=:memory:', '--log-level=CRITICAL'])
        self.client = self.km.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
    def run(self, code, when_starting=lambda: None):
        "`(lines of stdout, states of the status line, error's name)`; calls `when_starting` when that line appears"
        out, status = [], []
        def hook(msg):
            kind, content = msg['msg_type'], msg['content']
            if kind == 'stream' and content['name'] == 'stdout': out.append(content['text'])
            if 'fastddp-status' not in str(content.get('transient')): return
            status.append(content['data']['text/plain'])
            if kind == 'display_data': when_starting()
        reply = self.client.execute_interactive(textwrap.dedent(code), timeout=240, output_hook=hook)
        return ''.join(out).splitlines(), status, reply['content'].get('ename')
    def close(self):
        self.client.stop_channels()
        self.km.shutdown_kernel(now=True)
        self.km.cleanup_resources()


@pytest.fixture
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.mark.full
@pytest.mark.timeout(500)
def test_stopped_while_the_helper_imports(kernel, tmp_path):
    go = tmp_path/'go'
    (tmp_path/'imports_for_long.py').write_text(IMPORTS.format(go=str(go)))
    assert kernel.run(SETUP.format(here=str(HERE), folder=str(tmp_path)))[2] is None
    said = 'starting 2 workers (first time in this kernel: importing torch and fastai) ...'
    for _ in range(2):
        _, status, error = kernel.run('learn.distrib_fit(1, nprocs=2)', kernel.km.interrupt_kernel)
        assert error == 'KeyboardInterrupt' and not go.exists()      # nobody waited for the helper
        assert status[0] == said and status[-1] == '' and all(o.startswith(said) for o in status[:-1])
    out, status, error = kernel.run('learn.distrib_fit(1, nprocs=2)', go.touch)
    assert error is None and status[0] == said and status[-1] == '' and out[-1].startswith('1 epoch in'), (out, error)
    out, status, error = kernel.run('preds = learn.distrib_get_preds(nprocs=2)')
    assert error is None and not any('first time' in o for o in status)
    # A kernel that shuts down ends all children of its own group first, and waits for them.
    out, *_ = kernel.run(WHO)
    assert json.loads(out[-1]) == dict(of_group=0, all=1), 'the helper, apart; and no worker'
