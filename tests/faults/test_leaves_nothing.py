"""Whoever is killed leaves nothing; a strange environment does no harm; nobody else is let in; in a long
block, and with a launcher that is used again, nothing piles up from run to run."""
import gc, os, shutil, signal, socket, stat, subprocess, sys, tempfile, time
from pathlib import Path
import psutil, pytest, torch
from fastddp.all import Local, RankDied, RankRaised
from fastddp.base import board, group
from fastddp.cluster.cluster import StandingLocal
from fastddp.launch.engine import Job
from fastddp.process.helper import ensure_helper
from fastddp.process.helper import ensure_helper
from faults import Slow
from learners import make_learner


HERE = Path(__file__).resolve().parent.parent
FIT = '''
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from fastddp.process.helper import ensure_helper
from faults import Slow
from fastddp.all import *
from learners import make_learner
if __name__ == '__main__':
    learn = make_learner(cbs=[Slow({secs}, {folder!r})])
    learn.distrib_fit({epochs}, nprocs=2)
    print('trained', len(learn.recorder.values))
'''


def script(folder, name='fit.py', secs=.05, epochs=10_000):
    path = Path(folder, name)
    path.write_text(FIT.format(here=str(HERE), folder=str(folder), secs=secs, epochs=epochs), encoding='utf-8')
    return path


def start(path, **kwargs):
    return subprocess.Popen([sys.executable, '-W', 'ignore', str(path)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **kwargs)


def wait_for(path, script, limit=240):
    "Until `script`, a process, has written `path`"
    end = time.monotonic()+limit
    while not path.exists():
        assert script.poll() is None, script.stdout.read()
        assert time.monotonic() < end, path
        time.sleep(.02)


def still_there(procs, seconds=180):
    "Those of `procs` that don't end, though they are given time"
    _, alive = psutil.wait_procs(procs, seconds)
    return [o for o in alive if o.status() != psutil.STATUS_ZOMBIE]


def folders(): return {*Path(os.environ['TMPDIR']).glob('fastddp-*')}


SWEEP = 'from fastddp.process.helper import sweep; sweep()'


def test_killed_notebook_leaves_no_process(tmp_path):
    "kill -9: nobody can clean up, so workers and helper notice by themselves; the fit would go on for an hour"
    decoy = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'fastddp-0'])
    before = folders()      # this process may have a helper of its own
    p = start(script(tmp_path))
    try:
        wait_for(tmp_path/'done1', p)
        ours = psutil.Process(p.pid).children(recursive=True)
        assert len(ours) >= 3
        os.kill(p.pid, signal.SIGKILL)
        p.wait()
        assert still_there(ours) == []
        assert decoy.poll() is None
    finally:
        for o in (p, decoy):
            o.kill()
            o.wait()
        p.stdout.close()
    subprocess.run([sys.executable, '-c', SWEEP], check=True)
    assert folders() <= before, 'the next start removes their folder'


@pytest.mark.full
@pytest.mark.parametrize('how', ['cold', 'in ranch', 'all stopped', 'workers stopped', 'with a fork'])
def test_killed_notebook_leaves_nothing_at_all(how, tmp_path):
    """kill -9 while the helper imports; while workers, or the helper too, are stopped, and can't notice anything; while
    a process that was forked from the notebook lives on; in a function's processes, while compiled code
    in one holds Python's lock. The next start removes the folders"""
    temp = Path(tempfile.mkdtemp(prefix='t'))      # DataLoader's sockets lie in there, and such a path must be short
    path = script(tmp_path)
    if how == 'with a fork':
        forks = FORK.format(folder=str(tmp_path))+'    learn ='
        path.write_text(path.read_text().replace('    learn =', forks))
    if how == 'in ranch': path.write_text(LOCKED.format(folder=str(tmp_path)))
    p = start(path, env={**os.environ, 'TMPDIR': str(temp)})
    ours, fork = [], None
    try:
        me = psutil.Process(p.pid)
        if how == 'cold': ours = until(lambda: helpers(me))
        else:
            wait_for(tmp_path/'done1', p)
            ours = me.children(recursive=True)
            assert len(ours) >= 3
        if how == 'with a fork': fork = psutil.Process(int((tmp_path/'fork').read_text()))
        if 'stopped' in how:
            for o in ours:
                if how == 'all stopped' or o not in helpers(me): os.kill(o.pid, signal.SIGSTOP)
        os.kill(p.pid, signal.SIGKILL)
        p.wait()
        assert still_there([o for o in ours if o != fork]) == []
        if fork: assert fork.is_running()
    finally:
        for o in (p, *([fork] if fork else []), *ours):
            if o is p or o.is_running(): o.kill()
        p.wait()
        p.stdout.close()
    subprocess.run([sys.executable, '-c', SWEEP], env={**os.environ, 'TMPDIR': str(temp)}, check=True)
    assert [o.name for o in temp.iterdir() if o.name.startswith(('fastddp-', 'pymp-'))] == []
    shutil.rmtree(temp)


