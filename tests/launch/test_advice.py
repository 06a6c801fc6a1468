"""Eleven troubles on two workers: the first sentence of the report names the cause. Three fits without one get none.

Computing is made of sleeping, so that other programs on the machine change little."""
import os, random, time
import pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from torch import nn
from fastddp.all import *

pytestmark = pytest.mark.full


class Points:
    def __init__(self, n, secs=0., slow=(), start=0., longest=1):
        self.n, self.secs, self.slow, self.start, self.longest = n, secs, slow, start, longest
    def __len__(self): return self.n
    def __getitem__(self, i):
        if secs := dict(self.slow).get(i, self.secs): time.sleep(secs)
        return torch.full((4*(self.longest if random.Random(i).random() < .06 else 1),), i/self.n), torch.tensor(i%3)
    def __getstate__(self):
        time.sleep(self.start)
        return vars(self)


def padded(items):
    "Items of a batch with zeros behind the shorter ones"
    longest = max(len(x) for x, _ in items)
    return [(nn.functional.pad(x, (0, longest-len(x))), y) for x, y in items]


class Model(nn.Module):
    "Each forward pass takes `secs`, on rank 1 `rank1` more, and `of_items` for an unlucky batch"
    def __init__(self, secs=.02, rank1=0., of_items=0., hidden=8):
        super().__init__()
        self.secs, self.rank1, self.of_items = secs, rank1, of_items
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Linear(hidden, 3))
    def forward(self, x):
        rank = int(os.environ.get('RANK', 0))
        time.sleep(self.secs+self.rank1*rank+self.of_items*random.Random(float(x.sum())).random())
        return self.layers(x)


class Reads(Model):
    "Longer items take longer"
    def forward(self, x):
        time.sleep(.02*x.shape[1]/4)
        return self.layers(x[:, :4])


class SavesEachStep(Callback):
    rank0_only = True
    def after_step(self): time.sleep(.04)


def slow_metric(preds, targs):
    time.sleep(.1)
    return preds.mean()


def learner(model=None, train=320, valid=16, bs=8, secs=0., slow=(), start=0., num_workers=0, longest=1, **kwargs):
    points = Points(train, secs, slow, start, longest)
    dls = DataLoaders(DataLoader(points, bs=bs, num_workers=num_workers, before_batch=padded),
                      DataLoader(Points(valid), bs=bs))
    return Learner(dls, model or Model(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, **kwargs)


TROUBLES = {
    'slow transform': (dict(secs=.01), 'data', 'raise num_workers'),
    'slow transform, too few cores': (dict(secs=.02, num_workers=16), 'data', 'no core is free'),
    'tiny model': (dict(model=Model(0.), train=12000, bs=4), 'small', 'larger batch, or one worker'),
    'huge layer': (dict(model=Model(0., hidden=2500), train=640, bs=4), 'exchange', 'larger batch, accumulate'),
    'competing program': (dict(model=Model(rank1=.05)), 'rank', 'for worker 1'),
    'uneven texts': (dict(model=Reads(), train=640, longest=8), 'turns', 'SortedDL'),
    'busy cores': (dict(model=Model(of_items=.2), train=640), 'turns', 'other programs on the cores'),
    'slow metric': (dict(metrics=slow_metric, valid=200), 'metrics', 'slow_metric'),
    'callback in each step': (dict(cbs=SavesEachStep()), 'callbacks', 'into SavesEachStep'),
    'long validation': (dict(valid=4000), 'validation', 'larger batches'),
    'start': (dict(start=4., train=64), 'start', 'of the time is the start')}


@pytest.fixture(scope='module', autouse=True)
def helper(): learner(train=32).distrib_fit(1, nprocs=2)     # it has imported torch and fastai


FACTS = {
    'slow item': (dict(slow=((75, 3.),)), 'longest wait for a batch 3.0 s: epoch 0, batch 4'),
    'huge layer': (dict(model=Model(0., hidden=2500), bs=4), '24 MB of them of layers.2.weight, the largest')}


@pytest.mark.parametrize('name', FACTS)
def test_the_page_has_the_fact(name):
    kwargs, words = FACTS[name]
    learn = learner(**kwargs)
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, nprocs=2)
    assert words in str(learn.distrib_report)


@pytest.mark.parametrize('name', TROUBLES)
def test_the_cause_is_named_first(name):
    kwargs, cause, words = TROUBLES[name]
    learn = learner(**kwargs)
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, nprocs=2, launcher=Local())
    # the start takes longer on a busy machine
    first = next(o for o in learn.distrib_report.advice if o.cause != 'start' or name == 'start')
    assert first.cause == cause and words in first.text, learn.distrib_report


INNOCENT = {
    'computes': dict(),
    'validates': dict(valid=160, metrics=lambda p, t: p.mean()),
    'loads a little': dict(secs=.0002, cbs=Callback())}


@pytest.mark.parametrize('name', INNOCENT)
def test_nothing_to_say(name):
    learn = learner(**INNOCENT[name])
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)        # the start of the workers
        learn.fit(2)
    assert learn.distrib_report.advice == [], learn.distrib_report
