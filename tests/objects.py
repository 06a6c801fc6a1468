"""Objects of any kind and size, and for each a change in place. A callback holds them (cases/held.py, and fastai 1's
v1/test_v1_comes_back.py): nothing is known by a sum, a sample or a limit of size."""
import array, io
from collections import deque
from copy import deepcopy
import numpy as np, pandas as pd, torch
from PIL import Image


class Box:
    def __init__(self, n): self.n = n


class Table(dict): "A dict with attributes"


def column(values, **kw):
    def make(): return pd.DataFrame(dict(a=pd.Series(deepcopy(values), **kw), b=range(len(values))))
    return make


def put(value): return lambda o: o.__setitem__('a', o['a'].where(o.index != 1, value))
def cell(value): return lambda o: o.at.__setitem__((1, 'a'), value)
def white(o): return (255, 255, 255) if o.mode == 'RGB' else 255
def in_cell(o): o.at[1, 'a'].append(7)
def add(o): o.add_(1)
def views():
    table = torch.arange(60.).view(20, 3)
    return [*table, *table[5:9], table]


# name -> what makes an object, what changes it in place
OBJECTS = {
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
    **{f'a picture ({mode})': (lambda mode=mode: Image.new(mode, (3, 3)), lambda o: o.putpixel((1, 1), white(o)))
       for mode in ('L', 'P', 'RGB')},
    'a series': (lambda: pd.Series([1, 2]), lambda o: o.__setitem__(0, 5)),
}
LARGE = [k for k in OBJECTS if 'MB' in k or 'large' in k]
SMALL = [k for k in OBJECTS if k not in LARGE]


class Changing:
    "Objects of the table, which change together"
    def __init__(self, names): self.names, self.objects = names, [OBJECTS[k][0]() for k in names]
    def change(self):
        for k, o in zip(self.names, self.objects): OBJECTS[k][1](o)
