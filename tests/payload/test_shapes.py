"""Data of many small pieces travels as columns: it arrives as it was, trains as in one process, and never stale."""
import ctypes, json
from pathlib import Path
from types import SimpleNamespace
import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.tabular.all import CategoryBlock, Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.torch_core import TensorCategory, TensorImage
from fastai.vision.core import PILImage
from fastai.data.core import Pipeline, Transform
from fastcore.foundation import L
from fastcore.test import equals
from PIL import Image
from fastddp.payload.pickling import dump, load
from fastddp.payload.places import Places
from parity import assert_same, fit_both, learner, seed, alone_like, warm
from spread import long_but

N = 1200


def xs(): return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
def ys(): return torch.randint(3, (N,), generator=torch.Generator().manual_seed(1))
def image(x, y): return Image.fromarray(np.array([[*x.mul(20).add(128).clamp(0, 255), y]], np.uint8))


# what the items are -> (the item of a row and its label, four numbers and a class from an item)
SHAPES = {
    'tensors of their own': (lambda x, y: (x.clone(), y.clone()), lambda o: o),
    'tensors of a class': (lambda x, y: (TensorImage(x.clone()), TensorCategory(y.clone())), lambda o: o),
    'arrays and numbers': (lambda x, y: (x.numpy().copy(), int(y)), lambda o: (torch.tensor(o[0]), torch.tensor(o[1]))),
    'lists': (lambda x, y: [*x.tolist(), int(y)], lambda o: (torch.tensor(o[:4]), torch.tensor(o[4]))),
    'lists of integers': (lambda x, y: [*x.mul(100).int().tolist(), int(y)],
                          lambda o: (torch.tensor(o[:4])/100, torch.tensor(o[4]))),
    'dicts': (lambda x, y: dict(x=x.tolist(), y=np.int64(y)), lambda o: (torch.tensor(o['x']), torch.tensor(o['y']))),
    'paths and labels': (lambda x, y: (Path(f'{x[0]:.3f}')/'a.jpg', str(int(y))),
                         lambda o: (torch.full((4,), float(o[0].parent.name)), torch.tensor(int(o[1])))),
    'images': (image, lambda o: ((t := torch.tensor(np.array(o)[0].astype('f4')))[:4]/20-6, t[4].long())),
    'numbers': (lambda x, y: np.float32(x[0]), lambda o: (torch.full((4,), float(o)), torch.tensor(int(o > 0)))),
    'tensors': (lambda x, y: x.clone(), lambda o: (o, (o.sum() > 0).long()))}


def made(shape): return [SHAPES[shape][0](x, y) for x, y in zip(xs(), ys())]


class Items:
    "A data set over a list of items"
    def __init__(self, items, shape): self.items, self.shape = items, shape
    def __len__(self): return 200
    def __getitem__(self, i): return SHAPES[self.shape][1](self.items[i])


def packed(o):
    "`o` as a worker has it"
    return load(*dump(o, long_lists=long_lists(o)).copied())


def long_lists(o):
    lists = [v for v in (o.values() if isinstance(o, dict) else [o]) if type(v) in (list, tuple)]
    loaders = [SimpleNamespace(dataset=v) for v in lists]
    return Places([*loaders], loaders=loaders).walk().long_lists()


def same(a, b):
    if isinstance(a, (list, tuple)) and len(a) != len(b): return False
    if isinstance(a, (list, tuple)): return all(map(same, a, b))
    return type(a) is type(b) and equals(a, b)


@pytest.mark.few(5)
@pytest.mark.parametrize('shape', SHAPES)
def test_a_long_list_is_a_list(shape):
    items = made(shape)
    p = packed(dict(items=items, again=[items], many=L(items, use_list=None)))
    o = p['items']
    assert p['again'][0] is o and p['many'].items is o
    assert type(o) is list and same(o, items)


def test_tuples_stay_tuples():
    items = tuple(made('dicts'))
    assert type(packed(items)) is tuple and packed(items) == items


@pytest.mark.parametrize('shape', ['tensors of their own', 'tensors of a class', 'tensors'])
def test_short_lists_of_tensors_are_plain_lists_made_of_one_buffer_each(shape):
    items = made(shape)[:200]
    assert len(dump(items, long_lists=long_lists(items)).buffers) < 10
    o = packed(dict(a=items, again=items))
    assert type(o['a']) is list and o['a'] is o['again'] and same(o['a'], items)


def test_a_tensor_of_a_list_is_no_view():
    for shape in 'tensors of their own', 'tensors':
        o = packed(made(shape))
        first = o[3] if shape == 'tensors' else o[3][0]
        first += torch.ones(4, requires_grad=True)      # refused by autograd for what `unbind` returns


