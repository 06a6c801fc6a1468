"Loaders, batches and metrics"
from functools import partial
import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.rnn import ModelResetter
from fastai.callback.training import GradientAccumulation
from fastai.data.block import CategoryBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, Metric
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_config, tabular_learner
from torch import distributed as dist, nn
from torch.utils.data import DataLoader as TorchLoader, default_collate
from cases import add, case, holds
from cases.losses import boxes, collate, detect_mean
from parity import items, learner, values

only_global = dict(batch=('global',))


def over(train, valid=None):
    learn = learner()
    learn.dls = DataLoaders(train, valid or learn.dls.valid)
    return learn


# Batches of a batch sampler

class Balanced:
    "Batches of different sizes, in an order of its own"
    def __init__(self, n): self.n, self.epoch = n, 0
    def __len__(self): return len(range(0, self.n, 7))
    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (order[i:i+(7 if i % 2 else 5)] for i in range(0, self.n, 7))


class AtOnce(Balanced):
    "Draws when it is begun, and from the global stream: torch begins it before it draws the seed of its processes"
    def __iter__(self):
        order = torch.randperm(self.n).tolist()
        return iter([order[i:i+7] for i in range(0, self.n, 7)])


def sampled(sampler, num_workers):
    return over(TorchLoader(items(31), batch_sampler=sampler(31), num_workers=num_workers),
                TorchLoader(items(9), batch_sampler=[[0, 1, 2], [3, 4, 5, 6], [7, 8]]))


holds('Batches', "A torch `batch_sampler` of your own: with `batch='global'` each of its batches is divided, else N "
      "of them are one step")
add('batch_sampler', partial(sampled, Balanced, 0), **only_global)
add('batch_sampler_that_draws', partial(sampled, AtOnce, 2), **only_global, ranks=(2,))


# Loaders that read by themselves

class Rows:
    def __init__(self, n): self.x, self.y = map(torch.stack, zip(*items(n)))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]


class ReadsSlices(DataLoader):
    def create_item(self, i): return i
    def create_batch(self, b): return tuple(t[b[0]:b[0]+self.bs] for t in (self.dataset.x, self.dataset.y))


class ReadsAll(ReadsSlices):
    def create_batch(self, b): return self.dataset.x[b], self.dataset.y[b]


holds('Batches', "A loader whose `create_batch` is your own or a library's may read a slice: workers get whole "
      "batches")
for kind in ReadsSlices, ReadsAll:
    add(kind.__name__, lambda kind=kind: over(kind(Rows(37), bs=4), kind(Rows(21), bs=4)))


# A `collate_fn` that leaves items out, as people do with those that can't be read

class SomeUnreadable:
    def __init__(self, n): self.items = items(n)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return None if i % 5 == 1 else self.items[i]


def collate_readable(batch): return default_collate([o for o in batch if o is not None])


holds('Batches', "A torch `collate_fn` that leaves items out: means are over the items that are left on all workers")
add('readable', lambda: over(*(TorchLoader(SomeUnreadable(n), batch_size=8, shuffle=n == 37,
                                           collate_fn=collate_readable) for n in (37, 21))), **only_global, ranks=(2,))


# Tables

def table(bs, bn=False):
    "A tabular learner over 41 rows of two numbers and a category"
    x = np.random.randn(41, 2).astype('float32')
    df = pd.DataFrame(dict(a=x[:, 0], b=x[:, 1], c=np.arange(41) % 3, y=x.sum(1) > 0))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a', 'b'],
                                     y_names='y', y_block=CategoryBlock(), valid_idx=list(range(30, 41)), bs=bs)
    learn = tabular_learner(dls, layers=[5], n_out=2, loss_func=CrossEntropyLossFlat(),
                            config=tabular_config(use_bn=bn, bn_cont=bn), metrics=accuracy, lr=.01)
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn


holds('Batches', "Tables, for 1 to 15 rows per worker (without batch norm)")
for bs in 1, 2, 3, 7, 14, 15:
    add(f'table_{bs}', partial(table, bs), batch=('per_worker',), ranks=(2,), run=lambda learn, call: call('fit', 1))


# Models that keep state from batch to batch

class Keeps(nn.Module):
    "Each row of a batch goes on where the same row of the last one ended"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 3), nn.Linear(3, 3), 0
    def reset(self): self.h = 0
    def forward(self, x):
        h = self.h if torch.is_tensor(self.h) else x.new_zeros(len(x), 3)
        out = self.a(x)+self.b(h)
        self.h = out.tanh().detach()
        return out


def streams():
    "Rows laid out for batches of 4, one below the other"
    learn = learner(train=48, valid=24, model=Keeps(), cbs=ModelResetter())
    learn.dls = DataLoaders(*(DataLoader(dl.dataset, bs=4, drop_last=True) for dl in learn.dls.loaders))
    return learn


add('streams', streams, **only_global, ranks=(2,))


