"""What callbacks, metrics, models and cells hold, at any depth: the notebook's own objects, with what a fit wrote"""
from fastddp.base.errors import CantDistribute
import copyreg, dataclasses, functools, os, sys, threading
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler
from fastai.learner import Metric
from fastai.optimizer import OptimWrapper
from torch import nn
from fastddp.all import *
from parity import items, learner, mlp, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture
def main():
    "The namespace of a notebook, as it was at the end"
    main = vars(sys.modules['__main__'])
    before = dict(main)
    yield main
    for k in main.keys()-before.keys(): del main[k]
    main.update(before)


SLOTS = '''
import dataclasses
class Slots:
    __slots__ = 'd', 'n', '__hidden'
    def __init__(self): self.d, self.n, self.__hidden = {}, 0, 5
class More(Slots):
    __slots__ = 'more',
@dataclasses.dataclass(slots=True)
class Data:
    d: dict = dataclasses.field(default_factory=dict)
    n: int = 0
'''


class Notes(Callback):
    "Changes an object in each epoch, and makes new ones"
    def __init__(self, o): self.o, self.new = o, []
    def after_epoch(self):
        self.o.n += 1
        self.o.d[self.epoch] = 1
        self.new.append(type(self.o)())


@pytest.mark.parametrize('name', ['Slots', 'More', 'Data'])
def test_objects_with_slots(main, two, name):
    exec(SLOTS, main)
    o = main[name]()
    learn = learner(cbs=Notes(o))
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.notes.o is o and (o.n, o.d) == (2, {0: 1, 1: 1}) and not hasattr(o, '__dict__')
    assert [type(v) for v in learn.notes.new] == [main[name]]*2 and len(learn.recorder.values) == 2


def count(o):
    o.n += 1
    return o


@pytest.mark.parametrize('name', ['Slots', 'Data'])
def test_functions_return_objects_with_slots(main, name):
    exec(SLOTS, main)
    assert [(type(o), o.n) for o in ranch(2, count, main[name]())] == [(main[name], 1)]*2


# Objects that say how they are pickled: as the metrics of torchmetrics do

class Says:
    "Counts by a method of its own that it has wrapped, which isn't pickled; its lock belongs to the process"
    def __init__(self):
        super().__init__()
        self.n, self.lock, self.rows = 0, threading.Lock(), []
        self._wrap()
    def _wrap(self):
        method = self.add
        @functools.wraps(method)
        def add(k): return method(k)
        self.add = add
    def add(self, k):
        self.n += k
        self.rows.append(k)
    def __getstate__(self): return {k: v for k, v in vars(self).items() if k not in ('add', 'lock')}
    def __setstate__(self, state):
        vars(self).update(state)
        self._wrap()


