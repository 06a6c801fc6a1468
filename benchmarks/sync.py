"""How long data takes to the workers and weights take back, in copies of as much memory.

`ship`: a data set of that size, from the pickling to the moment that rank 0 has loaded it (a first fit, whose
shared memory is new, and a second one in the same block). `back`: weights of that size (frozen ones, so that no
gradients are measured), from the end of training until they are in the notebook's parameters; the training takes a
second, in which memory for them is found. `epoch`: what the copy that is kept at the end of an epoch adds to it.
Peer: the same bytes through a pipe of `multiprocessing`, pickled. One copy is numpy's into memory that is there
already. Into shared memory that the system must find first, as a first fit's is, it takes several times as long,
which is the least there can be.

    python benchmarks/sync.py [--megabytes 1024] [--repeats 5] [--machine NAME]
"""
import multiprocessing, os, time
import numpy as np, torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastddp.process import helper
from fastddp.all import *
from common import argument_parser, save, seed_all, sgd, show, summary, take_turns


class Items:
    "64 of them, that hold `data`; each takes `pause` seconds to load"
    def __init__(self, data, pause): self.data, self.pause = data, pause
    def __len__(self): return 64
    def __getitem__(self, i):
        if self.pause: time.sleep(self.pause)
        return torch.ones(4), torch.tensor(0)


class Loaded(torch.nn.Module):
    "A small model that carries `n` frozen weights along"
    def __init__(self, n):
        super().__init__()
        self.small, self.big = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.ones(n), requires_grad=False)
    def forward(self, x): return self.small(x)


def learner(data=0, weights=0, seconds=0):
    seed_all()
    data = torch.ones(data//4)
    dls = [torch.utils.data.DataLoader(Items(data, o), batch_size=8) for o in (seconds/32, 0)]     # 32 items a rank
    return Learner(DataLoaders(*dls), Loaded(weights//4), loss_func=torch.nn.CrossEntropyLoss(), opt_func=sgd, lr=.01)


def copy(n):
    a, b = np.full(n, 1, np.uint8), np.full(n, 2, np.uint8)
    at = time.perf_counter()
    np.copyto(b, a)
    return time.perf_counter()-at


def copy_anew(n):
    "Into a file in memory, as quickly as the system takes it from one writer"
    data, fd = memoryview(np.full(1<<24, 1, np.uint8)), os.memfd_create('copy')
    at = time.perf_counter()
    for done in range(0, n, 1<<24): os.pwrite(fd, data, done)
    secs = time.perf_counter()-at
    os.close(fd)
    return secs


def phases(learn, fits=1, epochs=1):
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        for _ in range(fits): learn.fit(epochs)
    return learn.distrib_report.phases


def ship(n, fits):
    p = phases(learner(data=n), fits)
    return p['snapshot']+p['ship']+p['load']


def back(n, fits): return phases(learner(weights=n, seconds=1), fits)['back']


def epoch(n):
    "Seconds of an epoch, of four; the second fit in a block, so that the shared memory is there"
    return phases(learner(weights=n), fits=2, epochs=4)['train']/4


def _send(conn, n): conn.send(np.ones(n, np.uint8))


def pipe(n):
    ours, theirs = multiprocessing.get_context('fork').Pipe()
    p = multiprocessing.get_context('fork').Process(target=_send, args=(theirs, n))
    at = time.perf_counter()
    p.start()
    ours.recv()
    secs = time.perf_counter()-at
    p.join()
    return secs


def main():
    p = argument_parser(__doc__)
    p.add_argument('--megabytes', type=int, default=1024)
    args = p.parse_args()
    n = 32<<20 if args.small else args.megabytes<<20
    helper.warm()
    phases(learner())
    cases = {'one copy': lambda: copy(n), 'one copy into new shared memory': lambda: copy_anew(n),
             'ship, first fit': lambda: ship(n, 1), 'ship, second fit': lambda: ship(n, 2),
             'back, first fit': lambda: back(n, 1), 'back, second fit': lambda: back(n, 2),
             'epoch': lambda: epoch(n), 'epoch without the weights': lambda: epoch(0),
             'pickled through a pipe': lambda: pipe(n)}
    times = take_turns(cases, args.repeats)
    rows = summary(times, 'one copy')
    show(f'Seconds for {n>>20} MiB, 2 CPU workers; ratio: in copies', rows)
    if not args.small: save('sync', args.machine, unit='seconds', bytes=n, rows=rows, times=times)


if __name__ == '__main__': main()
