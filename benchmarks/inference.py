"""Prediction and validation on 2 ranks of one thread each, over one process with one thread.

In a block, so that neither starts anything; each case is the second call.

    python benchmarks/inference.py [--repeats 5] [--machine NAME]
"""
import statistics, time
import torch
from fastddp import workers
from fastddp.all import *
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from common import arguments, convnet, data, save, seed_all, show, summary, take_turns

CALLS = {'get_preds': lambda learn: learn.get_preds(ds_idx=0), 'validate': lambda learn: learn.validate(ds_idx=0)}


def make(small):
    seed_all()
    ds = torch.utils.data.TensorDataset(*data((3, 32, 32), 256 if small else 16384))
    return Learner(DataLoaders.from_dsets(ds, ds, bs=64, device='cpu'), convnet(), loss_func=torch.nn.CrossEntropyLoss())


def second(learn, call):
    with learn.no_bar(), learn.no_logging():
        call(learn)
        at = time.perf_counter()
        call(learn)
    return time.perf_counter()-at


def alone(call, small):
    torch.set_num_threads(1)
    return second(make(small), call)


def shared(call, small):
    learn = make(small)
    with learn.distrib_ctx(nprocs=2, launcher=Local(gpus=[], threads=1)): return second(learn, call)


def main():
    args = arguments(__doc__)
    workers.warm()
    cases = {f'{name}, {n} rank{"s"*(n > 1)}': (lambda how=how, call=call: how(call, args.small)) for name, call in CALLS.items() for n, how in ((1, alone), (2, shared))}
    times = take_turns(cases, args.repeats)
    rows = summary(times, 'get_preds, 1 rank')
    med = {k: statistics.median(v) for k, v in times.items()}
    ratios = {f'speed-up of {name}': round(med[f'{name}, 1 rank']/med[f'{name}, 2 ranks'], 2) for name in CALLS}
    show('Seconds, one thread per rank', rows)
    print(ratios)
    if not args.small: save('inference', args.machine, unit='seconds', rows=rows, ratios=ratios, times=times)


if __name__ == '__main__': main()
