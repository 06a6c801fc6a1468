"""Learners that change something in a fit: what callbacks, metrics, models, losses, data, optimizers and cells hold.
comes_back/test_held.py fits each on workers and in one process, and compares all that can be reached, by `is`.

A case is a function that makes the learner, or `(learner, more)`: what else is compared, or a function that returns it.
Both are made anew for each of the two."""
import collections, dataclasses, functools, random, sys, threading, types, warnings
from copy import deepcopy
import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import ParamScheduler
from fastai.callback.training import GradientAccumulation
from fastai.data.all import Pipeline, Transform
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import AvgMetric, Learner, Metric
from fastai.metrics import AccumMetric, F1Score, accuracy
from fastai.optimizer import Adam, Lookahead, OptimWrapper, SGD
from fastcore.basics import noop
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils.data import DataLoader as TorchLoader, Sampler, Subset, TensorDataset, WeightedRandomSampler
from cases import holds
from losses import Scaled
from objects import Changing, LARGE, SMALL
from parity import items, learner, loaders, mlp

HELD = {}       # name -> what makes the learner


def held(make):
    "Puts the function into the table, under its name"
    add(make.__name__, make)
    return make


def add(name, make):
    "Puts what `make` makes into the table"
    assert name not in HELD, name
    HELD[name] = make


def in_main(text):
    "The namespace of a notebook in which a cell with this text has run"
    main = vars(sys.modules['__main__'])
    exec(text, main)
    return main


class Box: pass


# What callbacks hold, at any depth

class Trial:
    def __init__(self): self.log, self.best = Log(), None


class Log:
    __slots__ = 'rows', 'by_epoch', 'sums'
    def __init__(self): self.rows, self.by_epoch, self.sums = [], {}, np.zeros(2)


class Reports(Callback):
    def __init__(self): self.trial, self.tensors = Trial(), dict(a=[torch.zeros(2)])
    def after_epoch(self):
        log = self.trial.log
        log.rows.append(self.epoch)
        log.by_epoch[self.epoch] = log.rows
        log.sums += 1
        self.trial.best = self.epoch, log
        self.tensors['a'][0] += 1


@held
def deep_in_a_callback(): return learner(cbs=Reports())


class Changes(Callback):
    "Changes many objects in place, on each rank alike"
    def __init__(self, names): self.all = Changing(names)
    def after_epoch(self): self.all.change()


holds('Decisions', "Whatever is changed in place, of any kind and size, is bit by bit worker 0's")
for name, kinds in ('small', SMALL), ('large', LARGE):
    add(f'{name} objects of any kind', lambda kinds=kinds: learner(train=16, valid=4, cbs=Changes(kinds)))


class Renews(Callback):
    def __init__(self): self.by = dict(log=[0])
    def after_epoch(self): self.by['log'] = [*self.by['log'], 1]


@held
def what_a_fit_replaces():
    "A variable of the notebook keeps the old object"
    learn = learner(cbs=Renews())
    return learn, [learn.renews.by['log']]


def helper(x): return x


holds('Decisions', "What callbacks hold is the same object afterwards if it did not change")


class Keeps(Callback):
    "Holds what doesn't change"
    def __init__(self, learn):
        self.mine = [[1, 2], {'a': 1}, helper, Box, Box(), {1, 2}, torch.ones(3), np.ones(3), nn.Linear(2, 2),
                     nn.Linear(200, 200), pd.DataFrame(dict(a=[1])), random.Random(3)]
        self.learners = [learn, learn.model, learn.model[0], learn.model[0].weight, learn.dls.valid, learn.dls.train_ds,
                         learn.metrics[0], learn.loss_func, learn.recorder]
        self.new = learn.dls.valid.new(bs=4)


@held
def what_does_not_change():
    learn = learner(metrics=accuracy)
    learn.add_cb(Keeps(learn))
    return learn


class NamesOfTheLearner(Callback):
    def __init__(self):
        self.loss, self.pred, self.opt, self.logger, self.scaler, self.model, self.dl = [], [], {}, [], 1., None, None
    def before_fit(self): self.model, self.dl = deepcopy(self.learn.model), self.learn.dls.valid
    def before_epoch(self):
        # those of fastai's own callbacks
        for k in 'pbar', 'mbar', 'old_logger', 'autocast': setattr(self, k, [*vars(self).get(k, []), self.epoch])
    def after_epoch(self):
        for o in self.loss, self.pred, self.logger: o.append(self.epoch)
        self.opt[self.epoch], self.scaler = 'seen', self.scaler*2
        self.model[0].weight.data[:] = self.epoch