# A callback changes the loader

class Grows(Callback):
    "Twice the batch in each epoch"
    def after_epoch(self): self.dls.train.bs *= 2


def grown(learn, one): assert learn.dls.train.bs in (32, 64)


holds('Batches', "A callback that changes `dls.train.bs` (there it is the batch of all workers): from the next "
      "epoch on, and back in the notebook")
@case(run=lambda learn, call: call('fit', 3), check=grown)
def batch_that_grows(): return dict(cbs=Grows())


# Graphs: batches that can't be cut

class Graphs:
    "Tensors with a row for each node; `of` says to which graph it belongs"
    def __init__(self, sizes, g):
        self.x = torch.randn(sum(sizes), 4, generator=g)
        self.of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


class GraphLoader:
    "Batches of `sizes` graphs each. Every `joined` of them make one, as in one process"
    dataset = range(1)
    def __init__(self, sizes, joined=1): self.sizes, self.joined = sizes, joined
    def __len__(self): return -(-len(self.sizes)//self.joined)
    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        made = [(Graphs([2+i % 3 for i in range(n)], g), torch.randn(n, 1, generator=g)) for n in self.sizes]
        for i in range(0, len(made), self.joined): yield self.join(made[i:i+self.joined])
    def join(self, batches):
        res = batches[0][0]
        for b, _ in batches[1:]:
            res.of = torch.cat([res.of, b.of+res.of.max()+1])
            res.x = torch.cat([res.x, b.x])
        return res, torch.cat([y for _, y in batches])


class Pool(nn.Module):
    "A number for each graph"
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def forward(self, b): return torch.zeros(int(b.of.max())+1, 1).index_add(0, b.of, self.net(b.x))


class TwoViews(Callback):
    "Each graph twice"
    order = 60
    def before_batch(self):
        b = self.x
        twice = Graphs.__new__(Graphs)
        twice.x, twice.of = torch.cat([b.x, b.x*.5]), torch.cat([b.of, b.of+b.of.max()+1])
        self.learn.xb, self.learn.yb = (twice,), (torch.cat([self.y, self.y]),)


def graphs(sizes, loss, cbs, scale):
    dls = DataLoaders(GraphLoader(sizes, scale), GraphLoader([2, 2]))
    learn = Learner(dls, Pool(), loss_func=loss, opt_func=SGD, lr=.02, cbs=cbs())
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn


def root(pred, y): return nn.functional.mse_loss(pred, y).sqrt()


holds('Batches', "Batches that can't be cut, such as those of graphs: known losses, losses over all predictions, "
      "`GradientAccumulation`, with several rows for each item")
for name, loss, cbs in [('graphs', nn.MSELoss(), list), ('graphs_by_a_root', root, list),
                        ('graphs_accumulating', nn.MSELoss(), lambda: GradientAccumulation(12)),
                        ('graphs_twice', nn.MSELoss(), lambda: [GradientAccumulation(16), TwoViews()])]:
    for sizes in [8, 8, 4, 8], [8, 1, 8, 1], [1, 8, 8]:
        add(f'{name} {sizes}', partial(graphs, sizes, loss, cbs), loss=None, scaled=True, ranks=(2,))


# Metrics

class Reduces(Metric):
    "Counts, and adds up over the process group by itself, if there is one, as torchmetrics does"
    def reset(self): self.n = torch.zeros(())
    def accumulate(self, learn): self.n += len(learn.y)
    @property
    def value(self):
        n = self.n.clone()
        if dist.is_initialized(): dist.all_reduce(n)
        return n


class MergesAndReduces(Reduces):
    def merge(self, states): self.n = sum(s['n'] for s in states)


def measured(metric, train_metrics):
    learn = learner(train=22, metrics=metric())
    learn.recorder.train_metrics = train_metrics
    return learn


def counted(learn, one): assert [row[-1] for row in values(learn)] == [21.]*2


holds('Losses', "A metric of a library that reduces its value over the process group by itself counts each item "
      "once")
add('metric_reduces', partial(measured, Reduces, False), ranks=(2,), check=counted)
add('metric_merges_and_reduces', partial(measured, MergesAndReduces, False), ranks=(2,), check=counted)
add('metric_of_training_reduces', partial(measured, MergesAndReduces, True), ranks=(2,), check=counted)


class Boxes(Metric):
    "Of predictions and lists of targets"
    def reset(self): self.boxes = self.items = 0
    def accumulate(self, learn):
        self.items += len(learn.yb[0])
        self.boxes += sum(len(o['boxes']) for o in learn.yb[0])
    @property
    def value(self): return self.items*1000+self.boxes


def all_boxes(learn, one): assert values(learn)[0][-1] == 21000+sum(1+i % 3 for i in range(21))


@case(loss='whole', tol=2e-5, check=all_boxes)
def metric_of_lists(): return dict(data=boxes, loss_func=detect_mean, metrics=Boxes(), collate=collate)
