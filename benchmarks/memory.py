"""What a data set of S bytes costs while N workers train on it, beyond the notebook's own copy, in multiples of S.

Every rank reads all of the data. Counted are the anonymous pages of the notebook and of all that it started (one that several share is
counted once) and shared memory that is allocated, at their most during the fit; what the same fit costs on next to no data is taken off. The peer hands
the same object to two processes of torch's `spawn`.

    python benchmarks/memory.py [--megabytes 512] [--repeats 3] [--machine NAME]
"""
import os, subprocess, sys, threading, time
from pathlib import Path
import numpy as np, pandas as pd, psutil, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastddp import workers
from fastddp.all import *
from common import argument_parser, save, sgd, show, summary, take_turns


def texts(nbytes): return [f'folder/of/some/data/set/number_{i:09d}.jpg' for i in range(nbytes//100)]    # about 100 bytes each


KINDS = {   # what the data set holds -> its maker, by bytes
    'tensor': lambda n: torch.ones(n//4),
    'numpy array': lambda n: np.ones(n//4, np.float32),
    'pandas frame': lambda n: pd.DataFrame({k: np.arange(n//32, dtype=np.float64) for k in 'abcd'}),
    'list of strings': texts,
    'list of paths': lambda n: [Path(o) for o in texts(n//4)]}


def size(data):
    "Bytes that `data` takes in this process"
    if isinstance(data, list): return sum(sys.getsizeof(o) for o in data[:100])*len(data)//100 + sys.getsizeof(data)
    return data.memory_usage(index=True).sum() if isinstance(data, pd.DataFrame) else data.nbytes


class Items:
    "A data set of a few items that looks at all of the data"
    def __init__(self, data): self.data = data
    def __len__(self): return 64
    def __getitem__(self, i):
        if i < 4: touch(self.data)      # a few times on each rank
        return torch.ones(4), torch.tensor(0)


def touch(data):
    if isinstance(data, list): return sum(len(o) if isinstance(o, str) else len(o.name) for o in data)   # or what stands for one
    return float(np.asarray(data).sum())


def anonymous(proc):
    "The proportional share of `proc` in anonymous memory"
    try:
        with open(f'/proc/{proc.pid}/smaps_rollup') as f: return next(int(o.split()[1])<<10 for o in f if o.startswith('Pss_Anon'))
    except (OSError, StopIteration): return 0


def shared():
    "Bytes in this process's anonymous memory files"
    total = 0
    for fd in os.listdir('/proc/self/fd'):
        try:
            if os.readlink(f'/proc/self/fd/{fd}').startswith('/memfd:'): total += os.stat(f'/proc/self/fd/{fd}').st_blocks*512
        except OSError: pass
    return total


class Peak:
    "The most memory that this process, its children and their shared memory take meanwhile"
    def __enter__(self):
        self.most, self.over, self.me = 0, False, psutil.Process()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self
    def _watch(self):
        while not self.over:
            self.most = max(self.most, shared()+sum(map(anonymous, [self.me, *self.me.children(recursive=True)])))
            time.sleep(.05)
    def __exit__(self, *_):
        self.over = True
        self.thread.join()


class Linger(Callback):
    "Long enough to be measured"
    order = 80
    def after_epoch(self): time.sleep(.3)


def ours(make, nbytes, nprocs):
    "`(peak, bytes of the data)`"
    data = make(nbytes)
    dl = torch.utils.data.DataLoader(Items(data), batch_size=8)
    learn = Learner(DataLoaders(dl, dl), torch.nn.Linear(4, 2), loss_func=torch.nn.CrossEntropyLoss(), opt_func=sgd, lr=.01, cbs=Linger())
    with learn.no_bar(), learn.no_logging(), Peak() as peak: learn.distrib_fit(1, nprocs=nprocs)
    return peak.most-anonymous(peak.me), size(data)


def _peer(rank, data):
    touch(data)
    time.sleep(.5)


def spawned(make, nbytes, nprocs):
    data = make(nbytes)
    with Peak() as peak: torch.multiprocessing.spawn(_peer, (data,), nprocs=nprocs)
    return peak.most-anonymous(peak.me), size(data)


def multiple(how, make, nbytes, nprocs):
    small, _ = how(make, 4000, nprocs)
    large, s = how(make, nbytes, nprocs)
    return (large-small)/s


def main():
    p = argument_parser(__doc__, repeats=3)
    p.add_argument('--megabytes', type=int, default=512)
    args = p.parse_args()
    n = 32<<20 if args.small else args.megabytes<<20
    workers.warm()
    ours(KINDS['tensor'], 4000, 2)
    cases = {f'{kind}, {nprocs} workers': (lambda make=make, nprocs=nprocs: multiple(ours, make, n, nprocs))
             for kind, make in KINDS.items() for nprocs in (2, 4)}
    cases |= {f'torch spawn: {kind}, 2 processes': (lambda make=KINDS[kind]: multiple(spawned, make, n, 2)) for kind in ('numpy array', 'list of strings')}
    if args.small: cases = {k: v for k, v in cases.items() if '4 workers' not in k}
    times = take_turns(cases, args.repeats, unit='S')
    rows = summary(times, 'torch spawn: numpy array, 2 processes')
    show(f'Memory beyond the notebook\'s own copy, in multiples of the data ({n>>20} MiB)', rows)
    if not args.small: save('memory', args.machine, unit='multiples of the data', rows=rows, times=times)


if __name__ == '__main__': main()