holds('Decisions', "Attributes of callbacks that have the name of one of the learner's, such as `loss` and `model`")
@held
def names_of_the_learner(): return learner(cbs=NamesOfTheLearner())


class LRFinder(Callback):
    "Of a notebook, as the fast.ai course makes one: it has fastai's name"
    def __init__(self): self.rates, self.losses = [], []
    def before_batch(self):
        if not self.training: return
        self.opt.set_hyper('lr', 1e-3*1.1**self.train_iter)
        self.rates.append(self.opt.hypers[-1]['lr'])
    def after_batch(self):
        if not self.training: return
        self.losses.append(float(self.loss))
        if len(self.losses) == 7: raise CancelFitException


@held
def a_finder_of_ones_own(): return learner(cbs=LRFinder())


class KeepsLoaders(Callback):
    def __init__(self): self.seen = []
    def before_fit(self):
        self.valid_dl = self.learn.dls.valid
        self.by_name = dict(valid=[self.learn.dls.valid])       # new objects, which are sent whole
    def before_train(self): self.seen.append(self.learn.dl)


holds('Decisions', "A loader of the fit that a callback keeps is the notebook's own, undivided")
@held
def loaders_that_a_callback_keeps(): return learner(cbs=KeepsLoaders())


class Leaves(Callback):
    "Sets attributes everywhere, and goes"
    def before_fit(self):
        self.model.told, self.dls.told, self.dls.train_ds.told = 'model', ['dls'], 'dataset'
        self.dls.train.after_batch.told, self.dls.train.told = 'pipeline', 'loader'
        self.dls.train.after_batch.fs[0].told = 'transform'
    def after_fit(self):
        self.file = open('/dev/null')
        self.file.close()
        self.learn.add_cb(Comes())
        self.learn.remove_cb(self)


class Comes(Callback): pass
class Items(list): pass


holds('Decisions', "Callbacks that leave or come in a fit, attributes that they set on model, loaders and transforms, "
      "exchanged loaders")
@held
def callbacks_that_come_and_go():
    learn = learner(data=lambda *a, **k: Items(items(*a, **k)), cbs=(cb := Leaves()))
    learn.dls.train.after_batch = Pipeline([Transform(noop)])
    return learn, [cb]


class OtherData(Callback):
    def before_fit(self):
        random.seed(5)      # loaders have a generator of their own
        self.learn.dls = DataLoaders(*(DataLoader(items(n, s=n), bs=8, num_workers=0) for n in (24, 9)))


@held
def exchanged_loaders(): return learner(cbs=OtherData())


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x): return self.net(x)


class OfAFit(Callback):
    "Has a model around the learner's, and an optimizer of its own, for the time of a fit"
    def before_fit(self):
        self.learn.model = Wrapped(self.model)
        self.learn.create_opt()
        self.opt.set_hypers(lr=.05)
    def after_fit(self): self.learn.model = self.model.net


@held
def a_model_and_an_optimizer_of_a_fit(): return learner(cbs=OfAFit(), opt_func=Adam)


class Grows(Callback):
    "Tensors that become longer in place"
    def __init__(self): self.seen, self.deep = torch.zeros(0), [torch.zeros(1)]
    def after_batch(self):
        if not self.training: return
        n = len(self.seen)
        self.seen.resize_(n+1)
        self.seen[n] = n
        self.deep[0].resize_(n+1)
        self.deep[0][n] = n


@held
def tensors_that_grow(): return learner(cbs=Grows())


class UsesUp(Callback):
    "Iterators of which some end in the first fit"
    def __init__(self): self.left = [iter('ab'), iter([1, 2]), reversed((1, 2)), iter(range(99))]
    def after_epoch(self):
        for o in self.left: next(o, None)


@held
def iterators_that_end(): return learner(cbs=UsesUp())


class AttrDict(dict):
    "A common idiom: its keys are its attributes"
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.__dict__ = self


class Missing(dict):
    def __missing__(self, key): return 7


