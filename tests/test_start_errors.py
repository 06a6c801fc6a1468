"""What the system refuses when workers start is told in words, and the next start is as if nothing had been."""
import contextlib, os, resource, shutil, signal, socket, subprocess, sys, tempfile, warnings
from pathlib import Path
import multiprocess, pytest, torch
from fastai.callback.core import Callback
from fastddp.all import CantDistribute, Local, RankDied, RankRaised
from fastddp.base import group, rendezvous
from fastddp.launch import local
from fastddp.launch.engine import Job
from fastddp.process import helper, server
from learners import make_learner


@pytest.fixture(autouse=True)
def small_helpers(monkeypatch):
    "Most tests here end the helper: the next one imports no application of fastai"
    monkeypatch.setattr(helper, '_as_here', [])


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


@pytest.mark.full
def test_a_long_path_of_the_temporary_folder(monkeypatch):
    "A socket's can't be that long; data goes there all the same"
    works()
    server.end_helper()
    config, folder = multiprocess.process.current_process()._config, Path(tempfile.mkdtemp(), 'x'*100)
    folder.mkdir()
    try:
        monkeypatch.setattr(tempfile, 'tempdir', str(folder))
        monkeypatch.setitem(config, 'tempdir', None)
        works()
        own = config['tempdir']
        server.end_helper()
        shutil.rmtree(own)
        assert [*folder.iterdir()] == []
    finally: shutil.rmtree(folder.parent)


@pytest.mark.full
def test_a_cleaned_temporary_folder():
    "As systems do with what is old: a block goes on, on new workers, and so does the helper"
    learn = make_learner(n=64)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        for o in 'fastddp-*', 'pymp-*':
            for folder in Path(tempfile.gettempdir()).glob(o): shutil.rmtree(folder)
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
        Local(gpus=[]).run(Job.of(kills_the_helper, server.helper_pid()), 2)
    works()


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
    with pytest.raises(RankDied, match='SIGKILL'): Local(gpus=[], timeout=20).run(Job.of(me, None), 2)


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
            with multiprocess.Pool(2) as p: self.codes = p.map(abs, [-1])
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


def other_connections(ctx, _):
    "Connections of another thread's, made while the group is joined, are not the group's"
    server, made, real = socket.create_server(('127.0.0.1', 0)), [], rendezvous._connect
    def connect(*args):
        made.append(socket.create_connection(server.getsockname()))
        return real(*args)
    rendezvous.leave()
    rendezvous._connect = connect
    try: rendezvous.join(os.path.join(os.path.dirname(ctx._channel.folder+'/'), 'again'), ctx.rank, ctx.world_size)
    finally: rendezvous._connect = real
    theirs, own = {o.fileno() for o in made}, {fd for fd, _ in rendezvous._own_sockets}
    res = bool(theirs & own), len(own) > 1
    for o in (server, *made): o.close()
    return res


def test_only_the_groups_own_connections_are_ours():
    assert Local(gpus=[]).run(Job.of(other_connections, None), 2).results == [(False, True)]*2


@pytest.mark.parametrize('method', ['forkserver', 'spawn'])
def test_files_of_the_working_directory_named_like_pythons_own(method, tmp_path):
    "`python -c`, by which multiprocess starts processes, looks there first"
    folder, script = tmp_path/'cwd', tmp_path/'script.py'
    folder.mkdir()
    for name in 'random', 'signal', 'tempfile': (folder/f'{name}.py').write_text('raise RuntimeError("not this one")')
    script.write_text("import sys; sys.path.append('')\n"
                      "from fastddp.launch.local import Local\nfrom fastddp.launch.engine import Job\n"
                      "def f(ctx, _): return ctx.rank\n"
                      "if __name__ == '__main__': print(Local(gpus=[]).run(Job.of(f, None), 2).results)\n")
    env = os.environ | dict(FASTDDP_PRELOAD='01'[method == 'forkserver'])
    p = subprocess.run([sys.executable, script], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert p.stdout == '[0, 1]\n' and 'not this one' not in p.stderr, p.stderr
