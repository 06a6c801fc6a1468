"""Random graphs of objects, random changes of them, and whether two graphs are the same by `is`.

Run as a program, this is the other process of payload/test_one_graph.py: it loads graphs, changes them, and sends the
changes.
"""
import array, collections, copyreg, datetime, decimal, enum, functools, gc, io, itertools, os, pathlib, pickle, random
import re, struct, sys, types, weakref
from dataclasses import dataclass, field

import numpy as np, pandas as pd, torch
from PIL.Image import Image
from torch import nn


class Box: pass


class Slots:
    __slots__ = 'a', 'b', '__weakref__'
    def __init__(self): self.a = 0


@dataclass
class Data:
    x: object = None
    items: list = field(default_factory=list)


@dataclass(unsafe_hash=True)
class Key:
    n: int = 0


class Says:
    "Leaves a part out of its pickle, and makes it anew"
    def __init__(self): self.x, self.cache = 0, []
    def __getstate__(self): return {k: v for k, v in vars(self).items() if k != 'cache'}
    def __setstate__(self, state): vars(self).update(state, cache=[])


class MyList(list): pass


class MyDict(dict):
    "Counts what is set in the usual way"
    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        vars(self)['n'] = vars(self).get('n', 0)+1


class Color(enum.Enum): RED = 1; BLUE = 2


Pair = collections.namedtuple('Pair', 'a b')


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        with torch.no_grad():
            for p in self.first.parameters(): p.fill_(1)
        self.tied, self.weight = self.first, self.first.weight
        self.register_buffer('seen', torch.zeros(2))


def closures():
    n, seen = 0, []
    def add(x):
        nonlocal n
        n += 1
        seen.append(x)
    def get(): return n, seen
    return add, get


def views():
    flat = torch.arange(6.)
    return [flat, flat[2:], flat.view(2, 3)]


# What one graph consists of. A maker gets the random generator
LEAVES = dict(
    number=lambda r: r.randrange(9),
    text=lambda r: r.choice('abc'),
    path=lambda r: pathlib.Path('/tmp')/str(r.randrange(9)),
    date=lambda r: datetime.date(2026, 1, 1+r.randrange(9)),
    decimal=lambda r: decimal.Decimal(r.randrange(9)),
    enum=lambda r: r.choice([*Color]),
    tensor=lambda r: torch.full((3,), float(r.randrange(9))),
    parameter=lambda r: nn.Parameter(torch.ones(2)),
    array=lambda r: np.arange(4.),
    ints=lambda r: array.array('d', [1., 2.]),
    random=lambda r: random.Random(r.randrange(9)),
    generator=lambda r: torch.Generator().manual_seed(r.randrange(9)),
    numpy_random=lambda r: np.random.default_rng(r.randrange(9)),
    count=lambda r: itertools.count(r.randrange(9)),
    text_file=lambda r: io.StringIO('abc'),
    bytearray=lambda r: bytearray(b'abc'))
HOLDERS = dict(
    box=lambda r: Box(),
    slots=lambda r: Slots(),
    data=lambda r: Data(),
    list=lambda r: [],
    dict=lambda r: {},
    my_list=lambda r: MyList(),
    my_dict=lambda r: MyDict(),
    deque=lambda r: collections.deque(maxlen=9),
    default=lambda r: collections.defaultdict(list),
    ordered=lambda r: collections.OrderedDict(),
    net=lambda r: Net(),
    says=lambda r: Says(),
    objects=lambda r: np.array([None]*3, dtype=object),
    keyed=lambda r: {Key(i): i for i in range(2)},
    set=lambda r: set(),
    counter=lambda r: collections.Counter('ab'))


def is_holder(o):
    "True for what `put` can write to"
    if isinstance(o, np.ndarray): return o.dtype == object
    return isinstance(o, tuple({type(make(random.Random(0))) for make in HOLDERS.values()}))


_VALUES = pathlib.Path, datetime.date, decimal.Decimal, enum.Enum


def hashable(o): return isinstance(o, (int, str, Box, torch.Tensor, *_VALUES))