# stays until the test ends it; what it has open is what it was born with
FORK = '''    import os, time
    from fastddp.process.workers import Workers
    Workers([0]).stop()
    if not (pid := os.fork()):
        for fd in (1, 2): os.close(fd)
        time.sleep(600)
    Path({folder!r}, 'fork').write_text(str(pid))
'''


LOCKED = '''
import ctypes, time
from pathlib import Path
from fastddp.ranch import *
def hold(rank):
    Path({folder!r}, f'done{{rank}}').write_text('1')
    if rank == 1: ctypes.PyDLL(None).sleep(600)
    time.sleep(600)
if __name__ == '__main__': spawn(hold, nprocs=2)
'''


def test_a_helpers_command_line_is_short():
    "It may import a thousand modules; ps and top show the line"
    assert len(' '.join(ensure_helper().popen.args)) < 1000


def cmdline(proc):
    try: return proc.cmdline()
    except psutil.NoSuchProcess: return []


def helpers(proc):
    "The helper of a notebook, once it is there"
    return [o for o in proc.children() if 'process.helper' in ' '.join(cmdline(o))]


def until(found, limit=240):
    end = time.monotonic()+limit
    while not (res := found()):
        assert time.monotonic() < end
        time.sleep(.01)
    return res


@pytest.mark.full
def test_strange_environment(tmp_path):
    "Stale variables, port 29500 taken, HOME and working directory read-only, a path with spaces and letters"
    folder = tmp_path/'Übung mit Leerzeichen'
    folder.mkdir()
    path = script(folder, secs=0, epochs=1)
    env = {**os.environ, 'MASTER_ADDR': '10.255.255.1', 'MASTER_PORT': '29500', 'RANK': '1', 'WORLD_SIZE': '4',
           'LOCAL_RANK': '1',
           'HOME': '/proc'}
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(('127.0.0.1', 29500))
        taken.listen()
        out = start(path, env=env, cwd='/proc').communicate(timeout=200)[0]
    assert 'trained 1' in out, out


def listening(pids):
    "The addresses at which these processes listen"
    res = set()
    for pid in pids:
        for c in psutil.Process(pid).net_connections('inet'):
            if c.status == psutil.CONN_LISTEN: res.add(c.laddr.ip)
    return res


OTHER_USER = '''
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
found = []
for pid in sys.argv[3:]:
    for name in ('mem', 'environ', 'maps', 'fd'):
        try: seen = (os.listdir if name == 'fd' else lambda p: open(p, 'rb').read(1))(f'/proc/{pid}/{name}')
        except OSError: continue
        if seen: found.append(name)     # of a process that ended meanwhile everybody may see that nothing is left
try: found += os.listdir(sys.argv[1])
except OSError: pass
for name in sys.argv[2].split(','):     # rendezvous, pulse and logs, by the names that only their owner can see
    try: found.append(open(os.path.join(sys.argv[1], name), 'rb').name)
    except OSError: pass
print(found)
'''


@pytest.mark.full
def test_nobody_is_let_in(tmp_path):
    "During a fit: loopback only, a 0700 directory, and nothing of it for another user; afterwards nothing"
    p = start(script(tmp_path))
    try:
        wait_for(tmp_path/'done1', p)
        ours = [p.pid, *(o.pid for o in psutil.Process(p.pid).children(recursive=True))]
        assert set() < listening(ours) <= {'127.0.0.1', '::1'}
        folders = [Path(o) for o in Path(os.environ['TMPDIR']).glob('fastddp-*')]
        assert len(folders) == 1 and stat.S_IMODE(folders[0].stat().st_mode) == 0o700
        if os.getuid() == 0:
            names = os.listdir(folders[0])
            assert any(o.startswith('rendezvous-') for o in names)
            argv = [sys.executable, '-c', OTHER_USER, str(folders[0]), ','.join(names), *map(str, ours)]
            if os.access(sys.executable, os.X_OK):
                r = subprocess.run(argv, capture_output=True, text=True, timeout=60)
                assert r.stdout.strip() == '[]', r.stdout+r.stderr
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=60)
    finally:
        p.kill()
        p.wait()
    assert not folders[0].exists()