class Views(Callback):
    "Writes by one way, and reads by another"
    def __init__(self):
        self.config, self.box, self.d, self.read = AttrDict(n=0), Box(), dict(n=0), []
        self.named = Box()
        self.named.__dict__ = Missing()
        self.attrs, self.keys, self.proxy = vars(self.box), self.d.keys(), types.MappingProxyType(self.d)
        own = np.zeros(4)
        self.tensors = [torch.zeros(4), torch.zeros(5000), torch.from_numpy(own)]
        self.arrays = [*(o.numpy()[1:] for o in self.tensors[:2]), own[1:]]
    def after_epoch(self):
        for t, a in zip(self.tensors, self.arrays):
            t[1] += 1
            a[1] += 2
            self.read += [a[0].item(), t[2].item()]
        self.config.n += 1
        self.named.n = self.epoch
        self.read.append(type(vars(self.named)).__name__)
        self.box.n = self.epoch
        self.d[self.epoch] = self.epoch
        self.config['seen'] = self.attrs['seen'] = self.d['n'] = self.epoch+5
        self.read += [self.config['n'], self.config.seen, self.attrs['n'], self.box.seen, self.proxy['n'], *self.keys]


@held
def views_of_dicts_and_of_attributes(): return learner(cbs=Views())


# Objects with slots, and such that say how they are pickled: as the metrics of torchmetrics do

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
    "Changes objects in each epoch, and makes new ones"
    def __init__(self, *objects): self.objects, self.new = objects, []
    def after_epoch(self):
        for o in self.objects:
            o.n += 1
            o.d[self.epoch] = 1
            self.new.append(type(o)())


@held
def slots():
    main = in_main(SLOTS)
    return learner(cbs=Notes(*(main[k]() for k in ('Slots', 'More', 'Data'))))


class WithSlots:
    "A data set whose attributes are in slots"
    __slots__ = 'pairs', 'level', 'seen'
    def __init__(self, pairs): self.pairs, self.level, self.seen = pairs, 0, []
    def __len__(self): return len(self.pairs)
    def __getitem__(self, i): return self.pairs[i]


class Raises(Callback):
    def after_epoch(self):
        ds = self.learn.dls.train_ds
        ds.level += 1
        ds.seen.append(self.epoch)


@held
def a_data_set_with_slots(): return learner(data=lambda n, s=0: WithSlots(items(n, s=s)), cbs=Raises())


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
        super().add(k)
        self.total += k
    def forward(self, x): return x


class SaysReduce(Says):
    "Is made by a function from what it counts"
    def __reduce__(self): return made, (self.n, self.rows)


def made(n, rows):
    res = SaysReduce()
    res.n, res.rows = n, rows
    return res


class SaysNumber:
    "Is made by a function from a number, as a logger is from its name"
    __slots__ = 'n'
    def __init__(self, n=0): self.n = n
    def add(self, k): self.n += k
    def __reduce__(self): return numbered, (self.n,)


class SaysItsNumber(SaysNumber):
    "With attributes"
    def __reduce__(self): return itself_numbered, (self.n,)


def numbered(n): return SaysNumber(n)
def itself_numbered(n): return SaysItsNumber(n)


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
    def accumulate(self, learn): self.o.n += len(learn.y)
    @property
    def value(self): return self.o.n


for kind in Says, SaysModule, SaysReduce, SaysNumber, SaysItsNumber:
    add(f'a callback counts in {kind.__name__}', lambda kind=kind: learner(cbs=Counts(kind())))
    add(f'a metric counts in {kind.__name__}', lambda kind=kind: learner(metrics=Counted(kind())))


class SaysLoss(SaysModule):
    def forward(self, out, y):
        if torch.is_grad_enabled(): self.add(1)
        return nn.functional.cross_entropy(out, y)


class SaysNet(SaysModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x):
        if self.training: self.add(1)
        return self.net(x)


@held
def a_callback_a_model_and_a_loss_say(): return learner(model=SaysNet(), loss_func=SaysLoss(), cbs=CountsItself())


# What else holds something: metrics, bound methods, loss functions, samplers, data sets, loggers

class Remembers(Metric):
    "Keeps a number of each phase, and of its last phase what it counts"
    def __init__(self): self.by_epoch = []
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += len(learn.y)
    @property
    def value(self):
        self.by_epoch.append(self.n)
        return self.n


