"""What does a call on the workers cost beyond its training, for data of many small pieces?

Each shape of data goes through the same five calls, turn by turn: an epoch in this process; a first fit with the
helper process ready, and a second one in the same block, each less what rank 0's own fit took; `get_preds` in this
process, and on the workers in that block. The ratio of epochs is that of four epochs each: rank 0's
own part of a third fit in the block, to a fit in this process.

    python benchmarks/shapes.py [--repeats 3] [--machine NAME] [--shapes 'zip of tensors,images in memory']
"""
import statistics, time
from pathlib import Path
import numpy as np, pandas as pd, torch
from fastai.data.core import DataLoaders, Datasets
from fastai.learner import Learner
from fastai.tabular.all import CategoryBlock, Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastddp.process import helper
from fastddp.all import *
from PIL import Image
from torch import nn
from common import arguments, save, seed_all, sgd, show
from launch import Clock


class Read:
    "A data set that makes pairs of the items of a list"
    def __init__(self, items, read): self.items, self.read = items, read
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.read(self.items[i])


def learner(items, read=None, n_in=16):
    sets = [Read(o, read) if read else o for o in (items[256:], items[:256])]
    dls = DataLoaders.from_dsets(*sets, bs=256, device='cpu', num_workers=0)
    return Learner(dls, nn.Linear(n_in, 2), loss_func=nn.CrossEntropyLoss(), opt_func=sgd, lr=.01, cbs=Clock())


def zipped(n):
    x, y = torch.rand(n, 784), torch.randint(2, (n,))
    return learner(list(zip(x, y)), n_in=784)


def table(n):
    rng = np.random.default_rng(0)
    words, names = [f'value {i}' for i in range(50)], [[f'{k}{i}' for i in range(m)] for k, m in (('c', 4), ('n', 6))]
    df = pd.DataFrame({k: rng.choice(words, n) for k in names[0]} | {k: rng.random(n) for k in names[1]})
    df['y'] = np.where(df.n0+df.n1 > 1, 'yes', 'no')
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=names[0], cont_names=names[1],
                                     y_names='y', y_block=CategoryBlock(), bs=1024, device='cpu')
    return tabular_learner(dls, layers=[50], cbs=Clock())


def file(i): return Path(f'/data/images/class{i%10}/{i:06}.jpg')
def of_name(o): return torch.full((16,), len(o.name)/10), torch.tensor(len(o.parent.name)%2)


def labelled(n):
    return learner([(file(i), f'{i%2}') for i in range(n)], lambda o: (of_name(o[0])[0], torch.tensor(int(o[1]))))


def files(n):
    dsets = Datasets([file(i) for i in range(n)], [[lambda o: of_name(o)[0]], [lambda o: of_name(o)[1]]],
                     splits=[list(range(256, n)), list(range(256))])
    dls = dsets.dataloaders(bs=256, device='cpu', num_workers=0)
    return Learner(dls, nn.Linear(16, 2), loss_func=nn.CrossEntropyLoss(), opt_func=sgd, lr=.01, cbs=Clock())


def texts(n, kind=torch.tensor):
    rng = np.random.default_rng(0)
    items = [kind(rng.integers(1000, size=rng.integers(50, 300)).tolist()) for _ in range(n)]
    return learner(items, lambda o: (torch.as_tensor(o[:16])/1000, torch.tensor(len(o)%2)))


def images(n):
    rng = np.random.default_rng(0)
    items = [Image.fromarray(rng.integers(256, size=(128, 128, 3), dtype=np.uint8)) for _ in range(n)]
    return learner(items, lambda o: (torch.tensor(np.array(o)[0, :16, 0])/255, torch.tensor(o.size[0]%2)))


SHAPES = {  # -> `(maker, items, budget of a first fit)`
    'zip of tensors': (zipped, 12_396, .3), 'longer zip of tensors': (zipped, 60_000, .5),
    'table with strings': (table, 100_000, .3), 'paths and labels': (labelled, 50_000, .3),
    'Datasets over files': (files, 50_000, .3), 'texts as tensors': (texts, 20_000, .3),
    'texts as lists': (lambda n: texts(n, list), 20_000, .3), 'images in memory': (images, 2_000, .3)}
CALLS = ('local epoch', 'first fit beyond training', 'again in a block, beyond training', 'local get_preds',
         'get_preds on the workers')
RATIO = 'epoch on the workers / epoch in one process'


def seconds(f):
    at = time.perf_counter()
    f()
    return time.perf_counter()-at


def beyond_training(learn, fit): return seconds(fit)-(learn.clock.ended-learn.clock.began)


def training(learn, n=4):
    "Seconds of the training itself of a fit of `n` epochs, in this process or on the workers"
    learn.fit(n)
    return learn.clock.ended-learn.clock.began


def turn(learn):
    "Seconds of each of `CALLS`, and the ratio of epochs"
    local = seconds(lambda: learn.fit(1))
    here = training(learn)
    with learn.distrib_ctx(nprocs=2):
        fits = [beyond_training(learn, lambda: learn.fit(1)) for _ in range(2)]
        ratio = training(learn)/here
        away = seconds(learn.get_preds)
    return [local, *fits, seconds(learn.get_preds), away, ratio]


def row(name, n, budget, turns):
    med = [round(statistics.median(o), 3) for o in zip(*turns)]
    return dict(case=name, items=n, **dict(zip((*CALLS, RATIO), med)), budget=f'{budget} and 0.05')


def main():
    args = arguments(__doc__, repeats=3, shapes=','.join(SHAPES))
    seed_all()
    helper.warm()
    rows, times = [], {}
    for name in args.shapes.split(','):
        make, n, budget = SHAPES[name]
        n = max(n//10, 1200) if args.small else n
        learn = make(n)
        with learn.no_bar(), learn.no_logging(): times[name] = [turn(learn) for _ in range(args.repeats)]
        rows.append(row(name, n, budget, times[name]))
    show('Seconds on 2 CPU workers; the budget is for the first fit, and again', rows)
    if not args.small: save('shapes', args.machine, unit='seconds', rows=rows, times=times)


if __name__ == '__main__': main()
