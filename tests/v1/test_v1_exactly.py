"""What a callback of fastai v1 holds comes back exactly, of any kind and size, in two fits of a block."""
import io
from collections import deque
import numpy as np, pandas as pd, torch
from learners_v1 import *


def table(): return pd.DataFrame(dict(a=[1, 2, 3], b=['x', 'y', 'z'], c=[[1], [2], [3]]))
def views():
    t = torch.arange(60.).view(20, 3)
    return [*t, *t[5:9], t]


# name -> what makes an object, what changes it in place
HELD = {
    'tensors': (lambda: [torch.zeros(3) for _ in range(1000)], lambda o: o[500].add_(1)),
    'tuples': (lambda: [(torch.zeros(3), 0) for _ in range(150)], lambda o: o[-1][0].add_(1)),
    'dicts': (lambda: [dict(n=0) for _ in range(2500)], lambda o: o[-2].update(n=o[-2]['n']+1)),
    'numbers': (lambda: [*range(10_001)], lambda o: o.__setitem__(7, -1)),
    'large': (lambda: np.zeros(2_500_000), lambda o: o.__setitem__(2_400_001, 1.)),
    'sum': (lambda: torch.tensor([1., 2., 1., 2.]), lambda o: o.copy_(o.flip(0))),
    'views': (views, lambda o: o[2].add_(1)),
    'stream': (lambda: io.BytesIO(bytes(17_000_000)), lambda o: (o.seek(16_500_000), o.write(b'x'))),
    'table': (table, lambda o: o.at[1, 'c'].append(7)),
    'deque': (lambda: deque([torch.zeros(2)]*3, maxlen=3), lambda o: o.append(torch.ones(2)))}


def plain_of(o):
    if isinstance(o, torch.Tensor): return o.tolist()
    if isinstance(o, np.ndarray): return o.tobytes()
    if isinstance(o, pd.DataFrame): return o.to_dict()
    if isinstance(o, io.BytesIO): return o.getvalue()
    return [*map(plain_of, o)] if isinstance(o, (list, tuple, deque)) else o


class Changes(LearnerCallback):
    def __init__(self, learn):
        super().__init__(learn)
        self.held = {k: make() for k, (make, _) in HELD.items()}
    def on_epoch_end(self, **kwargs):
        for k, o in self.held.items(): HELD[k][1](o)


def test_what_a_callback_holds():
    learn = plain(4, callback_fns=[])
    cb = Changes(learn)
    learn.callbacks.append(cb)
    held = dict(cb.held)
    with learn.distrib_ctx(nprocs=2):
        for n in 2, 1: learn.fit(n, 1e-2)
    local = Changes(plain(4))
    for _ in range(3): local.on_epoch_end()
    assert [k for k in HELD if plain_of(cb.held[k]) != plain_of(local.held[k])] == []
    assert all(cb.held[k] is held[k] for k in HELD)