CONTAINER = '''
mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && cd "$1" || exit 77
touch file 2>/dev/null && exit 77
shift
exec "$@"
'''
SMALL = '''
import sys
sys.path.insert(0, {here!r})
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastddp.all import *
from learners import points
class Wide:
    "Items of 1 MB, read from the read-only folder"
    def __len__(self): return 16
    def __getitem__(self, i): return torch.load('one.pt'), torch.tensor(i%2)
if __name__ == '__main__':
    data = Wide()
    many = [(torch.load('one.pt')+i, torch.tensor(i%2)) for i in range(16)]      # 16 MB to send
    def learner(items, num_workers):
        valid = items[:4] if items is many else data
        dls = DataLoaders.from_dsets(items, valid, bs=4, num_workers=num_workers, device='cpu')
        return Learner(dls, torch.nn.Linear(1<<18, 2), loss_func=torch.nn.CrossEntropyLoss(), path='.')
    learn = learner(many, 0)
    learn.distrib_fit(1, nprocs=2)
    print('trained', len(learn.recorder.values))
    try: learner(data, 2).distrib_fit(1, nprocs=2)
    except RankRaised as e: print('told', e.remedy)
    try: learn.distrib_lr_find(nprocs=2, show_plot=False, num_it=3)
    except RankRaised as e: print('lr_find told', e.remedy)
    learn.model_dir = sys.argv[1]
    learn.distrib_lr_find(nprocs=2, show_plot=False, num_it=3)
    print('lr_find done')
'''


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which('unshare'), reason='needs root and unshare, to mount')
def test_in_a_small_container(tmp_path):
    """1 MB of /dev/shm, and a read-only folder that is working directory, data path and HOME: the fit works, or says
    what to do"""
    folder = tmp_path/'Daten, schreibgeschützt'
    folder.mkdir()
    torch.save(torch.ones(1 << 18), folder/'one.pt')
    (folder/'small.py').write_text(SMALL.format(here=str(HERE)), encoding='utf-8')
    r = subprocess.run(['unshare', '-m', 'sh', '-c', CONTAINER, 'sh', str(folder), sys.executable, '-W', 'ignore',
                        'small.py', str(tmp_path)],
                       timeout=200, env={**os.environ, 'HOME': str(folder)}, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, text=True)
    if r.returncode == 77: pytest.skip('mounting is not allowed here')
    assert all(o in r.stdout
               for o in ('trained 1', 'told A DataLoader', '--shm-size', 'lr_find told', 'learn.model_dir = ',
                         'lr_find done')), r.stdout


