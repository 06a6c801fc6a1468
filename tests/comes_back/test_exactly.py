"""What comes back is what rank 0 had, bit by bit: whatever kind of object a callback changes in place, and however
large it is. Nothing is known by a sum, a sample or a limit of size."""
import array, io, pickle
from collections import deque
from copy import deepcopy
import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam, Lamb, Larc, Lookahead, OptimWrapper, QHAdam, RAdam, RMSProp, SGD, ranger
from functools import partial
from torch import nn
from fastddp.all import CantDistribute, InProcess
from parity import learner, seed, warm
from spread import long_but

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def launcher():
    with warm(2) as res:
        # its memory for large payloads stays
        for _ in range(2): learner(train=8, valid=1, cbs=Changes([*LARGE])).distrib_fit(1, nprocs=2, launcher=res)
        yield res


def plain(o):
    "What an object consists of, to be compared"
    if isinstance(o, torch.Tensor):
        if o.layout is not torch.strided: return str(o.layout), tuple(o.shape), plain(o.to_dense())
        if o.is_quantized: return o.q_scale(), plain(o.int_repr())
        data = o.detach().resolve_neg().resolve_conj().contiguous()
        return str(o.dtype), tuple(o.shape), bytes(data.flatten().view(torch.uint8).numpy()) if data.numel() else b''
    if isinstance(o, np.ma.MaskedArray): return plain(o.data), plain(np.ma.getmaskarray(o))
    if isinstance(o, np.ndarray): return str(o.dtype), o.shape, plain(o.tolist()) if o.dtype.hasobject else o.tobytes()
    if isinstance(o, (pd.DataFrame, pd.Series)): return str(getattr(o, 'dtypes', '')), o.to_dict(), str(o.index)
    if isinstance(o, (io.BytesIO, io.StringIO)): return o.getvalue(), o.tell()
    if isinstance(o, (bytearray, array.array)): return bytes(o)
    if isinstance(o, dict): return type(o), [(k, plain(v)) for k, v in o.items()]
    if isinstance(o, (list, tuple, deque)): return type(o), [*map(plain, o)]
    if isinstance(o, (set, frozenset)): return sorted(map(repr, o))
    return type(o), plain(vars(o)) if hasattr(o, '__dict__') else repr(o)


class Box:
    def __init__(self, n): self.n = n


class Table(dict): "A dict with attributes"


def column(values, **kw):
    def make(): return pd.DataFrame(dict(a=pd.Series(deepcopy(values), **kw), b=range(len(values))))
    return make


def put(value): return lambda o: o.__setitem__('a', o['a'].where(o.index != 1, value))
def cell(value): return lambda o: o.at.__setitem__((1, 'a'), value)
def in_cell(o): o.at[1, 'a'].append(7)
def add(o): o.add_(1)
def views():
    table = torch.arange(60.).view(20, 3)
    return [*table, *table[5:9], table]


