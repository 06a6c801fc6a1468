"""Many calls in one process, with interrupts and failures mixed in: does anything grow?

    python benchmarks/endurance.py [WHAT] [N] [keep]

WHAT is one of these, or `all`; a number alone means so many mixed fits.

    mixed     200 fits, two of ten interrupted, two failing: by an exception or by a death
    block     300 fits in one block
    ranch     1,000 calls of `ranch`, every hundredth failing
    kernels   two Jupyter kernels at a time, 20 blocks in each

Prints open files, shared memory, threads, resident memory (MiB), children, zombies and folders every tenth of the way,
and at the end the growth: the least of the second half less the least of the first one, without its first line, when
the helper starts and the allocator warms up. (A figure may go up and down: a kernel's own sockets do.) With at least as
many calls as above, or with `keep`, the table is kept as results/<machine>/endurance*.json. Shared memory is
everybody's: other programs on the machine show in that column.
"""
import contextlib, json, os, shutil, signal, sys, tempfile, threading, time
from pathlib import Path
import psutil

TESTS = Path(__file__).resolve().parent.parent/'tests'
sys.path[:0] = [str(TESTS), str(Path(__file__).resolve().parent)]
from common import save
from faults import OneFault, Slow
from fastddp.all import Local, WorkerError, ranch
from learners import make_learner


def figures():
    me = psutil.Process()
    children = me.children(recursive=True)
    shm = shutil.disk_usage('/dev/shm').used if Path('/dev/shm').exists() else 0
    temp = Path(tempfile.gettempdir())
    return dict(files=me.num_fds(), shm=shm, threads=me.num_threads(), rss=me.memory_info().rss >> 20,
                children=len(children),
                zombies=sum(o.status() == psutil.STATUS_ZOMBIE for o in children),
                folders=len([*temp.glob('fastddp-*'), *temp.glob('pymp-*')]))


def measured(n, step):
    "Calls `step(i)` `n` times; figures every tenth of the way, as a list of rows"
    rows, begin = [], time.monotonic()
    for i in range(n):
        try: step(i)
        except KeyboardInterrupt: pass      # it came just after the call
        if (i+1) % max(1, n//10) == 0:
            rows.append(dict(calls=i+1, **figures()))
            print(*(f'{k} {v:>5}' for k, v in rows[-1].items()), f'{time.monotonic()-begin:6.0f} s', flush=True)
    return rows


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


def mixed(n, folder): return measured(n, lambda i: one(i, folder))


def block(n, folder):
    learn = make_learner(n=64)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2, launcher=Local(gpus=[], see=())):
        return measured(n, lambda i: learn.fit(1))


def called(i):
    "What each process of a `ranch` does"
    if i % 100 == 99 and os.environ['LOCAL_RANK'] == '1': raise ValueError('wrong on purpose')
    return i


def calls(n, folder):
    def step(i):
        try: assert ranch(2, called, i) == [i, i]
        except WorkerError: assert i % 100 == 99
    return measured(n, step)


KERNEL = '''
import sys, json
sys.path[:0] = {path!r}
import endurance
with endurance.contextlib.redirect_stdout(sys.stderr): rows = endurance.measured({n}, endurance.one_block)
print('ROWS', json.dumps(rows))
'''


def one_block(i):
    learn = make_learner(n=64)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        for _ in range(2): learn.fit(1)


@contextlib.contextmanager
def kernel():
    from jupyter_client.manager import KernelManager
    km = KernelManager(kernel_name='python3')
    km.start_kernel(extra_arguments=['--HistoryManager.hist_file=:memory:', '--log-level=ERROR'])
    client = km.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield client
    finally:
        client.stop_channels()
        km.shutdown_kernel(now=True)


def in_kernel(n, results):
    told = []
    def hook(msg): told.append(msg['content'].get('text', '') if msg['msg_type'] == 'stream' else '')
    with kernel() as client:
        client.execute_interactive(KERNEL.format(path=sys.path[:2], n=n), timeout=3600, output_hook=hook)
    results.append(json.loads(''.join(told).split('ROWS ')[-1].splitlines()[0]))


def kernels(n, folder):
    "Of the two tables the one with more at the end"
    results = []
    threads = [threading.Thread(target=in_kernel, args=(n, results)) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(results) == 2, 'a kernel failed'
    return max(results, key=lambda rows: (rows[-1]['files'], rows[-1]['rss']))


# name -> what runs, how many, and the name of the results
WHAT = dict(mixed=(mixed, 200, 'endurance'), block=(block, 300, 'endurance_block'),
            ranch=(calls, 1000, 'endurance_ranch'), kernels=(kernels, 20, 'endurance_kernels'))


def growth(rows):
    half = max(1, len(rows)//2)
    def least(rows, k): return min(o[k] for o in rows)
    return {k: least(rows[half:] or rows, k)-least(rows[1:half] or rows[:1], k) for k in rows[0] if k != 'calls'}


def run(what, n=None, keep=False):
    f, usual, name = WHAT[what]
    n = n or usual
    print(f'{what}: {n}')
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ['TMPDIR'] = folder     # only what is ours is counted
        rows = f(n, folder)
    grown = growth(rows)
    print('growth   ', *(f'{k} {v:+5}' for k, v in grown.items()))
    if n >= usual or keep:
        save(name, f'cpu-{os.cpu_count()}core', unit='rss in MiB, shm in bytes', rows=rows, growth=grown)


def main(what='mixed', n=None, keep=''):
    if what.isdigit(): what, n = 'mixed', what
    for o in WHAT if what == 'all' else [what]: run(o, n and int(n), keep == 'keep')


if __name__ == '__main__': main(*sys.argv[1:])
