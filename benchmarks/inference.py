"""Prediction and validation on 2 ranks of one thread each, over one process with one thread.

In a block, and after a first call on a small set, so that neither side starts anything. Both sides of a pair run
one right after the other, in turns first, on one learner: on a machine whose speed drifts a pair's ratio says more
than two medians. Items are loaded in the rank itself: a loader's own processes would give the one rank a second
core. What is fixed (the data in memory are shipped anew with each call) is shown by the phases of the last call.

    python benchmarks/inference.py [--repeats 5] [--machine NAME]
"""
import statistics, sys, time
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastddp.process import helper
from fastddp.all import *
from torch import nn
from common import arguments, data, save, seed_all, show, summary

CALLS = {'get_preds': lambda learn, i: learn.get_preds(ds_idx=i), 'validate': lambda learn, i: learn.validate(ds_idx=i)}
RANKS = '1 rank', '2 ranks'


def network(width=64):
    down = lambda ni, no, stride: [nn.Conv2d(ni, no, 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(*down(3, width, 1), *down(width, 2*width, 2), *down(2*width, 4*width, 2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4*width, 10))


def make(n):
    seed_all()
    big, few = (torch.utils.data.TensorDataset(*data((3, 32, 32), o)) for o in (n, 128))
    dls = DataLoaders.from_dsets(big, few, bs=64, device='cpu', num_workers=0)
    return Learner(dls, network(), loss_func=nn.CrossEntropyLoss())


def seconds(learn, call):
    at = time.perf_counter()
    call(learn, 0)
    return time.perf_counter()-at


def alone(learn, call):
    call(learn, 1)
    return seconds(learn, call)


def shared(learn, call):
    with learn.distrib_ctx(nprocs=2, launcher=Local(gpus=[], threads=1)):
        call(learn, 1)
        return seconds(learn, call)


def pairs(learn, repeats):
    "`case -> [seconds]`; the sides of each pair next to each other"
    times = {f'{name}, {n}': [] for name in CALLS for n in RANKS}
    sides = dict(zip(RANKS, (alone, shared)))
    for turn in range(repeats):
        for name, call in CALLS.items():
            for n in RANKS[::(-1)**turn]: times[f'{name}, {n}'].append(sides[n](learn, call))
            one, two = (times[f'{name}, {n}'][-1] for n in RANKS)
            print(f'  turn {turn+1}/{repeats}  {name}: {one:.3f} s on 1 rank, {two:.3f} s on 2: {one/two:.2f}',
                  file=sys.stderr, flush=True)
    return times


def speed_up(one, two):
    "By the median over pairs, and by the least times of both sides"
    return {'': round(statistics.median(a/b for a, b in zip(one, two)), 2),
            ' by least times': round(min(one)/min(two), 2)}


def main():
    args = arguments(__doc__)
    torch.set_num_threads(1)
    helper.warm()
    learn = make(256 if args.small else 6144)
    with learn.no_bar(), learn.no_logging(): times = pairs(learn, args.repeats)
    rows = summary(times, 'get_preds, 1 rank')
    ratios = {f'speed-up of {name}{how}': v
              for name in CALLS for how, v in speed_up(*(times[f'{name}, {n}'] for n in RANKS)).items()}
    show('Seconds, one thread per rank', rows)
    print(ratios)
    print(learn.distrib_report)
    if not args.small: save('inference', args.machine, unit='seconds', rows=rows, ratios=ratios, times=times)


if __name__ == '__main__': main()