# name -> what makes an object, what changes it in place
HELD = {
    **{f'{n} tensors': (lambda n=n: [torch.zeros(3) for _ in range(n)], lambda o: o[len(o)//2].add_(1))
       for n in (10, 99, 100, 1000)},
    **{f'{n} tuples of tensors': (lambda n=n: [(torch.zeros(3), torch.zeros(())) for _ in range(n)],
                                  lambda o: o[-1][0].add_(1)) for n in (99, 100)},
    **{f'{n} dicts': (lambda n=n: [dict(n=0) for _ in range(n)], lambda o: o[-2].update(n=o[-2]['n']+1))
       for n in (10, 999, 1000, 2500)},
    '1000 lists': (lambda: [[0] for _ in range(1000)], lambda o: o[7].append(1)),
    '1000 objects': (lambda: [Box(0) for _ in range(1000)], lambda o: setattr(o[7], 'n', o[7].n+1)),
    '1000 arrays': (lambda: [np.zeros(3) for _ in range(1000)], lambda o: o[7].__iadd__(1)),
    '10000 numbers': (lambda: [*range(10_000)], lambda o: o.__setitem__(7, -1)),
    '10000 texts': (lambda: [*map(str, range(10_000))], lambda o: o.append('new')),
    'a tuple of 150 large tensors': (lambda: tuple(torch.zeros(40_000) for _ in range(150)), lambda o: o[149].add_(1)),
    'a dict of tensors': (lambda: {i: torch.zeros(2) for i in range(150)}, lambda o: o[149].add_(1)),
    'a dict by tuples': (lambda: {(i, 'a'): [0] for i in range(150)}, lambda o: o[3, 'a'].append(1)),
    'True and 1': (lambda: {1: 'a'}, lambda o: (o.clear(), o.update({True: 'a'}))),
    'a deque': (lambda: deque([torch.zeros(2)]*3, maxlen=3), lambda o: o.append(torch.ones(2))),
    'a set of tuples': (lambda: {(1, 2)}, lambda o: o.add((3, len(o)))),
    'a dict with attributes': (lambda: Table(a=1), lambda o: (setattr(o, 'said', 'yes'), o.update(b=2))),
    'views, one of them changed': (views, lambda o: o[2].add_(1)),
    'views, the table changed': (views, lambda o: o[-1].add_(1)),
    'overlapping views': (lambda: [(t := torch.zeros(9))[:6], t[3:]], lambda o: o[0].add_(1)),
    'an expanded tensor': (lambda: [(t := torch.zeros(1)), t.expand(5)], lambda o: o[0].add_(1)),
    'a stream of 17 MB': (lambda: io.BytesIO(bytes(17_000_000)), lambda o: (o.seek(16_500_000), o.write(b'x'))),
    'a text of 17 MB': (lambda: io.StringIO('a'*17_000_000), lambda o: (o.seek(16_500_000), o.write('x'))),
    'bytes of 17 MB': (lambda: bytearray(17_000_000), lambda o: o.__setitem__(16_500_000, 1)),
    "an array of Python's": (lambda: array.array('d', [0.]*3_000_000), lambda o: o.__setitem__(2_900_000, 1.)),
    'an array of 140 MB': (lambda: np.zeros(17_500_000), lambda o: o.__setitem__(17_000_001, 1.)),
    'a tensor of 140 MB': (lambda: torch.zeros(35_000_000), lambda o: o.__setitem__(34_000_001, 1.)),
    'a tensor that no sum tells': (lambda: torch.tensor([1., 2., 1., 2.]), lambda o: o.copy_(o.flip(0))),
    'a masked array': (lambda: np.ma.array([1., 2.], mask=[True, False]), lambda o: o.__setitem__(0, 5.)),
    'an array of objects': (lambda: np.array([[1], {}, None], dtype=object), lambda o: o[1].update(a=1)),
    'a record array': (lambda: np.zeros(3, dtype='i4,f8'), lambda o: o.__setitem__(1, (2, 3.))),
    'a transposed array': (lambda: np.zeros((300, 4)).T, lambda o: o.__setitem__((1, 299), 1)),
    'an array that grows': (lambda: np.zeros(3), lambda o: o.resize(len(o)+1, refcheck=False)),
    'a tensor that grows': (lambda: torch.zeros(0), lambda o: o.resize_(len(o)+1).fill_(1)),
    **{f'a tensor of {d}': (lambda d=d: torch.zeros(3, dtype=getattr(torch, d)), lambda o: o.fill_(1)) for d in (
        'bool', 'uint8', 'int8', 'int16', 'int64', 'float16', 'bfloat16', 'float64', 'complex64', 'uint16', 'uint32',
        'uint64')},
    'a tensor of float8': (lambda: torch.zeros(3).to(torch.float8_e4m3fn),
                           lambda o: o.copy_(torch.ones(3).to(torch.float8_e4m3fn))),
    'sparse': (lambda: torch.eye(3).to_sparse(), lambda o: o.mul_(2)),
    'sparse rows': (lambda: torch.eye(3).to_sparse_csr(), lambda o: o.mul_(2)),
    'quantized': (lambda: torch.quantize_per_tensor(torch.zeros(3), .1, 0, torch.qint8),
                  lambda o: o.copy_(torch.quantize_per_tensor(torch.ones(3), .1, 0, torch.qint8))),
    **{f'a column of {k}': (column(v, dtype=d), put(new)) for k, v, d, new in (
        ('int64', [1, 2, 3], 'int64', 7), ('float32', [1, 2, 3], 'float32', 7), ('Int64', [1, 2, None], 'Int64', 7),
        ('Float32', [1, 2, None], 'Float32', 7), ('boolean', [True, None, None], 'boolean', True),
        ('texts', ['a', 'b', 'c'], 'object', 'd'), ('string', ['a', 'b', 'c'], 'string', 'd'),
        ('dates', pd.date_range('2026', periods=3), 'datetime64[ns]', pd.Timestamp('2027')),
        ('zoned dates', pd.date_range('2026', periods=3, tz='UTC'), None, pd.Timestamp('2027', tz='UTC')),
        ('durations', pd.to_timedelta([1, 2, 3]), None, pd.Timedelta(7)),
        ('periods', pd.period_range('2026', periods=3, freq='D'), None, pd.Period('2027', 'D')),
        ('categories', ['a', 'b', 'a'], 'category', 'a'),
        ('intervals', pd.interval_range(0, 3), None, pd.Interval(7, 8)), ('sparse', [0, 0, 1], 'Sparse[int64]', 1))},
    'a column of lists': (column([[1], [2], [3]]), in_cell),
    'a column of dicts': (column([{}, {}, {}]), lambda o: o.at[1, 'a'].update(b=1)),
    'names of an index': (column([1, 2, 3]), lambda o: setattr(o.index, 'name', 'i')),
    'a series': (lambda: pd.Series([1, 2]), lambda o: o.__setitem__(0, 5)),
}
LARGE = {k for k in HELD if 'MB' in k or 'large' in k}


class Changes(Callback):
    "Changes many objects in place, on each rank alike"
    def __init__(self, names): self.names, self.held = names, [HELD[k][0]() for k in names]
    def after_epoch(self):
        for k, o in zip(self.names, self.held): HELD[k][1](o)


def check(cb, epochs):
    "What differs from what so many epochs leave in one process"
    local = Changes(cb.names)
    for _ in range(epochs): local.after_epoch()
    return [k for k, a, b in zip(cb.names, cb.held, local.held) if plain(a) != plain(b)]


SMALL = [k for k in HELD if k not in LARGE]
GROUPS = {'some': SMALL[::4], 'small': SMALL, 'large': [*LARGE]}


@pytest.mark.holds('Decisions', "Whatever is changed in place, of any kind and size, is bit by bit worker 0's")
@pytest.mark.parametrize('group', ['small', 'large'])
def test_what_a_callback_holds(group, launcher, recwarn):
    "In a fit, in the next one of the block, and in an epoch before a failure"
    learn = learner(train=16, valid=4, cbs=(cb := Changes(GROUPS[group])))
    held = [*cb.held]
    with learn.distrib_ctx(nprocs=2, launcher=launcher):
        learn.fit(2)
        assert check(cb, 2) == []
        learn.fit(1)
    assert check(cb, 3) == []
    assert not [w.message for w in recwarn if 'fastddp' in str(w.message)]
    # all but a tuple, and what nothing sets, are the very same objects
    assert all(a is b for a, b in zip(held, cb.held) if not isinstance(a, (tuple, bytearray, array.array)))


@pytest.mark.parametrize('group', long_but(GROUPS))
def test_in_a_job(group):
    learn = learner(train=16, valid=4, cbs=(cb := Changes(GROUPS[group])))
    job = learn.distrib_fit(2, nprocs=2, wait=False)
    job.result()
    assert check(cb, 2) == []


class Fails(Callback):
    order = 100
    def before_epoch(self):
        if self.epoch == 2 and not getattr(self, 'mended', False): raise ValueError('once')


@pytest.mark.parametrize('group', long_but(GROUPS, 'some'))
def test_resumed(group, tmp_path):
    "In the same process, and from the file in a learner made anew"
    def make():
        learn = learner(train=16, valid=4, cbs=[Changes(GROUPS[group]), Fails()])
        learn.path = tmp_path
        return learn
    learn = make()
    with pytest.raises(ValueError): learn.distrib_fit(4, nprocs=2, checkpoint='epoch')
    assert check(learn.changes, 2) == []
    for o, args in (learn, ()), (make(), ('distrib',)):
        o.fails.mended = True
        o.distrib_resume(*args)
        assert check(o.changes, 4) == []


class FailsOnce(Callback):
    "In a worker, once in all"
    order = 100
    def __init__(self, marker): self.marker = marker
    def before_epoch(self):
        if self.epoch == 2 and not self.marker.exists():
            self.marker.touch()
            raise ValueError('once')


@pytest.mark.parametrize('group', long_but(GROUPS))
def test_restarted(group, tmp_path):
    "What the epochs before the failure have changed goes on on fresh workers"
    learn = learner(train=16, valid=4, cbs=[cb := Changes(GROUPS[group]), FailsOnce(tmp_path/'failed')])
    learn.distrib_fit(4, nprocs=2, restarts=1)
    assert (tmp_path/'failed').exists() and check(cb, 4) == []


class Ema(Callback):
    "Averages of the weights, in a list that is longer than any limit was"
    def before_fit(self):
        if not hasattr(self, 'shadow'): self.shadow = [p.detach().clone() for p in self.model.parameters()]
    def after_batch(self):
        if self.training:
            for s, p in zip(self.shadow, self.model.parameters()): s.lerp_(p.detach(), .1)


def deep(n=60): return nn.Sequential(nn.Linear(4, 8), *[nn.Linear(8, 8) for _ in range(n)], nn.Linear(8, 3))


class Keeps(Callback):
    "What the tensors of model and optimizer were on rank 0 when the fit ended, as pickled bytes"
    order = 10_000
    def after_fit(self): self.at_end = state(self.learn)


def state(learn):
    opts = [learn.opt] if learn.opt else []
    while opts and hasattr(opts[-1], 'opt') and opts[-1].opt is not opts[-1]: opts.append(opts[-1].opt)
    states = [[plain({k: v for k, v in s.items()}) for s in o.state.values()] for o in opts]
    shadow = getattr(learn, 'ema', None) and learn.ema.shadow
    return pickle.dumps((plain(dict(learn.model.state_dict())), states, plain(shadow)))


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
            assert learn.keeps.at_end == state(learn)


def test_two_classes(launcher):
    "A bias whose elements change by +d and -d has the same sum: 27 of 300 such models once stayed as they were"
    for i in range(4):
        learn = learner(train=16, valid=4, opt_func=Adam, cbs=Keeps(), lr=.01*(i+1))
        learn.distrib_fit(1, nprocs=2, launcher=launcher)
        assert learn.keeps.at_end == state(learn)


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
        if plain(learn.dls.train_ds) != plain(local): wrong.append(name)
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
                if plain([o for _, o in cb.made]) != plain([o for _, o in local.made]): wrong.append((i, n))
    assert wrong == []