@pytest.mark.full
@pytest.mark.parametrize('n', [10, 100])
def test_nothing_grows(n, tmp_path):
    """Many fits in one process, two of ten interrupted and two failing: open files, threads, children, zombies and
    folders stay as many"""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(HERE.parent), os.environ.get('PYTHONPATH', '')])}
    p = subprocess.run([sys.executable, '-W', 'ignore', str(HERE.parent/'benchmarks'/'endurance.py'), str(n)], env=env,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    grown = p.stdout.split('growth')[-1].split()
    grown = {k: int(v) for k, v in zip(grown[::2], grown[1::2])}
    assert not any(grown[k] for k in ('files', 'threads', 'children', 'zombies', 'folders')), p.stdout


# From run to run

def add(ctx, obj):
    "A step, and something that needs the group"
    ctx.beat('step 1')
    return group.all_sum([ctx.rank, obj.sum()])


def left_waiting(ctx, obj):
    "Rank 0 waits for a rank that failed"
    ctx.beat('step 1')
    if ctx.rank == 1: raise ValueError('on purpose')
    return group.all_sum([0])


def killed_while_all_open_the_page(ctx, obj):
    "Rank 0 has made the file of the board, and removes it when all ranks have opened it"
    if ctx.rank == 0: group.barrier = lambda: os.kill(os.getpid(), signal.SIGKILL)
    board.group_board()


@pytest.mark.full
def test_a_rank_that_is_killed_while_the_board_is_made():
    before = set(Path(tempfile.gettempdir()).glob('fastddp*'))
    with pytest.raises(RankDied), Local(gpus=[], see=()) as local:
        local.run(Job.of(killed_while_all_open_the_page, None), 2)
    assert set(Path(tempfile.gettempdir()).glob('fastddp*')) <= before


def files_of(local): return sorted(o.name.split('-')[0] for o in Path(local.workers.dir).iterdir())
def descriptors():
    gc.collect()        # what earlier tests left to be collected must not go meanwhile
    return len(os.listdir('/proc/self/fd'))


@pytest.mark.full
def test_many_runs_in_one_block_leave_no_files():
    job = Job.of(add, torch.ones(3))
    with Local(gpus=[], see=()) as local:
        for _ in range(2): local.run(job, 2)        # a rank's results go to two blocks by turns
        files, fds = files_of(local), descriptors()
        for _ in range(5): assert local.run(job, 2).results == [[1., 6.]]*2
        assert files_of(local) == files == ['heartbeats', 'rank0.log', 'rank1.log', 'rendezvous']
        assert descriptors() == fds


@pytest.mark.full
def test_many_fits_in_one_block_leave_no_files():
    learn, local = make_learner(n=64), Local(gpus=[], see=())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2, launcher=local):
        for _ in range(2): learn.fit(1)
        files, fds = files_of(local), descriptors()
        for _ in range(3): learn.fit(1)
        learn.validate()
        assert files_of(local) == files == ['heartbeats', 'rank0.log', 'rank1.log', 'rendezvous']
        assert descriptors() == fds


@pytest.mark.full
def test_a_group_that_is_formed_anew_leaves_no_file():
    "Each failure breaks the group; the next job's ranks meet at a new file, and the old one goes"
    with StandingLocal(gpus=[], see=()) as local:
        for _ in range(3):
            with pytest.raises(RankRaised, match='on purpose'): local.run(Job.of(left_waiting, None), 2)
            assert local.run(Job.of(add, torch.ones(3)), 2).results == [[1., 6.]]*2
        assert files_of(local) == ['heartbeats', 'rank0.log', 'rank1.log', 'rendezvous']


@pytest.mark.full
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
    "Folders of this user's processes that are gone; others may put a link there, which leads elsewhere"
    says = 'import os; print(os.getpid())'
    pid = int(subprocess.run([sys.executable, '-c', says], capture_output=True, text=True).stdout)
    here = os.stat('/proc/self/ns/pid').st_ino
    names = dict(gone=f'fastddp-{here}-{pid}-x', others=f'fastddp-{here}-{pid}-y', elsewhere='elsewhere',
                 lives=f'fastddp-{here}-{os.getpid()}-x', container=f'fastddp-{here+1}-{pid}-x',
                 odd=f'fastddp-{here}-x-y')
    for o in names.values(): (tmp_path/o).mkdir()
    (tmp_path/'elsewhere'/'file').touch()
    link = tmp_path/f'fastddp-{here}-{pid}-link'
    link.symlink_to(tmp_path/'elsewhere')
    if os.getuid() == 0: os.chown(tmp_path/names['others'], 12345, 12345)
    env = os.environ | dict(TMPDIR=str(tmp_path))
    subprocess.run([sys.executable, '-c', SWEEP], env=env, check=True, timeout=60)
    left = {o.name for o in tmp_path.iterdir()}
    removed = {names['gone']} if os.getuid() == 0 else {names['gone'], names['others']}
    assert left == {*names.values(), link.name}-removed and (tmp_path/'elsewhere'/'file').exists()


def test_a_number_that_is_a_strangers_by_now(monkeypatch):
    "The system gives the number of a process that is gone to another one"
    with StandingLocal(gpus=[], see=()) as local:
        local.run(Job.of(add, torch.ones(3)), 2)
        p = local.workers.procs[1]
        os.kill(p.pid, signal.SIGKILL)
        while local.workers.alive() != [0]: local.workers.poll(1)
        with subprocess.Popen(['sleep', '60'], start_new_session=True) as stranger:
            monkeypatch.setattr(p, 'pid', stranger.pid)
            local.close()
            with pytest.raises(subprocess.TimeoutExpired): stranger.wait(.5)
            stranger.kill()