def test_a_closed_image_is_named():
    items = [image(x, y) for x, y in zip(xs(), ys())]
    items[7].close()
    with pytest.raises(ValueError, match='closed'): packed(items)


def test_what_two_lists_have_in_common():
    rows = made('dicts')
    a, b = packed([rows, list(rows)])
    assert a == b == rows and a is not b and a[5] is b[5]
    a, b = packed([rows, rows[:1100]])
    assert a[5] is b[5]


@pytest.mark.parametrize('odd', [object(), None, torch.ones(3, requires_grad=True), torch.ones(3).to_sparse(), print])
def test_mixed_lists_go_the_plain_way(odd):
    items = [*made('tensors'), odd]
    o = packed(items)
    assert type(o) is list and type(o[-1]) is type(odd) and same(o[:-1], items[:-1])


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
def test_nested_tensors_go_the_plain_way():
    items = [torch.nested.nested_tensor([torch.ones(2), torch.full((3,), i)]) for i in range(150)]
    for a, b in zip(packed(items), items): assert same([*a.unbind()], [*b.unbind()])


@pytest.mark.parametrize('values', [['a', 'bb'], ['a', None, float('nan')], [1, 'x', 2.5]])
def test_columns_of_frames(values):
    df = pd.DataFrame(dict(a=values*600, n=range(600*len(values)), b=(values*600)[::-1]))
    for o in df, df.astype(object), df.T: pd.testing.assert_frame_equal(packed(o), o)


class Has(Callback):
    "Notes what the ranks have for the items, and whether the first one's memory is that of the notebook's block"
    def before_fit(self):
        items = self.dls.train_ds.items
        self.kind, first = type(items).__name__, items[0][0] if isinstance(items[0], tuple) else items[0]
        lines = Path('/proc/self/maps').read_text().splitlines()
        self.shared = isinstance(first, torch.Tensor) and any(_holds(o, first.data_ptr()) for o in lines)


def _holds(line, at):
    begin, end = (int(o, 16) for o in line.split()[0].split('-'))
    return 'memfd:fastddp' in line and begin <= at < end


@pytest.fixture(scope='module')
def launcher():
    with warm(2) as res: yield res


# how items are changed in place
CHANGES = {
    'tensors of their own': lambda items: [o[0].mul_(-3) for o in items],
    'tensors of a class': lambda items: [o[0].data.add_(5) for o in items],
    'arrays and numbers': lambda items: [o[0].__imul__(-2) for o in items],
    'lists': lambda items: [o.__setitem__(1, 7.) for o in items],
    'lists of integers': lambda items: [o.__setitem__(1, 700) for o in items],
    'dicts': lambda items: [o['x'].__setitem__(0, 7.) for o in items],
    'paths and labels': lambda items: items.__setitem__(slice(0, 50), items[100:150]),
    'images': lambda items: [o.putpixel((0, 0), 255) for o in items],
    'numbers': lambda items: items.sort(),
    'tensors': lambda items: [o.numpy().__imul__(-2) for o in items]}


@pytest.mark.parametrize('shape', long_but(SHAPES, 'tensors', 'dicts', 'images', 'paths and labels'))
def test_it_trains_as_in_one_process_also_what_was_changed_in_place(shape, launcher):
    learn = learner(data=lambda n, s=0: Items(made(shape), shape), bs=25)
    before = [p.clone() for p in learn.model.parameters()]
    cb = Has()
    assert_same(*fit_both(learn, 2, launcher, 1, cbs=[cb]))
    assert cb.kind == 'list'
    assert cb.shared == shape.startswith('tensors')
    CHANGES[shape](learn.dls.train_ds.items)
    for p, old in zip(learn.model.parameters(), before): p.data.copy_(old)
    assert_same(*fit_both(learn, 2, launcher, 1))


class Held:
    "A data set over one object, which `read(object, i)` makes an item's four numbers from"
    def __init__(self, kind): self.data, self.read = HELD[kind][0](xs()[:40]), HELD[kind][1]
    def __len__(self): return 40
    def __getitem__(self, i): return (x := self.read(self.data, i)), (x.sum() > 0).long()


class Scale(Transform):
    def __init__(self): self.by = 1.
    def encodes(self, o: torch.Tensor): return o*self.by if o.is_floating_point() else o


def frame(x): return pd.DataFrame(x.numpy().copy(), columns=[*'abcd'])
def texts(x): return frame(x).astype(str)
def of_texts(d, i): return torch.tensor([float(o) for o in d.iloc[i]])
def images_of(x): return [image(o, 0) for o in x]