class SaysModule(Says, nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer('total', torch.zeros(1), persistent=False)
    def add(self, k):
        self.n += k
        self.rows.append(k)
        self.total += k
    def forward(self, x): return x


class SaysReduce(Says):
    "Is made by a function from what it counts"
    def __reduce__(self): return made, (self.n, self.rows)


def made(n, rows):
    res = SaysReduce()
    res.n, res.rows = n, rows
    return res


class Counts(Callback):
    def __init__(self, o): self.o = o
    def after_batch(self):
        if self.training: self.o.add(1)


class CountsItself(Says, Callback):
    def after_batch(self):
        if self.training: self.add(1)


class Counted(Metric):
    name = 'counted'
    def __init__(self, o): self.o = o
    def reset(self): self.o.n = 0
    def accumulate(self, learn): self.o.add(len(learn.y))
    @property
    def value(self): return self.o.n


def check_own(o, n, rows):
    "`o` has counted to `n`, goes on by itself, and `rows` is still its list"
    assert o.n == n and o.rows is rows
    o.add(5)
    assert o.n == n+5 and rows[-1] == 5


@pytest.mark.parametrize('kind', [Says, SaysModule, SaysReduce])
def test_a_callbacks_object_says_how_it_is_pickled(two, kind):
    o = kind()
    rows, lock, layer = o.rows, o.lock, getattr(o, 'layer', None)
    learn = learner(cbs=Counts(o))
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.counts.o is o and getattr(o, 'layer', None) is layer and o.lock is lock
    check_own(o, 5, rows)


@pytest.mark.parametrize('kind', [Says, SaysModule])
def test_a_metrics_object_says_how_it_is_pickled(two, kind):
    o = kind()
    learn = learner(metrics=Counted(o))
    for _ in range(2):
        learn.distrib_fit(1, nprocs=2, launcher=two)
        for _ in range(2): assert learn.validate()[1] == 21
    assert learn.metrics[0].o is o
    o.add(1)
    assert o.n == 22


def test_a_callback_a_layer_and_a_loss_say_how_they_are_pickled(two):
    class Loss(SaysModule):
        def forward(self, out, y):
            if torch.is_grad_enabled(): self.add(1)
            return nn.functional.cross_entropy(out, y)
    class Net(SaysModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
        def forward(self, x):
            if self.training: self.add(1)
            return self.net(x)
    loss, net, cb = Loss(), Net(), CountsItself()
    rows = loss.rows, net.rows, cb.rows
    learn = learner(model=net, loss_func=loss, cbs=cb)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    for o, r in zip((loss, net, cb), rows): check_own(o, 5, r)
    assert loss.total.item() == net.total.item() == 10 and cb.learn is learn
    learn.fit(1)
    assert (loss.n, net.n, cb.n) == (20,)*3


def test_torchmetrics(two):
    torchmetrics = pytest.importorskip('torchmetrics')
    class Scores(Metric):
        name = 'n'
        def __init__(self, m): self.m = m
        def reset(self): self.m.reset()
        def accumulate(self, learn): self.m.update(learn.pred.argmax(-1), learn.y)
        @property
        def value(self): return self.m.compute().sum().item()
    m = torchmetrics.classification.MulticlassStatScores(3, average=None)
    learn = learner(metrics=Scores(m))
    before = learn.validate()[1]
    learn.distrib_fit(1, nprocs=2, launcher=two)
    for _ in range(3): assert learn.validate()[1] == before
    assert learn.metrics[0].m is m
    m.reset()
    m.update(torch.tensor([1, 0]), torch.tensor([1, 0]))
    assert m.compute()[:, -1].sum() == 2


# At any depth

class Trial:
    def __init__(self): self.log, self.best = Log(), None
class Log:
    __slots__ = 'rows', 'by_epoch', 'sums'
    def __init__(self): self.rows, self.by_epoch, self.sums = [], {}, np.zeros(2)
class Reports(Callback):
    def __init__(self, trial): self.trial, self.tensors = trial, dict(a=[torch.zeros(2)])
    def after_epoch(self):
        log = self.trial.log
        log.rows.append(self.epoch)
        log.by_epoch[self.epoch] = log.rows
        log.sums += 1
        self.trial.best = self.epoch, log
        self.tensors['a'][0] += 1


def test_what_hangs_deep_in_a_callback(two):
    trial = Trial()
    log, learn = trial.log, learner(cbs=Reports(trial))
    held, tensor = (log.rows, log.by_epoch, log.sums), learn.reports.tensors['a'][0]
    with learn.distrib_ctx(nprocs=2, launcher=two):
        for _ in range(2): learn.fit(2)
    assert learn.reports.trial is trial and trial.log is log and trial.best == (1, log) and trial.best[1] is log
    assert all(a is b for a, b in zip((log.rows, log.by_epoch, log.sums), held))
    assert log.rows == [0, 1, 0, 1] and log.sums.tolist() == [4, 4] and log.by_epoch[1] is log.rows
    assert learn.reports.tensors['a'][0] is tensor and tensor.tolist() == [4, 4]


def test_a_result_that_a_layer_holds_too(two):
    "What a layer alone holds may be a cache and stays; here the learner holds it as well, deeper"
    class Keeps(Callback):
        def after_epoch(self): self.learn.notes['epochs'][0].append(torch.ones(2)*self.epoch)
    learn = learner(cbs=Keeps())
    learn.model[0].kept = kept = []
    learn.notes = dict(epochs=[kept])
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.model[0].kept is kept and learn.notes['epochs'][0] is kept
    assert [t.tolist() for t in kept] == [[0, 0], [1, 1]]


class Items:
    "A data set whose attributes are in slots"
    __slots__ = 'pairs', 'level', 'seen'
    def __init__(self, pairs): self.pairs, self.level, self.seen = pairs, 0, []
    def __len__(self): return len(self.pairs)
    def __getitem__(self, i): return self.pairs[i]


def test_a_data_set_with_slots(two):
    class Raises(Callback):
        def after_epoch(self):
            ds = self.learn.dls.train_ds
            ds.level += 1
            ds.seen.append(self.epoch)
    ds = []
    def data(n, s=0):
        ds.append(Items(items(n, s=s)))
        return ds[-1]
    learn = learner(data=data, cbs=Raises())
    seen = ds[0].seen
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.dls.train_ds is ds[0] and (ds[0].level, ds[0].seen) == (2, [0, 1]) and ds[0].seen is seen


def test_what_a_fit_replaces_is_replaced(two):
    "A variable of the notebook keeps the old object, as after a fit in one process"
    class Renews(Callback):
        def __init__(self): self.by = dict(log=[0])
        def after_epoch(self): self.by['log'] = [*self.by['log'], 1]
    learn = learner(cbs=Renews())
    by, log = learn.renews.by, learn.renews.by['log']
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.renews.by is by and by == dict(log=[0, 1]) and log == [0]


def test_globals_and_closures_hold_deep(main, two):
    exec('''
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler
from fastai.learner import Metric
from fastai.optimizer import OptimWrapper
class Box: pass
box = Box()
box.inner = Box()
box.inner.seen = []
class Notes(Callback):
    def after_epoch(self): box.inner.seen.append(self.epoch)
''', main)
    inner, seen = main['box'].inner, main['box'].inner.seen
    kept = dict(rows=[[]])
    rows = kept['rows'][0]
    class Closes(Callback):
        def after_epoch(self): kept['rows'][0].append(self.epoch)
    learner(cbs=[main['Notes'](), Closes()]).distrib_fit(2, nprocs=2, launcher=two)
    assert main['box'].inner is inner and inner.seen is seen and seen == rows == [0, 1] and kept['rows'][0] is rows


class Meter:
    "Its methods are a loss, a metric, a hook, a transform and a schedule; each of them counts"
    def __init__(self): self.n, self.names = 0, []
    def count(self, name='x'):
        self.n += 1
        self.names.append(name)
    def loss(self, out, y):
        if torch.is_grad_enabled(): self.count()
        return nn.functional.cross_entropy(out, y)
    def metric(self, out, y):
        self.count()
        return (out.argmax(-1) == y).float().mean()
    def hook(self, *_): self.count()
    def grad(self, g): self.count()
    def tfm(self, b):
        self.count()
        return b
    def sched(self, pos):
        self.count()
        return .01


@pytest.mark.parametrize('role', ['loss', 'metric', 'hook', 'partial hook', 'grad', 'tfm', 'sched'])
def test_the_object_of_a_bound_method(two, role):
    meter = Meter()
    names = meter.names
    learn = learner(loss_func=meter.loss if role == 'loss' else None)
    if role == 'metric': learn.metrics = [meter.metric]
    if role == 'hook': learn.model[0].register_forward_hook(meter.hook)
    if role == 'partial hook': learn.model[0].register_forward_hook(functools.partial(meter.hook, 1))
    if role == 'grad': learn.model[0].weight.register_hook(meter.grad)
    if role == 'tfm': learn.dls.train.after_batch = meter.tfm
    cbs = [ParamScheduler({'lr': meter.sched})] if role == 'sched' else []
    there = 5 if role in ('loss', 'grad', 'tfm') else None
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=cbs)
    assert meter.n > 0 and len(meter.names) == meter.n and meter.names is names and (there or meter.n) == meter.n
    n = meter.n
    learn.fit(1, cbs=cbs)
    assert meter.n > n, 'it is still this object that is called'


# What can't come back costs nothing else

class OnlyThere:
    "Can be loaded in the worker, not in the notebook"
    def __init__(self): self.n = 0
    def __getstate__(self): return dict(vars(self), pid=os.getpid())
    def __setstate__(self, state):
        if state.pop('pid') != os.getppid(): raise OSError('made in another process')
        vars(self).update(state)


class Makes(Callback):
    "Holds such an object, makes new ones, and notes epochs before and after them"
    def __init__(self): self.a, self.o, self.z, self.deep = [], None, [], dict(kept=[])
    def after_epoch(self):
        self.a.append(self.epoch)
        self.z.append(self.epoch)
        self.deep['kept'].append(self.epoch)
        self.o = [1, OnlyThere()]


class Tight(Callback):
    "Doesn't let itself be changed from outside"
    def __init__(self): self.n, self.rows, self.o = 0, [], OnlyHere()
    def after_epoch(self):
        self.n += 1
        self.rows.append(self.o.add(1))


class OnlyHere:
    "Refuses a state when it isn't new"
    def __init__(self): self.n = 0
    def add(self, k):
        self.n += k
        return self.n
    def __setstate__(self, state):
        if vars(self): raise ValueError('not new')
        vars(self).update(state)
    __getstate__ = lambda self: dict(vars(self))


def test_what_cannot_be_loaded_is_named_and_the_rest_is_there(two):
    learn = learner(cbs=[Makes(), Tight()])
    makes, z, kept = learn.makes, learn.makes.z, learn.makes.deep['kept']
    with pytest.warns(UserWarning, match="learn.makes.o .OSError: made in another process. can't be loaded here"):
        learn.distrib_fit(2, nprocs=2, launcher=two)
    assert makes.a == z == kept == [0, 1] and makes.z is z and makes.o is None and makes.deep['kept'] is kept
    assert len(learn.recorder.values) == 2 and (learn.tight.n, learn.tight.rows, learn.tight.o.n) == (2, [1, 2], 2)


class AddsMade(Callback):
    "Adds a callback that can't be loaded in the notebook, and one that can"
    def after_fit(self): self.learn.add_cbs([HoldsMade(), Tight()])


class HoldsMade(Callback):
    def __init__(self): self.o = OnlyThere()


def test_an_added_callback_that_cannot_be_loaded_costs_nothing_else(two):
    learn = learner(cbs=AddsMade())
    with pytest.warns(UserWarning, match="learn.*OSError: made in another process.*can't be loaded here"):
        learn.distrib_fit(1, nprocs=2, launcher=two)
    assert hasattr(learn, 'tight') and not hasattr(learn, 'holds_made')
    assert len(learn.recorder.values) == 1 and all(isinstance(o, Callback) for o in learn.cbs)


class GrowsOnlyThere(Callback):
    "Gives the model a layer that can't be loaded in the notebook"
    run_valid = False
    def after_fit(self):
        layer = nn.Linear(1, 1)
        layer.o = OnlyThere()
        self.learn.model.append(layer)


def test_layers_that_cannot_be_loaded_do_not_cost_the_training(two, tmp_path):
    learn = learner(cbs=GrowsOnlyThere())
    learn.path = tmp_path
    model, n, before = learn.model, len(learn.model), [p.detach().clone() for p in learn.model.parameters()]
    with pytest.warns(UserWarning, match="be loaded here"), pytest.raises(CantDistribute, match='All weights') as e:
        learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.model is model and len(model) == n and len(learn.recorder.values) == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    saved = torch.load(tmp_path/'models'/'distrib-weights.pth')
    assert str(tmp_path/'models'/'distrib-weights.pth') in str(e.value)
    assert {*saved} == {*model.state_dict(), '3.weight', '3.bias'} and torch.equal(saved['0.weight'], model[0].weight)
    learn.remove_cbs(learn.grows_only_there)
    learn.fit(1)


class Stubborn(Callback):
    "Its own state can't be set as a whole"
    def __init__(self): self.n, self.rows, self.pid = 0, [], os.getpid()
    def after_epoch(self):
        self.n += 1
        self.rows.append(1)
    def __getstate__(self): return dict(vars(self))
    def __setstate__(self, state):
        if state['pid'] == os.getpid(): raise ValueError('no')
        vars(self).update(state)


def test_attributes_are_set_without_the_objects_own_way(two):
    learn = learner(cbs=[Stubborn(), Reports(Trial())])
    rows = learn.stubborn.rows
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert rows == [1] and learn.stubborn.n == 1
    assert learn.reports.trial.log.rows == [0] and len(learn.recorder.values) == 1
    assert learn.stubborn.learn is learn


# Tensors that grow

class Grows(nn.Module):
    "A layer that enlarges a tensor of its own, as observers of quantization do"
    def __init__(self, how, n):
        super().__init__()
        self.net = mlp()
        if how == 'buffer': self.register_buffer('seen', torch.zeros(n))
        else: self.seen = torch.zeros(n)
    def forward(self, x):
        self.seen.resize_(3)
        self.seen.fill_(1.)
        return self.net(x)*self.seen.mean()


class GrowsList(Callback):
    def __init__(self): self.seen, self.deep = torch.zeros(0), [torch.zeros(1)]
    def after_batch(self):
        if not self.training: return
        n = len(self.seen)
        self.seen.resize_(n+1)
        self.seen[n] = n
        self.deep[0].resize_(n+1)


@pytest.mark.few(4)
@pytest.mark.parametrize('n', [0, 1, 3, 8])
@pytest.mark.parametrize('how', ['buffer', 'attribute'])
def test_a_tensor_that_grows(two, how, n):
    learn = learner(model=Grows(how, n), cbs=GrowsList())
    seen, deep = learn.grows_list.seen, learn.grows_list.deep[0]
    with learn.distrib_ctx(nprocs=2, launcher=two):
        for _ in range(2): learn.fit(1)
    if how == 'buffer': assert learn.model.seen.tolist() == [1]*3
    assert learn.grows_list.seen is seen and seen.tolist() == [*range(10)]
    assert learn.grows_list.deep[0] is deep and len(deep) == 10
    learn.fit(1)
    assert seen.tolist() == [*range(20)]


def grow(t, a):
    t.resize_(5)
    a.resize(6, refcheck=False)
    return t.shape, a.shape


def test_arguments_that_grow(): assert ranch(2, grow, torch.zeros(2), np.zeros(3)) == [((5,), (6,))]*2


def test_variables_that_grow(main, two):
    exec('''
import torch, numpy as np
from fastai.callback.core import Callback
t, a = torch.zeros(0), np.zeros(1)
class Notes(Callback):
    def after_epoch(self):
        t.resize_(len(t)+1).fill_(2)
        a.resize(len(a)+1, refcheck=False)
''', main)
    t = main['t']
    learner(cbs=main['Notes']()).distrib_fit(2, nprocs=2, launcher=two)
    assert main['t'] is t and t.tolist() == [2, 2] and main['a'].tolist() == [0, 0, 0]


class Listed(nn.Module):
    "Has a list by a name as torch gives to its dicts of hooks"
    def __init__(self):
        super().__init__()
        self.net, self._own_hooks = mlp(), [print]
    def forward(self, x): return self.net(x)


def test_a_list_named_like_hooks(two):
    learn = learner(model=Listed())
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.model._own_hooks == [print] and len(learn.recorder.values) == 1


class CountsSteps(torch.optim.SGD):
    "Keeps a tensor in its groups, as optimizers of timm do"
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            g.setdefault('n', torch.zeros(()))
            g['n'] += 1


def test_a_tensor_in_the_groups_of_an_optimizer(two):
    "It owns its memory: else all of what came back would stay (`nothing_left` looks for that)"
    learn = learner(train=32, opt_func=functools.partial(OptimWrapper, opt=CountsSteps))
    learn.distrib_fit(1, nprocs=2, launcher=two)
    n = learn.opt.opt.param_groups[0]['n']
    assert n == 4
    learn.create_opt()
    learn.opt.opt.param_groups[0]['n'] = n
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.opt.opt.param_groups[0]['n'] is n and n == 8


def first(items): return items[0]


class Queued(torch.utils.data.Dataset):
    "Keeps an iterator over a loader, as torchio's `Queue` does"
    def __init__(self, data, n_processes=0): self.data, self.n, self.it = data, n_processes, None
    def begin(self):
        self.it = iter(torch.utils.data.DataLoader(self.data, collate_fn=first, num_workers=self.n))
        return self
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        try: return next(self.it)
        except StopIteration: return next(self.begin().it)


def test_data_that_names_itself_ends_the_search_for_its_parts():
    from types import SimpleNamespace
    from fastddp.payload.places import parts_of_data
    ds = SimpleNamespace()
    ds.items = ds.dataset = ds
    rows = [1, 2]
    ds.datasets = [SimpleNamespace(items=SimpleNamespace(items=rows))]
    sets,containers = parts_of_data([ds])
    assert list(containers) == [id(rows)] and len(sets) == 2


@pytest.mark.parametrize('n_processes', [0, 1])
def test_an_iterator_over_a_loader_is_refused_by_name(n_processes):
    learn = learner(train=8, data=lambda n, s=0: Queued(items(n), n_processes).begin())
    with pytest.raises(NotPicklable, match=r'learn.dls.train.dataset.it\b'): learn.distrib_fit(2, nprocs=2)
    # the traceback holds the iterators, and what a test leaves running is killed
    for dl in learn.dls if n_processes else (): dl.dataset.it._shutdown_workers()


def test_a_type_that_a_cell_says_how_to_pickle():
    "What the message for an object of a library's class says"
    class Of:
        def __init__(self): self.generator = (i for i in range(3))
    with pytest.raises(NotPicklable, match='copyreg.pickle'): ranch(2, len, [Of()])
    copyreg.pickle(Of, lambda o: (Of, ()))
    try: assert ranch(2, len, [Of()]) == [1, 1]
    finally: del copyreg.dispatch_table[Of]
