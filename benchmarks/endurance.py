"""Many fits in one process, with an interrupt and a failure mixed in: does anything grow?

    python benchmarks/endurance.py [FITS]      200 fits unless said otherwise

Prints open files, shared memory, threads, resident memory (MiB), children and zombies every tenth of the way, and
at the end the growth from the second line to the last. The first tenth warms up: the helper, imports, the
allocator. From 200 fits on, the table is kept as results/<machine>/endurance.json. Shared memory is everybody's:
other programs on the machine show in that column.
"""
import os, shutil, signal, sys, tempfile, threading, time
from pathlib import Path
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'tests'))
from common import save
from faults import OneFault, Slow
from fastddp.all import WorkerError
from learners import make_learner


def figures():
    me = psutil.Process()
    children = me.children(recursive=True)
    shm = shutil.disk_usage('/dev/shm').used if Path('/dev/shm').exists() else 0
    return dict(files=me.num_fds(), shm=shm, threads=me.num_threads(), rss=me.memory_info().rss >> 20,
                children=len(children),
                zombies=sum(o.status() == psutil.STATUS_ZOMBIE for o in children),
                folders=len(list(Path(tempfile.gettempdir()).glob('fastddp-*'))))


def one(i, folder):
    "A plain fit; every tenth is interrupted by Ctrl-C, or fails: by an exception or by a death"
    marker, kind = str(Path(folder)/str(i)), i % 10
    fault = {3: 'interrupt', 6: 'exception', 9: 'SIGKILL'}.get(kind)
    learn = make_learner(n=64, cbs=[OneFault(fault, 'before_batch/train', i % 2, 0, 1, marker)] if fault else [])
    if kind == 1:
        learn.add_cb(Slow(.05, folder))
        threading.Timer(.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with learn.no_bar(), learn.no_logging():
        try: learn.distrib_fit(40 if kind == 1 else 1, nprocs=2)
        except (KeyboardInterrupt, WorkerError): return
    assert not fault


def main(n=200):
    lines, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ['TMPDIR'] = folder     # only what is ours is counted
        for i in range(n):
            try: one(i, folder)
            except KeyboardInterrupt: pass      # it came just after the fit
            if (i+1) % max(1, n//10) == 0:
                lines.append(dict(fits=i+1, **figures()))
                print(*(f'{k} {v:>5}' for k, v in lines[-1].items()), f'{time.monotonic()-begin:6.0f} s', flush=True)
    grown = {k: lines[-1][k]-lines[min(1, len(lines)-1)][k] for k in lines[-1] if k != 'fits'}
    print('growth   ', *(f'{k} {v:+5}' for k, v in grown.items()))
    if n >= 200:
        of_ten = dict(plain=6, interrupted=2, failed=2)
        save('endurance', f'cpu-{os.cpu_count()}core', of_ten=of_ten, rows=lines, growth=grown)
    return grown


if __name__ == '__main__': main(*map(int, sys.argv[1:2]))