# what a data set holds -> (how it is made, how an item is read from it, how it is changed in place between two fits)
HELD = {
    'tensor': (torch.clone, lambda d, i: d[i], lambda d: d.mul_(-3)),
    'row, past the counter of versions': (torch.clone, lambda d, i: d[i], lambda d: d.data[3].fill_(9)),
    'element, through numpy': (torch.clone, lambda d, i: d[i], lambda d: d.numpy().__setitem__((3, 0), 9.)),
    'memory': (torch.clone, lambda d, i: d[i], lambda d: d.set_(d.flip(0))),
    'shape': (torch.clone, lambda d, i: d[i].view(4), lambda d: d.resize_(40, 2, 2).mul_(2)),
    'array': (lambda x: x.numpy().copy(), lambda d, i: torch.tensor(d[i]), lambda d: d.__setitem__((3, 0), 9.)),
    'array of objects': (lambda x: x.numpy().astype(object), lambda d, i: torch.tensor(d[i].astype('f4')),
                         lambda d: d.__setitem__((3, 0), 9.)),
    'cell': (frame, lambda d, i: torch.tensor(d.iloc[i].to_numpy()), lambda d: d.iloc.__setitem__((3, 0), 9.)),
    'column': (frame, lambda d, i: torch.tensor(d.iloc[i].to_numpy()), lambda d: d.__setitem__('b', d.a*2)),
    'text': (texts, of_texts, lambda d: d.iloc.__setitem__((3, 0), '9')),
    'item': (list, lambda d, i: d[i], lambda d: d.__setitem__(3, torch.full((4,), 9.))),
    'tensor of a list': (list, lambda d, i: d[i], lambda d: d[3].fill_(9)),
    'image': (images_of, lambda d, i: torch.tensor(np.array(d[i])[0, :4]/20-6).float(),
              lambda d: d[3].putpixel((0, 0), 255)),
    'transform': (torch.clone, lambda d, i: d[i], None)}


@pytest.mark.parametrize('kind', long_but(HELD, 'element, through numpy', 'cell', 'image', 'transform'))
def test_what_changed_between_two_fits_of_a_block_is_trained_on(kind, launcher):
    learn, change = learner(data=lambda n, s=0: Held(kind)), HELD[kind][2]
    for dl in learn.dls.loaders: dl.after_item = Pipeline([Scale()])
    one, still = alone_like(learn, 2), alone_like(learn, 2)
    def fits(o, changed=True):
        for i in range(2):
            seed(1)
            o.fit(1)
            if changed and i == 0 and change: change(o.dls.train_ds.data)
            if changed and i == 0 and not change: o.dls.train.after_item.fs[0].by = -2.
    fits(one)
    with learn.distrib_ctx(nprocs=2, launcher=launcher): fits(learn)
    assert_same(learn, one)
    fits(still, changed=False)
    assert not torch.equal(still.model[0].weight, one.model[0].weight), 'the change makes no difference'


def test_a_table_with_strings(launcher):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(kind=rng.choice(['a', 'b', 'c'], N), x=rng.random(N), y=rng.choice(['yes', 'no'], N)))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names='kind', cont_names='x', y_names='y',
                                     bs=100, y_block=CategoryBlock(), seed=0, device='cpu')
    seed()
    learn = tabular_learner(dls, layers=[8], config=dict(use_bn=False, bn_cont=False, bn_final=False))
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    assert_same(*fit_both(learn, 2, launcher, 1))
    learn.dls.train_ds.items.iloc[:100, learn.dls.train_ds.items.columns.get_loc('x')] = 9.
    assert_same(*fit_both(learn, 2, launcher, 1))


class InC(Callback):
    "Gives a list to functions that read its memory"
    def __init__(self, items): self.items = items
    def before_fit(self):
        json.dumps(self.items)
        for f in ctypes.pythonapi.PyList_Size, ctypes.pythonapi.PyList_AsTuple:
            f.argtypes, f.restype = [ctypes.py_object], ctypes.py_object if 'Tuple' in f.__name__ else ctypes.c_ssize_t
        n = ctypes.pythonapi.PyList_Size(self.items)
        self.seen = n, len(ctypes.pythonapi.PyList_AsTuple(self.items))


@pytest.mark.parametrize('items', [[f'{i}.jpg' for i in range(20_000)], [(f'{i}', i%2) for i in range(20_000)]],
                         ids=['texts', 'tuples'])
def test_c_code_takes_a_list_for_one(items, launcher):
    learn = learner(train=8, valid=2, cbs=InC(items))
    learn.distrib_fit(1, nprocs=2, launcher=launcher)
    assert learn.in_c.seen == (20_000, 20_000) and learn.in_c.items is items
