"""What comes back is what rank 0 had, bit by bit. Nothing is known by a sum, a sample or a limit of size. More kinds of
objects: ../objects.py."""
import io
from copy import deepcopy
from functools import partial
import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam, Lamb, Larc, Lookahead, OptimWrapper, QHAdam, RAdam, RMSProp, SGD, ranger
from torch import nn
from fastddp.all import CantDistribute, InProcess
from graphs import differs
from objects import Box
from parity import learner, seed, warm
from spread import long_but

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def launcher():
    with warm(2) as res:
        # its memory for large payloads stays
        for _ in range(2):
            learner(train=8, valid=1, cbs=OfSizes(0, 200_000_000)).distrib_fit(1, nprocs=2, launcher=res)
        yield res


class Ema(Callback):
    "Averages of the weights, in a list that is longer than any limit was"
    def before_fit(self):
        if not hasattr(self, 'shadow'): self.shadow = [p.detach().clone() for p in self.model.parameters()]
    def after_batch(self):
        if self.training:
            for s, p in zip(self.shadow, self.model.parameters()): s.lerp_(p.detach(), .1)


def deep(n=60): return nn.Sequential(nn.Linear(4, 8), *[nn.Linear(8, 8) for _ in range(n)], nn.Linear(8, 3))


class Keeps(Callback):
    "What the tensors of model and optimizer were on rank 0 when the fit ended"
    order = 10_000
    def after_fit(self): self.at_end = deepcopy(state(self.learn))


def state(learn):
    opts = [learn.opt] if learn.opt else []
    while opts and hasattr(opts[-1], 'opt') and opts[-1].opt is not opts[-1]: opts.append(opts[-1].opt)
    shadow = getattr(learn, 'ema', None) and learn.ema.shadow
    return dict(learn.model.state_dict()), [[*o.state.values()] for o in opts], shadow


OPTS = dict(SGD=partial(SGD, mom=.9), Adam=Adam, RAdam=RAdam, RMSProp=RMSProp, QHAdam=QHAdam, Lamb=Lamb, Larc=Larc,
            ranger=ranger, Lookahead=lambda *a, **k: Lookahead(SGD(*a, mom=.9, **k)),
            **{f"torch's {k}": partial(OptimWrapper, opt=getattr(torch.optim, k)) for k in (
                'Adadelta', 'Adagrad', 'AdamW', 'Adamax', 'ASGD', 'NAdam', 'RMSprop', 'Rprop', 'SGD')},
            momentum=partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9)))


@pytest.mark.parametrize('opt', long_but(OPTS, 'Adam', 'Lookahead', "torch's ASGD"))
def test_what_trains(opt, launcher):
    "Bit by bit as on rank 0, with averages of 124 parameters"
    learn = learner(train=16, valid=4, model=deep(), opt_func=OPTS[opt], lr=.01, cbs=[Ema(), Keeps()])
    learn.create_opt()
    learn.ema.learn = learn
    learn.ema.before_fit()
    with learn.distrib_ctx(nprocs=2, launcher=launcher):
        for _ in range(2):
            learn.fit(1)
            assert differs(learn.keeps.at_end, state(learn)) is None


def test_two_classes(launcher):
    "A bias whose elements change by +d and -d has the same sum: 27 of 300 such models once stayed as they were"
    for i in range(4):
        learn = learner(train=16, valid=4, opt_func=Adam, cbs=Keeps(), lr=.01*(i+1))
        learn.distrib_fit(1, nprocs=2, launcher=launcher)
        assert differs(learn.keeps.at_end, state(learn)) is None


# The items of data sets: which there are, their order and all memory are compared, the insides of objects aren't

class Items:
    "A data set over a list of items, which counts"
    def __init__(self, items): self.items, self.cache, self.seen = items, {}, dict(n=0)
    def __len__(self): return 16
    def __getitem__(self, i): return torch.ones(4)*(i % 3), torch.tensor(i % 2)


class OfData(Callback):
    def __init__(self, change): self.change = change
    def after_epoch(self): self.change(self.dls.train_ds)


def of_items(change): return lambda ds: change(ds.items)


DATA = {
    'memory of a tensor': (lambda n: [torch.zeros(3) for _ in range(n)], of_items(lambda o: o[3].add_(1))),
    'memory in a tuple': (lambda n: [(torch.zeros(3), 1) for _ in range(n)], of_items(lambda o: o[3][0].add_(1))),
    'memory in a dict': (lambda n: [dict(x=np.zeros(3), y=1) for _ in range(n)],
                         of_items(lambda o: o[3]['x'].__iadd__(1))),
    'memory in a list of a dict': (lambda n: [dict(x=[torch.zeros(2000)]) for _ in range(n)],
                                   of_items(lambda o: o[3]['x'][0].add_(1))),
    'memory of an object': (lambda n: [Box(torch.zeros(3)) for _ in range(n)], of_items(lambda o: o[3].n.add_(1))),
    'another item': (lambda n: [Box(i) for i in range(n)], of_items(lambda o: o.__setitem__(3, Box('new')))),
    'an item less': (lambda n: [(f'{i}', i) for i in range(n)], of_items(lambda o: o.pop(3))),
    'another order': (lambda n: [(f'{i}', i) for i in range(n)], of_items(lambda o: o.reverse())),
    'a cache': (lambda n: [f'{i}' for i in range(n)], lambda ds: ds.cache.setdefault(len(ds.cache), torch.ones(2))),
    'a counter': (lambda n: [f'{i}' for i in range(n)], lambda ds: ds.seen.update(n=ds.seen['n']+1)),
    'a frame': (lambda n: pd.DataFrame(dict(a=np.zeros(n), b=['x']*n)), of_items(lambda o: o.__setitem__('a', o.a+1))),
    'a cell': (lambda n: pd.DataFrame(dict(a=np.zeros(n), b=['x']*n)),
               of_items(lambda o: o.loc.__setitem__((1, 'b'), 'y'))),
}