class Matrix(Metric):
    "Counts by class, and collects more than a megabyte"
    name = 'matrix'
    def reset(self): self.counts, self.all = torch.zeros(3, 3), []
    def accumulate(self, learn):
        for y, out in zip(learn.y, learn.pred): self.counts[y, out.argmax()] += 1
        self.all.append(torch.zeros(2**18+1).mean())
    @property
    def value(self): return self.counts.trace()/self.counts.sum()


class Best(Metric):
    "The best of all epochs, which it remembers"
    name = 'best'
    def __init__(self): self.seen, self.last = [], None
    def reset(self): self.right = self.n = 0
    def accumulate(self, learn):
        self.right += (learn.pred.argmax(-1) == learn.y).sum().item()
        self.n += len(learn.y)
    @property
    def value(self):
        self.last = self.right/self.n
        self.seen.append(self.last)
        return max(self.seen)


class Right:
    "A function with a history"
    def __init__(self): self.calls, self.__name__ = [], 'right'
    def __call__(self, out, y):
        self.calls.append(len(y))
        return (out.argmax(-1) == y).float().mean()


holds('Decisions', "Attributes of metrics")
@held
def metrics(): return learner(metrics=[Remembers(), accuracy, Best(), Matrix(), AvgMetric(Right())])


def replaced_in_a_metric(name):
    "A metric in which a cell has replaced a method, in this object alone"
    seen, metric = [], AvgMetric(accuracy)
    plain = getattr(metric, name)
    def own(*args):
        seen.append(len(args) and len(args[0].y))
        plain(*args)
    setattr(metric, name, own)
    return learner(metrics=metric), [seen]


for name in 'accumulate', 'reset':
    add(f'a metric with its own {name}', functools.partial(replaced_in_a_metric, name))


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
    def hook(self, module, *_):
        if module.training: self.count()
    def more(self, name, module, *_): self.hook(module)
    def grad(self, g): self.count()
    def tfm(self, b):
        self.count()
        return b
    def sched(self, pos):
        self.count()
        return .01


def bound(role):
    meter = Meter()
    learn = learner(loss_func=meter.loss if role == 'loss' else None,
                    cbs=ParamScheduler({'lr': meter.sched}) if role == 'sched' else [])
    if role == 'metric': learn.metrics = [meter.metric]
    if role == 'hook': learn.model[0].register_forward_hook(meter.hook)
    if role == 'partial hook': learn.model[0].register_forward_hook(functools.partial(meter.more, 1))
    if role == 'grad': learn.model[0].weight.register_hook(meter.grad)
    if role == 'tfm': learn.dls.train.after_batch = meter.tfm
    return learn, [meter]


holds('Decisions', "What functions of metrics and hooks of the model collect in a validation is all of it, in order: "
      "each worker validates all batches if they reach something that they could change; one line names it")
def collecting(role):
    seen = []
    def metric(out, y):
        seen.append(len(y))
        return (out.argmax(-1) == y).float().mean()
    def hook(module, args, out):
        if not module.training: seen.append(out.detach())
    def before(name, module, args):
        if not module.training: seen.append((name, len(args[0])))
    learn = learner(metrics=metric if role == 'metric' else accuracy)
    if role == 'hook': learn.model[0].register_forward_hook(hook)
    if role == 'pre-hook': learn.model[0].register_forward_pre_hook(functools.partial(before, 'first'))
    return learn, [seen]


for role in 'metric', 'hook', 'pre-hook': add(f'a {role} collects', functools.partial(collecting, role))
for role in 'loss', 'metric', 'hook', 'partial hook', 'grad', 'tfm', 'sched':
    add(f'a method as {role}', functools.partial(bound, role))


class Curriculum(Callback):
    "Goes on from what it left on the data, the loss and the loaders in the last fit"
    def before_epoch(self):
        dl, loss = self.dls.train, self.learn.loss_func
        for o in self.dls.train_ds, self.dls.train_ds.dataset, loss, loss.inner, dl, dl.sampler, dl.batch_sampler:
            o.difficulty = getattr(o, 'difficulty', 0)+1
        self.dls.train_ds.history.append(self.epoch)
        dl.sampler.weights = dl.sampler.weights*2
        dl.sampler.order[0] += 1


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss()
    def forward(self, out, y): return self.inner(out, y)