def put(holder, v, r):
    "Have a holder refer to `v`"
    if isinstance(holder, set): hashable(v) and set.add(holder, v)
    elif isinstance(holder, collections.Counter): holder[r.choice('abc')] += 1
    elif isinstance(holder, dict): holder[r.choice('abc') if r.random() < .7 or not hashable(v) else v] = v
    elif isinstance(holder, (list, collections.deque)): holder.append(v)
    elif isinstance(holder, np.ndarray): holder[r.randrange(len(holder))] = v
    elif isinstance(holder, Slots): setattr(holder, r.choice('ab'), v)
    elif isinstance(holder, nn.Module): vars(holder)[r.choice(['more', 'other'])] = v
    else: setattr(holder, r.choice('xyz'), v)


def build(seed, n):
    "Return a graph with `n` holders and as many other objects"
    r = random.Random(seed)
    root = Box()
    holders = [HOLDERS[r.choice([*HOLDERS])](r) for _ in range(n)]
    leaves = [LEAVES[r.choice([*LEAVES])](r) for _ in range(n)]
    root.all, root.views, root.functions = holders+leaves, views(), closures()
    for o in holders:
        for _ in range(2):
            v = r.choice(root.all)
            bound = o.append if isinstance(o, list) else v
            if r.random() < .3: v = r.choice([(v, 1), Pair(v, v), functools.partial(print, v), bound])
            put(o, v, r)
    boxes = [o for o in holders if isinstance(o, Box)]
    if r.random() < .5 and boxes: root.ref = weakref.ref(boxes[0])
    return root


def change(root, seed, m):
    "Make `m` random changes"
    r = random.Random(seed)
    for _ in range(m):
        o = r.choice(root.all)
        if is_holder(o):
            act = r.random()
            if act < .5: put(o, r.choice(root.all), r)
            elif act < .7: put(o, LEAVES[r.choice([*LEAVES])](r), r)
            elif act < .8: put(o, HOLDERS[r.choice(['box', 'list', 'dict'])](r), r)
            elif isinstance(o, (list, collections.deque)) and len(o): del o[r.randrange(len(o))]
            elif isinstance(o, dict) and len(o): o.pop([*o][0])
            elif isinstance(o, nn.Module):
                with torch.no_grad(): o.first.weight.add_(1)
        elif isinstance(o, torch.Tensor):
            with torch.no_grad(): o.add_(1) if r.random() < .8 else setattr(o, 'note', r.randrange(9))
        elif isinstance(o, np.ndarray): o += 1
        elif isinstance(o, array.array): o.append(3.)
        elif isinstance(o, random.Random): o.random()
        elif isinstance(o, torch.Generator): torch.rand(1, generator=o)
        elif isinstance(o, np.random.Generator): o.random()
        elif isinstance(o, itertools.count): next(o)
        elif isinstance(o, io.StringIO): o.write('x')
        elif isinstance(o, bytearray): o.append(1)
    act = r.random()
    if act < .3: root.views[r.randrange(3)].mul_(2)
    elif act < .6: root.functions[0](r.choice(root.all))
    if r.random() < .3: root.all.append(LEAVES[r.choice([*LEAVES])](r))


