"""Whoever is killed leaves nothing; two kernels don't meet; a strange environment does no harm; nobody else is let in."""
import os, signal, socket, stat, subprocess, sys, textwrap, time
from pathlib import Path
import psutil, pytest
from faults import Slow
from learners import make_learner

HERE = Path(__file__).resolve().parent
FIT = '''
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from faults import Slow
from fastddp.all import *
from learners import make_learner
if __name__ == '__main__':
    learn = make_learner(cbs=[Slow({secs}, {folder!r})])
    learn.distrib_fit({epochs}, nprocs=2)
    print('trained', len(learn.recorder.values))
'''


def script(folder, name='fit.py', secs=.05, epochs=200):
    path = Path(folder, name)
    path.write_text(FIT.format(here=str(HERE), folder=str(folder), secs=secs, epochs=epochs), encoding='utf-8')
    return path


def start(path, **kwargs):
    return subprocess.Popen([sys.executable, '-W', 'ignore', str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)


def wait_for(path, limit=120):
    end = time.monotonic()+limit
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(.02)


def gone(procs, seconds):
    _, alive = psutil.wait_procs(procs, seconds)
    return [o for o in alive if o.status() != psutil.STATUS_ZOMBIE]


def test_killed_notebook_leaves_no_process(tmp_path):
    "kill -9: nobody can clean up, so workers and helper notice by themselves"
    decoy = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'fastddp-0'])
    p = start(script(tmp_path))
    try:
        wait_for(tmp_path/'done1')
        ours = psutil.Process(p.pid).children(recursive=True)
        assert len(ours) >= 3
        os.kill(p.pid, signal.SIGKILL)
        p.wait()
        assert gone(ours, 2+os.getloadavg()[0]) == []
        assert decoy.poll() is None
    finally:
        for o in (p, decoy):
            o.kill()
            o.wait()
        p.stdout.close()
    for left in Path(os.environ['TMPDIR']).glob('fastddp-*'):      # nobody was there to remove it
        assert stat.S_IMODE(left.stat().st_mode) == 0o700
        __import__('shutil').rmtree(left)


def test_two_in_the_same_second(tmp_path):
    for name in 'ab': (tmp_path/name).mkdir()
    procs = [start(script(tmp_path/name, secs=0, epochs=2)) for name in 'ab']
    outs = [p.communicate(timeout=200)[0] for p in procs]
    assert all('trained 2' in o for o in outs), outs


def test_strange_environment(tmp_path):
    "Stale variables, port 29500 taken, HOME and working directory read-only, a path with spaces and letters"
    folder = tmp_path/'Übung mit Leerzeichen'
    folder.mkdir()
    path = script(folder, secs=0, epochs=1)
    env = {**os.environ, 'MASTER_ADDR': '10.255.255.1', 'MASTER_PORT': '29500', 'RANK': '1', 'WORLD_SIZE': '4', 'LOCAL_RANK': '1',
           'HOME': '/proc'}
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(('127.0.0.1', 29500))
        taken.listen()
        out = start(path, env=env, cwd='/proc').communicate(timeout=200)[0]
    assert 'trained 1' in out, out


def listening(pids):
    "`address:port` of each listening socket of these processes"
    res = set()
    for pid in pids:
        for c in psutil.Process(pid).net_connections('inet'):
            if c.status == psutil.CONN_LISTEN: res.add(c.laddr.ip)
    return res


OTHER_USER = '''
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
found = []
for pid in sys.argv[2:]:
    for name in ('mem', 'environ', 'maps', 'fd'):
        try: (os.listdir if name == 'fd' else lambda p: open(p, 'rb').read(1))(f'/proc/{pid}/{name}')
        except OSError: continue
        found.append(name)
try: found += os.listdir(sys.argv[1])
except OSError: pass
print(found)
'''


def test_nobody_is_let_in(tmp_path):
    "During a fit: loopback only, a 0700 directory, and nothing of it for another user; afterwards nothing"
    p = start(script(tmp_path))
    try:
        wait_for(tmp_path/'done1')
        ours = [p.pid, *(o.pid for o in psutil.Process(p.pid).children(recursive=True))]
        assert listening(ours) <= {'127.0.0.1', '::1'}
        folders = [Path(o) for o in Path(os.environ['TMPDIR']).glob('fastddp-*')]
        assert len(folders) == 1 and stat.S_IMODE(folders[0].stat().st_mode) == 0o700
        if os.getuid() == 0:
            argv = [sys.executable, '-c', OTHER_USER, str(folders[0]), *map(str, ours)]
            if os.access(sys.executable, os.X_OK):
                r = subprocess.run(argv, capture_output=True, text=True, timeout=60)
                assert r.stdout.strip() == '[]', r.stdout+r.stderr
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=60)
    finally:
        p.kill()
        p.wait()
    assert not folders[0].exists()