holds('Decisions', "Attributes that callbacks set on data sets, samplers, torch's loaders, pipelines and the loss "
      "function")
@held
def data_sets_samplers_loss_and_torchs_loaders():
    data = Subset(Items(items(37)), range(37))
    sampler = WeightedRandomSampler(torch.ones(37), 37, generator=torch.Generator().manual_seed(3))
    data.history, sampler.order = [], np.zeros(3)
    dls = DataLoaders(TorchLoader(data, 4, sampler=sampler), TorchLoader(items(9, s=1), 4))
    learn = learner(loss_func=Inner(), cbs=Curriculum())
    learn.dls = dls
    return learn


class Lazily(Sampler):
    "Makes its generator when it needs it"
    def __init__(self, n, make, draw): self.n, self.make, self.draw, self.gen = n, make, draw, None
    def __len__(self): return self.n
    def __iter__(self):
        if self.gen is None: self.gen = self.make()
        return iter([int(o) for o in self.draw(self.gen, self.n)])


def lazily(make, draw):
    learn = learner()
    ds = TensorDataset(torch.arange(32.).view(8, 4), torch.arange(8) % 3)
    learn.dls = DataLoaders(*(TorchLoader(ds, 4, sampler=Lazily(8, make, draw)) for _ in range(2)))
    return learn


for name, make, draw in [
        ('torch', lambda: torch.Generator().manual_seed(3), lambda g, n: torch.randperm(n, generator=g)),
        ('numpy', lambda: np.random.default_rng(3), lambda g, n: g.permutation(n)),
        ('python', lambda: random.Random(3), lambda g, n: g.sample(range(n), n))]:
    add(f"a generator of {name}'s that a sampler makes", functools.partial(lazily, make, draw))


class Named:
    "A data set that holds the names of many files, and asks whether they are a list"
    def __init__(self, names): self.names, self.kind = names, type(names)
    def __len__(self): return 32
    def __getitem__(self, i):
        assert type(self.names) is self.kind and self.names[i].endswith('.jpg')
        return torch.ones(4), torch.tensor(i % 2)


class Renames(Callback):
    "Changes the list of names in place, and keeps it"
    def before_fit(self):
        names = self.dls.train_ds.names
        names[0] = 'first.jpg'
        del names[1]
        self.part, self.all = names[:3], names


def names(kind, n):
    data = [Named(kind([f'{i}.jpg' for i in range(n)])) for _ in range(2)]
    learn = learner(cbs=Renames())
    learn.dls = loaders(*data)
    return learn


for kind in list, L:
    for n in 100, 3_000: add(f'{n} names in a {kind.__name__}', functools.partial(names, kind, n))


class Table(list):
    def add(self, row): self.append(len(row))


@held
def rows_that_a_logger_collects():
    "`learn.logger` stays on rank 0 for the time of a fit, since progress puts its own there; not what it writes to"
    learn, rows = learner(), Table()
    learn.logger = rows.add
    return learn, [rows]


# Models

class Layers(Callback):
    "A buffer, a layer with its optimizer, an attribute"
    def before_fit(self):
        if hasattr(self.model, 'ema'): return
        self.model.register_buffer('ema', torch.zeros(3))
        self.model.append(nn.Linear(3, 3))
        for p in self.model[-1].parameters(): nn.init.constant_(p, .5)
        self.learn.create_opt()
        self.opt.set_hypers(lr=.05)
    def after_epoch(self):
        self.model.ema += 1
        self.model[0].epochs = self.epoch+1


holds('Weights', "A model that grows in the fit: buffers, layers, attributes")
@held
def a_model_that_grows(): return learner(cbs=Layers())


class Enlarges(nn.Module):
    "A layer that enlarges a tensor of its own, as observers of quantization do"
    def __init__(self, n):
        super().__init__()
        self.net = mlp()
        self.register_buffer('seen', torch.zeros(n))
    def forward(self, x):
        self.seen.resize_(3)
        self.seen.fill_(1.)
        return self.net(x)*self.seen.mean()


for n in 0, 1, 3, 8: add(f'a buffer of {n} that becomes one of 3', lambda n=n: learner(model=Enlarges(n)))