def contents(o):
    "Return `(what is compared by value, what is compared as objects)`"
    if isinstance(o, random.Random): return str(o.getstate()), []
    if isinstance(o, np.random.Generator): return str(o.bit_generator.state), []
    if isinstance(o, torch.Generator): return o.get_state().tolist(), []
    if isinstance(o, io.IOBase) and o.closed: return None, []
    if isinstance(o, (io.StringIO, io.BytesIO)): return (o.getvalue(), o.tell()), []
    if isinstance(o, (bytearray, array.array)): return bytes(o), []
    if isinstance(o, Image): return (o.mode, o.size, o.tobytes(), o.getpalette()), []
    if isinstance(o, itertools.count): return repr(o), []
    if isinstance(o, np.generic): return o.item(), []
    if isinstance(o, torch.Tensor):
        grad = [('grad', o.grad)] if o.is_leaf else []
        return (o.detach(), o.requires_grad), [*vars(o).items(), *grad]
    if isinstance(o, np.ma.MaskedArray): return (o.data, np.ma.getmaskarray(o)), []
    if isinstance(o, np.ndarray) and o.dtype != object: return o, []
    if isinstance(o, (np.ndarray, list, tuple, collections.deque)): return len(o), [*enumerate(o), *vars_of(o)]
    if isinstance(o, nn.modules.module._WrappedHook): return None, [('hook', o.hook)]   # as torch pickles it
    if isinstance(o, dict):
        # hooks have numbers of the process
        if o and all(isinstance(k, int) and callable(v) for k, v in o.items()): return len(o), [*enumerate(o.values())]
        pairs = [p for i, kv in enumerate(o.items()) for p in zip([('k', i), ('v', i)], kv)]
        return len(o), [*pairs, *vars_of(o)]
    if isinstance(o, (pd.DataFrame, pd.Series)): return [str(o.dtypes), str(o.index), o.to_numpy().tolist()], []
    if isinstance(o, (set, frozenset)):
        return sorted(repr(v) if is_atom(v) or isinstance(v, tuple) else type(v).__name__ for v in o), []
    if isinstance(o, functools.partial): return None, [('func', o.func), ('args', o.args), ('kwargs', o.keywords)]
    if isinstance(o, types.MethodType): return o.__name__, [('self', o.__self__)]
    if isinstance(o, types.BuiltinFunctionType):
        return o.__name__, [] if isinstance(o.__self__, types.ModuleType) else [('self', o.__self__)]
    if isinstance(o, types.FunctionType):
        cells = [(i, c.cell_contents) for i, c in enumerate(o.__closure__ or ())]
        return o.__name__, [*cells, ('defaults', o.__defaults__), ('by name', o.__kwdefaults__), *vars_of(o)]
    if isinstance(o, weakref.ref): return None, [('to', o())]
    if is_view(o): return None, [('of', *gc.get_referents(o))]
    if isinstance(o, torch.utils.hooks.RemovableHandle): return None, [('hook', (o.hooks_dict_ref() or {}).get(o.id))]
    if isinstance(o, (type, types.ModuleType)): return o.__name__, []
    if isinstance(o, enum.Enum): return repr(o), []
    slots = [(k, getattr(o, k)) for k in copyreg._slotnames(type(o)) if hasattr(o, k)]
    if slots or hasattr(o, '__dict__'): return type(o).__name__, [*slots, *vars_of(o)]
    # locks and iterators say where they lie
    return re.sub(' at 0x[0-9a-f]+', '', repr(o)), []


def is_view(o): return type(o).__name__ in ('mappingproxy', 'dict_keys', 'dict_values', 'dict_items')


def vars_of(o):
    attrs = {} if isinstance(o, MyDict) else getattr(o, '__dict__', {})
    return sorted(attrs.items(), key=lambda kv: kv[0])


def is_atom(o): return isinstance(o, (int, float, str, bytes, type(None), *_VALUES))


def is_made_anew(o):
    "True for what Python or a fit makes whenever it is asked for it, so that `is` says nothing of it"
    made_anew = tuple, types.MethodType, types.BuiltinFunctionType, functools.partial
    return isinstance(o, made_anew) or is_view(o)


def kind(o):
    "What an object has to be on both sides: the class, by its name, since two learners may each have made one"
    return 'closed file' if isinstance(o, io.IOBase) and o.closed else type(o).__qualname__


def alike(x, y, tol):
    "True if two values are equal; numbers may differ by `tol`, or this part of them"
    if x is y: return True      # pandas' NA equals nothing
    if isinstance(x, float) and isinstance(y, float):
        return x == y or x != x and y != y or abs(x-y) <= tol*max(1, abs(x))
    if isinstance(x, torch.Tensor): return alike_tensors(x, y, tol)
    if isinstance(x, np.ndarray):
        if (x.dtype, x.shape) != (y.dtype, y.shape): return False
        return np.allclose(x, y, tol, tol, True) if x.dtype.kind == 'f' else x.tobytes() == y.tobytes()
    if not isinstance(x, (list, tuple)): return x == y
    return len(x) == len(y) and all(alike(a, b, tol) for a, b in zip(x, y))


