"""What a data set of S bytes costs while N workers train on it, beyond the notebook's own copy, in multiples of S.

Every rank reads all of the data. Counted are the anonymous pages of the notebook and of all that it started (one
that several share is counted once) and shared memory that is allocated, at their most during the fit, less what the
notebook had before it. What the same fit costs on an eighth of the data, read eight times as often, is taken off,
and the rest divided by the other seven eighths: what a process takes whatever the data (Python's table of interned
strings grows by 20 to 40 MB in one that makes a million paths) is not the data's. The peer hands the same object to
two processes of torch's `spawn`.

A sample is one reading after the other of several processes. It counts only if none of them came or went meanwhile,
since what they shared would then be counted twice, or not at all.

    python benchmarks/memory.py [--megabytes 512] [--repeats 3] [--machine NAME]
"""
import ctypes, gc, os, threading, time, tracemalloc
from pathlib import Path
import numpy as np, pandas as pd, psutil, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastddp.process import helper
from fastddp.all import *
from common import argument_parser, save, sgd, show, summary, take_turns


def texts(nbytes):
    "Strings of about 100 bytes each"
    return [f'folder/of/some/data/set/number_{i:09d}.jpg' for i in range(nbytes//100)]


def zipped(nbytes):
    "Pairs of a row of 784 numbers and a label"
    n = nbytes//(784*4+8)
    return list(zip(torch.ones(n, 784), torch.zeros(n, dtype=torch.long)))


KINDS = {   # what the data set holds -> its maker, by bytes
    'tensor': lambda n: torch.ones(n//4),
    'numpy array': lambda n: np.ones(n//4, np.float32),
    'pandas frame': lambda n: pd.DataFrame({k: np.arange(n//32, dtype=np.float64) for k in 'abcd'}),
    'list of strings': texts,
    'list of paths': lambda n: [Path(o) for o in texts(n//3)],
    'zip of tensors': zipped}


def made(make, nbytes):
    "`(data, bytes that it takes)`; of a list, with all that only its items hold; of tensors, their numbers"
    if make is zipped:
        data = make(nbytes)
        return data, sum(t.nbytes for pair in data for t in pair)
    if isinstance(make(4000), list):
        tracemalloc.start()
        part = make(1<<20)      # before the rest is there: equal names of folders and files exist only once
        each = tracemalloc.get_traced_memory()[0]/len(part)
        tracemalloc.stop()
        del part
    data = make(nbytes)
    if isinstance(data, list): return data, int(each*len(data))
    return data, data.memory_usage(index=True).sum() if isinstance(data, pd.DataFrame) else data.nbytes


class Items:
    "A data set of a few items that reads all of the data, in each process so many `times`"
    def __init__(self, data, times): self.data, self.times = data, times
    def __len__(self): return 64
    def __getitem__(self, i):
        touch(self.data, self.times)
        self.times = 0
        return torch.ones(4), torch.tensor(0)


def touch(data, times):
    for _ in range(times):
        if isinstance(data, list) and isinstance(data[0], tuple): sum(float(x[0]) for x, y in data)
        elif isinstance(data, list): sum(len(o) if isinstance(o, str) else len(o.name) for o in data)
        else: float(np.asarray(data).sum())


def anonymous(proc):
    "The proportional share of `proc` in anonymous memory; None once it is gone"
    try:
        with open(f'/proc/{proc.pid}/smaps_rollup') as f:
            return next(int(o.split()[1])<<10 for o in f if o.startswith('Pss_Anon'))
    except (OSError, StopIteration): return None


def shared():
    "Bytes in this process's anonymous memory files; one may have several descriptors"
    sizes = {}
    for fd in os.listdir('/proc/self/fd'):
        try:
            about = os.stat(f'/proc/self/fd/{fd}')
            if os.readlink(f'/proc/self/fd/{fd}').startswith('/memfd:'): sizes[about.st_ino] = about.st_blocks*512
        except OSError: pass
    return sum(sizes.values())


def resident(proc):
    "Has `proc` any memory? One that is ending has none, long before it is gone"
    try:
        with open(f'/proc/{proc.pid}/statm') as f: return int(f.read().split()[1]) > 0
    except OSError: return False


def in_use(me):
    "What this process, its children and their shared memory take; None if one came or went meanwhile"
    procs = [me, *me.children(recursive=True)]
    parts = [anonymous(o) for o in procs]
    same = procs == [me, *me.children(recursive=True)] and all(map(resident, procs))
    return shared()+sum(parts) if same and None not in parts else None


def at_rest(me):
    "What this process itself takes when all that can be given back is"
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous(me)


class Peak:
    "The most that `in_use` says meanwhile, beyond what this process had before"
    def __enter__(self):
        self.seen, self.over, self.me = [], False, psutil.Process()
        self.before = at_rest(self.me)
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self
    def _watch(self):
        while not self.over:
            if (n := in_use(self.me)) is not None: self.seen.append(n-self.before)
            time.sleep(.02)
    def __exit__(self, *_):
        self.over = True
        self.thread.join()
        self.most = max(self.seen)


class Linger(Callback):
    "Long enough to be measured"
    order = 80
    def after_epoch(self): time.sleep(1)


def ours(make, nbytes, nprocs, times=1):
    "`(peak, bytes of the data)`"
    data, n = made(make, nbytes)
    dl = torch.utils.data.DataLoader(Items(data, times), batch_size=8)
    learn = Learner(DataLoaders(dl, dl), torch.nn.Linear(4, 2), loss_func=torch.nn.CrossEntropyLoss(), opt_func=sgd,
                    lr=.01, cbs=Linger())
    with learn.no_bar(), learn.no_logging(), Peak() as peak: learn.distrib_fit(1, nprocs=nprocs)
    return peak.most, n


def _peer(rank, data, times):
    touch(data, times)
    time.sleep(1)


def spawned(make, nbytes, nprocs, times=1):
    data, n = made(make, nbytes)
    with Peak() as peak: torch.multiprocessing.spawn(_peer, (data, times), nprocs=nprocs)
    return peak.most, n


def multiple(how, make, nbytes, nprocs):
    "What each byte more costs: an eighth of the data, read eight times, against all of it"
    (small, s), (large, l) = (how(make, nbytes//k, nprocs, k) for k in (8, 1))
    return (large-small)/(l-s)


def main():
    p = argument_parser(__doc__, repeats=3)
    p.add_argument('--megabytes', type=int, default=512)
    args = p.parse_args()
    n = 32<<20 if args.small else args.megabytes<<20
    helper.warm()
    ours(KINDS['tensor'], 4000, 2)
    cases = {f'{kind}, {nprocs} workers': (lambda make=make, nprocs=nprocs: multiple(ours, make, n, nprocs))
             for kind, make in KINDS.items() for nprocs in (2, 4)}
    cases |= {f'torch spawn: {kind}, 2 processes': (lambda make=KINDS[kind]: multiple(spawned, make, n, 2))
              for kind in ('numpy array', 'list of strings')}
    if args.small: cases = {k: v for k, v in cases.items() if '4 workers' not in k}
    times = take_turns(cases, args.repeats, unit='S')
    rows = summary(times, 'torch spawn: numpy array, 2 processes')
    show(f'Memory beyond the notebook\'s own copy, in multiples of the data ({n>>20} MiB)', rows)
    if not args.small: save('memory', args.machine, unit='multiples of the data', rows=rows, times=times)


if __name__ == '__main__': main()
