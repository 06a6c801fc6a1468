"Does a loss function keep a state of its own? Many ways to write one, and functions that keep none"
import itertools

import pytest, torch
from fastcore.test import test_eq as equals
from torch import nn

from fastddp.fastai2.snapshot import state_of as Kept

n_calls,kept,ticks = 0,dict(n=0),itertools.count()
class Weights:
    def __init__(self): self.t = 0
    def next(self):
        self.t += 1
        return 1/self.t
of_module = Weights()
def counts(p, y):
    global n_calls
    n_calls += 1
    return p.mean()
def in_a_dict(p, y):
    kept['n'] += 1
    return p.mean()
def in_an_object(p, y): return p.mean()*of_module.next()
def ticking(p, y): return p.mean()+next(ticks)
def by_default(p, y, seen=[0]):
    seen[0] += 1
    return p.mean()
def closures():
    n,d,o,deep = 0,dict(n=0),Weights(),dict(a=[dict(b=Weights())])
    def nonlocal_(p, y):
        nonlocal n
        n += 1
        return p.mean()
    def dict_(p, y):
        d['n'] += 1
        return p.mean()
    def deep_(p, y): return p.mean()*deep['a'][0]['b'].next()
    return nonlocal_, dict_, deep_, lambda p, y: p.mean()*o.next()
class Plain:
    n = 0
    def __init__(self): self.seen = []
    def __call__(self, p, y):
        self.seen.append(p)
        return p.mean()
    def in_class(self, p, y):
        type(self).n += 1
        return p.mean()
class Ema(nn.Module):
    def __init__(self):
        super().__init__()
        self.ema,self.weights = dict(ce=1.),Weights()
        self.register_buffer('center', torch.zeros(2))
    def forward(self, p, y):
        self.ema['ce'] = .9*self.ema['ce']+.1*float(p.mean())
        return p.mean()/self.ema['ce']
class Replaces(Ema):
    def forward(self, p, y):
        self.center = self.center+1
        return p.mean()
class InPlace(Ema):
    def forward(self, p, y):
        self.center += 1
        return p.mean()
class Late:
    def __call__(self, p, y):
        self.n = getattr(self, 'n', 0)+1
        return p.mean()

p = torch.full((2,), 3.)


WITH = [counts, in_a_dict, in_an_object, ticking, by_default, *closures(), Plain(), Plain().in_class, Plain().__call__,
        Ema(), Replaces(), InPlace(), Late(), lambda p, y, f=Ema(): f(p, y)]


@pytest.mark.parametrize('f', WITH, ids=range(len(WITH)))
def test_a_state_is_seen_and_undone(f):
    state = Kept(f)
    assert not state.changed()
    first = f(p, p)
    assert state.changed()
    state.undo()
    if f is ticking: return     # an iterator can't go back
    assert not state.changed()
    equals(f(p, p), first)


class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        self.net,self.gamma = nn.Linear(2, 2).requires_grad_(False),2.
    def forward(self, p, y): return (self.net(p)-self.net(y)).pow(self.gamma).mean()
weight = torch.ones(2)
def weighted(p, y): return (p*weight).mean()


WITHOUT = [Perceptual(), weighted, nn.MSELoss(), nn.functional.mse_loss, lambda p, y: p.std()]


@pytest.mark.parametrize('f', WITHOUT, ids=range(len(WITHOUT)))
def test_what_keeps_none(f):
    state = Kept(f)
    f(p, p)
    assert not state.changed()