def alike_tensors(x, y, tol):
    "Where numbers may differ, so may the type of a single one: workers add up losses in float64"
    if tol and x.is_floating_point() and x.dim() == 0: x, y = x.double(), y.double()
    if (x.dtype, x.shape, x.layout) != (y.dtype, y.shape, y.layout): return False
    if x.layout is not torch.strided: x, y = x.to_dense(), y.to_dense()
    if x.is_quantized: x, y = x.dequantize(), y.dequantize()
    if x.is_floating_point(): return torch.allclose(x.double(), y.double(), tol, tol, True)
    x, y = (o.resolve_conj().resolve_neg().contiguous().flatten() for o in (x, y))
    return not x.numel() or bool((x.view(torch.uint8) == y.view(torch.uint8)).all())


def places(root):
    "Return where each object was found first, by its id, and the objects, which keep their ids as long as they live"
    found, todo, keep = {}, [('', root)], []
    while todo:
        path, o = todo.pop()
        if is_atom(o) or id(o) in found: continue
        found[id(o)] = path
        inner = contents(o)[1]
        keep.append((o, inner))
        todo += [(f'{path}/{k}', v) for k, v in inner]
    return found, keep


def differs(a, b, before=({}, {}), tol=0, skip=()):
    """Return where two graphs differ, None if they are the same: each object here stands for one there. `before`: the
    places of objects in either graph at the start; what was there at one place is now there in both, or in neither.
    Attributes in `skip` aren't looked at."""
    pairs, todo, keep = {}, [('', a, b)], []
    while todo:
        path, a, b = todo.pop()
        if kind(a) != kind(b): return f'{path}: {kind(a)} for {kind(b)}'
        if is_atom(a):
            if not alike(a, b, tol): return f'{path}: {a!r} for {b!r}'
            continue
        is_known, is_other = id(a) in pairs, pairs.get(id(a), id(b)) != id(b)
        is_half = not is_made_anew(a) and is_known != (('b', id(b)) in pairs)
        if is_known and is_other or is_half: return f'{path}: another object'
        if id(a) in pairs: continue
        pairs[id(a)], pairs['b', id(b)] = id(b), id(a)
        was, was_there = before[0].get(id(a)), before[1].get(id(b))
        if was != was_there and not is_made_anew(a):
            return f'{path}: was {was or "not there"}, for {was_there or "not there"}'
        (x, inner), (y, others) = contents(a), contents(b)
        inner, others = ([kv for kv in kvs if kv[0] not in skip] for kvs in (inner, others))
        keep += (a, b), inner, others
        if not alike(x, y, tol): return f'{path}: {str(x)[:90]} for {str(y)[:90]}'
        names, other_names = [k for k, _ in inner], [k for k, _ in others]
        only, only_there = ([k for k in x if k not in y] for x, y in ((names, other_names), (other_names, names)))
        if names != other_names: return f'{path}: {only or "less"} for {only_there or "less"}'
        todo += [(f'{path}/{k}', v, w) for (k, v), (_, w) in zip(inner, others)]


def read(f):
    n, = struct.unpack('q', f.read(8))
    return pickle.loads(f.read(n))


def write(f, o):
    data = pickle.dumps(o)
    f.write(struct.pack('q', len(data))+data)
    f.flush()


def serve():
    "Load graphs from stdin, change them, and write the changes to stdout"
    from fastddp.payload.changes import dump_changes
    from fastddp.payload.notes import Notes
    from fastddp.payload.pickling import load
    from fastddp.payload.places import Places
    out = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)
    while True:
        try: word, *args = read(sys.stdin.buffer)
        except struct.error: return
        if word == 'load':
            meta, buffers, table = args
            root = load(meta, [*map(bytearray, buffers)])
            notes = Notes(Places(root).find(table))
            write(out, None)
        else:
            change(root, *args)
            payload = dump_changes(notes, grads='all')
            write(out, (payload.meta, [*map(bytes, payload.buffers)]))


if __name__ == '__main__':
    import graphs       # so that classes have the same name in both processes
    graphs.serve()