class Listed(nn.Module):
    "Has a list by a name as torch gives to its dicts of hooks"
    def __init__(self):
        super().__init__()
        self.net, self._own_hooks = mlp(), [print]
    def forward(self, x): return self.net(x)


@held
def a_list_named_like_hooks(): return learner(model=Listed())


class NamesHooks(Callback):
    "Has a dict by a name as torch gives to its dicts of hooks, which grows"
    def __init__(self): self._own_hooks = collections.OrderedDict(first=print)
    def after_epoch(self): self._own_hooks[f'of epoch {self.epoch}'] = print


@held
def a_dict_named_like_hooks(): return learner(cbs=NamesHooks())


class ToALayer(Callback):
    def after_epoch(self): self.learn.notes['epochs'][0].append(torch.ones(2)*self.epoch)


@held
def a_result_that_a_layer_holds_too():
    "What a layer alone holds may be a cache and stays; here the learner holds it as well, deeper"
    learn = learner(cbs=ToALayer())
    learn.model[0].kept = []
    learn.notes = dict(epochs=[learn.model[0].kept])
    return learn


class Doubled(nn.Module):
    "A parametrization of the user's own"
    def forward(self, w): return 2*w
    def right_inverse(self, w): return w/2


class Own(nn.Linear):
    "A layer of the user's own"
    def forward(self, x): return super().forward(x)+1


def parametrized(kind, *args, model=None):
    model = model or mlp()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')     # of torch's old weight_norm
        kind(model[0], *args)
    return model


def two_of_a_layer():
    model = parametrized(parametrizations.weight_norm)
    return parametrized(parametrize.register_parametrization, 'bias', Doubled(), model=model)


MODELS = dict(weight_norm=lambda: parametrized(parametrizations.weight_norm),
              orthogonal=lambda: parametrized(parametrizations.orthogonal),
              spectral_norm=lambda: parametrized(parametrizations.spectral_norm),
              registered=lambda: parametrized(parametrize.register_parametrization, 'weight', Doubled()),
              two_of_a_layer=two_of_a_layer,
              own_layer=lambda: parametrized(parametrizations.weight_norm, model=nn.Sequential(Own(4, 3))),
              of_hooks=lambda: parametrized(weight_norm),
              pruned=lambda: parametrized(prune.l1_unstructured, 'weight', .5))
for name, model in MODELS.items(): add(name, lambda model=model: learner(model=model()))


class Teacher(Callback):
    "Has a model, which changes"
    def __init__(self, net): self.net = net
    def after_epoch(self):
        for p in self.net.parameters(): p.data.fill_(self.epoch+1.)


class Student(Callback):
    "Makes a model in a worker"
    def before_fit(self):
        self.net = parametrized(parametrizations.weight_norm)
        for p in self.net.parameters(): p.data.fill_(1)


for name in 'weight_norm', 'own_layer':
    add(f"a callback's model with {name}", lambda name=name: learner(cbs=Teacher(MODELS[name]())))
add('a model that a callback makes', lambda: learner(cbs=Student()))


# Optimizers, and gradients that accumulation left

class Counting(torch.optim.SGD):
    "Its rate falls by what it counts in an attribute of its own; it keeps tensors, one of them in its groups"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.slow, self.seen = 0, torch.zeros(3), []
    def step(self, closure=None):
        self.count += 1
        self.slow += 1
        self.seen.append(self.count)
        for g in self.param_groups:
            g['lr'] = .1/self.count
            g.setdefault('n', torch.zeros(()))
            g['n'] += 1
        return super().step(closure)


holds('Weights', "An optimizer's own attributes (`Lookahead`'s count and slow weights) go on in the next fit")
for name, opt_func in [('momentum', functools.partial(SGD, mom=.9)), ('Adam', Adam),
                       ('AdamW', functools.partial(OptimWrapper, opt=torch.optim.AdamW)),
                       ('Lookahead', lambda *args, **kwargs: Lookahead(SGD(*args, **kwargs), k=4)),
                       ('an own optimizer', functools.partial(OptimWrapper, opt=Counting))]:
    add(name, lambda opt_func=opt_func: learner(opt_func=opt_func))