@pytest.mark.parametrize('case', long_but([(300, False), (30, True), (10, False), (12_000, False)], (300, False)))
def test_items_of_data_sets(case, launcher):
    "On workers, or with `InProcess()`"
    (n, here), wrong = case, []
    options = dict(launcher=InProcess()) if here else dict(nprocs=2, launcher=launcher)
    for name, (make, change) in DATA.items():
        seed()
        dls = DataLoaders.from_dsets(Items(make(n)), Items(make(2)), bs=4, device='cpu', num_workers=0)
        learn = _learner(dls, OfData(change))
        learn.distrib_fit(2, **options)
        local = Items(make(n))
        for _ in range(2): change(local)
        if found := differs(learn.dls.train_ds, local): wrong.append((name, found))
    assert wrong == []


def _learner(dls, cb):
    learn = learner(train=8, valid=2, cbs=cb)
    learn.dls = dls
    return learn


class Seen(Callback):
    "Holds the items of the data set: so they are state, also inside"
    def __init__(self, items): self.items = items
    def after_epoch(self): self.items[3]['n'] += 1; self.items[-1]['n'] += 2


@pytest.mark.parametrize('n', [10, 1500])
def test_items_that_a_callback_holds_are_state(n, launcher):
    items = [dict(n=0) for _ in range(n)]
    dls = DataLoaders.from_dsets(Items(items), Items([{}]), bs=4, device='cpu', num_workers=0)
    learn = _learner(dls, Seen(items))
    learn.distrib_fit(2, nprocs=2, launcher=launcher)
    assert items[3] == dict(n=2) and items[-1] == dict(n=4) and learn.dls.train_ds.items is items is learn.seen.items


CHANGED = dict(rates=lambda learn: learn.opt.set_hypers(lr=9.), optimizer=lambda learn: learn.create_opt(),
               buffer=lambda learn: learn.model[1].running_mean.add_(1), frozen=lambda learn: learn.freeze(),
               weights=lambda learn: learn.model[0].weight.data.add_(1e-7),
               state=lambda learn: [*learn.opt.state.values()][0]['grad_avg'].add_(1),
               model=lambda learn: setattr(learn, 'model', deep(1)))


@pytest.mark.parametrize('what', long_but([None, *CHANGED], None, 'rates', 'optimizer', 'buffer'))
def test_a_job_refuses_a_learner_that_was_changed_meanwhile(what):
    def net(): return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    learn = learner(train=16, valid=4, model=net(), opt_func=Adam,
                    splitter=lambda m: [[*m[0].parameters()], [*m[1:].parameters()]])
    learn.fit(1)
    job = learn.distrib_fit(1, nprocs=2, wait=False)
    if what is None: return job.result()
    CHANGED[what](learn)
    with pytest.raises(CantDistribute, match='were changed since it began'): job.result()


# around each number that payload/ has: items of a column, bytes of small memory, of pages, of a block
COUNTS = 1, 99, 100, 101, 999, 1000, 1001, 9_999, 10_000, 10_001
BYTES = 1, 4_095, 4_096, 4_097, 2**20-1, 2**20, 2**20+1, 2**24-1, 2**24+1
MADE = dict(tensors=lambda n: [torch.zeros(2) for _ in range(n)], dicts=lambda n: [{} for _ in range(n)],
            numbers=lambda n: [0]*n, texts=lambda n: ['']*n, pairs=lambda n: [('', 0)]*n,
            table=lambda n: torch.zeros(n, 2), array=lambda n: np.zeros(n), data=lambda n: bytearray(n),
            stream=lambda n: io.BytesIO(bytes(n)))


class OfSizes(Callback):
    "Changes one element of each of its members, anywhere"
    def __init__(self, seed, large=0):
        rng = np.random.default_rng(seed)
        kinds = [*MADE]
        self.rng, self.made = rng, []
        for _ in range(8):
            kind = kinds[rng.integers(len(kinds))]
            n = int(rng.choice(COUNTS if kinds.index(kind) < 5 else BYTES))
            self.made.append((kind, MADE[kind](n)))
        if large: self.made.append(('array', np.zeros(large//8)))
    def after_epoch(self):
        for kind, o in self.made:
            n = len(o.getvalue()) if kind == 'stream' else len(o)
            i = int(self.rng.integers(n))
            if kind in ('tensors', 'table', 'array'): o[i] += 1
            elif kind == 'dicts': o[i]['n'] = o[i].get('n', 0)+1
            elif kind == 'stream': o.seek(i), o.write(b'x')
            else: o[i] = dict(numbers=1, texts='x', pairs=('x', 1), data=1)[kind]


@pytest.mark.timeout(400)
@pytest.mark.parametrize('seeds', long_but([range(1, 3), range(60)], range(1, 3)), ids=['few', 'many'])
def test_no_size_is_a_limit(seeds, launcher):
    wrong = []
    for i in seeds:
        learn = learner(train=16, valid=4, cbs=(cb := OfSizes(i, 200_000_000 if i % 30 == 0 else 0)))
        local = OfSizes(i, 200_000_000 if i % 30 == 0 else 0)
        with learn.distrib_ctx(nprocs=2, launcher=launcher):
            for n in 1, 2:
                learn.fit(n)
                for _ in range(n): local.after_epoch()
                if found := differs(cb.made, local.made): wrong.append((i, n, found))
    assert wrong == []