class Steps(Callback):
    "Steps a scheduler of torch's, and averages the weights"
    order, schedule = 70, None
    def before_fit(self):
        if self.schedule is not None: return
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt.opt, 1, .5)
        self.averaged = torch.optim.swa_utils.AveragedModel(self.model)
    def after_batch(self):
        if self.training: self.averaged.update_parameters(self.model)
    def after_epoch(self): self.schedule.step()


@held
def a_scheduler_and_averages_of_torch():
    return learner(opt_func=functools.partial(OptimWrapper, opt=torch.optim.SGD), cbs=Steps())


holds('Weights', "Gradients that accumulation left at the end of a fit go into the next one")
@held
def gradients_that_accumulation_left():
    "37 items, 16 of which make a step: 5 are left, and go into the next fit's first step"
    return learner(cbs=GradientAccumulation(16))


@held
def gradients_of_a_loss_that_accumulation_left():
    learn = learner(cbs=GradientAccumulation(16), loss_func=Scaled())
    learn.splitter = lambda m: [[*m.parameters(), *learn.loss_func.parameters()]]
    return learn


class FreezesLate(Callback):
    "Trains all in the first epoch, then only the last layer"
    def before_epoch(self): self.learn.unfreeze() if self.epoch == 0 else self.learn.freeze()


@held
def what_was_trained_and_is_frozen():
    "Its gradient is zero, not None, so it decays: within a fit, from one fit to the next, and in the notebook"
    return learner(splitter=lambda m: [[*m[0].parameters()], [*m[2].parameters()]], wd=.1, cbs=FreezesLate())


# Variables of cells

CELL = '''
import torch
from collections import Counter
from fastai.callback.core import Callback, CancelFitException
import torch.nn.functional as F
import numpy as np, pandas as pd

losses, seen, by_epoch, epochs, weights = [], set(), {}, Counter(), np.zeros(3)
n, best, average, frame = 0, None, torch.zeros(2), pd.DataFrame(dict(loss=[]))
growing, longer = torch.zeros(0), np.zeros(1)

class Meter:
    def __init__(self): self.values = []
    def add(self, v): self.values.append(v)
meter = Meter()
class Box: pass
box = Box()
box.inner = Box()
box.inner.seen = []

def note(cb):
    global n, best
    n += 1
    best = min(best or 9., float(cb.loss))
    losses.append(float(cb.loss))
    meter.add(n)

class Notes(Callback):
    history, steps = [], 0
    def after_epoch(self):
        box.inner.seen.append(self.epoch)
        growing.resize_(len(growing)+1).fill_(2)
        longer.resize(len(longer)+1, refcheck=False)
    def after_batch(self):
        if not self.training: return
        note(self)
        seen.add(self.epoch)
        epochs.update([self.epoch])
        by_epoch.setdefault(self.epoch, []).append(self.iter)
        weights[1] += 1
        average[0] += 1
        frame.loc[len(frame)] = float(self.loss)
        Notes.history.append(self.iter)
        Notes.steps += 1

def make_loss():
    calls = []
    def loss(out, y):
        if torch.is_grad_enabled(): calls.append(len(calls))
        loss.count = len(calls)
        return F.cross_entropy(out, y)
    return loss, calls
loss, calls = make_loss()

outputs = []
def hook(module, args, out):
    outputs.append(out.shape[1])
rated = []
def rate(out, y, calls=[], *, kinds={}):
    rated.append(len(rated))
    calls.append(len(calls))
    kinds[len(kinds)] = type(out).__name__
    return (out.argmax(-1) == y).float().mean()
'''
NAMES = '''losses seen by_epoch epochs weights n best average frame growing longer meter box Notes calls loss outputs
rated hook rate Meter note make_loss'''.split()


holds('Decisions', "What code of cells writes into its variables: globals, variables of enclosing functions, default "
      "arguments, attributes of classes and functions, into the same objects; what can't come back is named. After "
      "`distrib_resume('distrib')` in a new kernel, too")
@held
def variables_of_cells():
    main = in_main(CELL)
    learn = learner(loss_func=main['loss'], metrics=main['rate'], cbs=main['Notes']())
    learn.model[0].register_forward_hook(main['hook'])
    return learn, lambda: [*(main[k] for k in NAMES), main['Notes'].history, main['Notes'].steps]
