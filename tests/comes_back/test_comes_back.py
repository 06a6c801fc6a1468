"""After a distributed fit the notebook has what a local fit would have left, in every corner; and nothing else."""
from fastddp.base.errors import CantDistribute
import os, random, signal
from copy import deepcopy
from functools import partial
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastcore.basics import noop
from fastcore.foundation import L
from fastai.data.all import Pipeline, Transform
from fastai.data.core import DataLoaders
from fastai.learner import Learner, Metric
from fastai.metrics import AccumMetric, F1Score, accuracy
from fastai.optimizer import Lookahead, OptimWrapper, SGD
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, Subset, WeightedRandomSampler
from fastddp.all import *
from traces import PASSING, children, environment, memfds
from learners import make_learner, mlp, seed_all
from losses import Scaled
from parity import assert_same, items, largest, learner, loaders, seed, alone_like, warm

pytestmark = pytest.mark.timeout(120)


class Tensors(Callback):
    "Keeps on rank 0 what the weights were when the fit ended"
    def __init__(self): self.at_end, self.steps, self.layer = None, [], None
    def after_batch(self): self.steps.append(self.epoch)
    def after_fit(self):
        self.at_end, self.layer = [p.detach().clone() for p in self.learn.model.parameters()], self.learn.model[0]


@pytest.fixture(scope='module')
def fitted():
    "A learner before and after `distrib_fit_one_cycle(2)` on two workers"
    learn = make_learner(cbs=Tensors(),
                         model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
    learn.create_opt()
    before = dict(model=learn.model, params=list(learn.model.parameters()),
                  types=[type(m) for m in learn.model.modules()], cbs=list(learn.cbs),
                  loaders=list(learn.dls.loaders), logger=learn.logger, opt=learn.opt, attrs=set(vars(learn)),
                  env=dict(os.environ),
                  rng=learn.dls.train.rng.getstate(), handler=signal.getsignal(signal.SIGINT),
                  steps=learn.tensors.steps)
    learn.distrib_fit_one_cycle(2, 0.05, nprocs=2)
    return learn, before


def test_weights_are_rank_0s_in_the_same_parameters(fitted):
    learn, before = fitted
    assert learn.model is before['model'] and [type(m) for m in learn.model.modules()] == before['types']
    assert all(p is q and p.requires_grad for p, q in zip(learn.model.parameters(), before['params'], strict=True))
    assert all(torch.equal(p, q) for p, q in zip(learn.model.parameters(), learn.tensors.at_end, strict=True))


def test_recorder_is_as_after_a_local_fit(fitted):
    learn, _ = fitted
    local = make_learner(bs=32)
    local.fit_one_cycle(2, 0.05)
    mine, theirs = learn.recorder, local.recorder
    assert mine.metric_names == theirs.metric_names and mine.iters == theirs.iters
    assert len(mine.values) == 2 and [len(v) for v in mine.values] == [len(v) for v in theirs.values]
    assert mine.lrs == pytest.approx(theirs.lrs) and len(mine.losses) == len(theirs.losses)
    assert {k: pytest.approx(v) for k, v in theirs.hps.items()} == mine.hps
    assert learn.final_record == mine.values[-1]


def test_counters_and_callbacks(fitted):
    learn, before = fitted
    local = make_learner(bs=32)
    local.fit_one_cycle(2, 0.05)
    for name in 'epoch', 'n_epoch', 'train_iter', 'loss', 'training':
        assert getattr(learn, name) == getattr(local, name), name
    assert learn.pct_train == pytest.approx(local.pct_train) and learn.smooth_loss.shape == local.smooth_loss.shape
    assert list(learn.cbs) == before['cbs'] and learn.tensors.steps is before['steps']
    # every worker validates all batches, since this callback handles them
    n_train, n_valid = len(local.dls.train), len(learn.dls.valid)
    assert learn.tensors.steps == [0]*(n_train+n_valid) + [1]*(n_train+n_valid)
    assert learn.tensors.layer is learn.model[0]


def test_nothing_else_changed(fitted):
    learn, before = fitted
    assert all(a is b for a, b in zip(learn.dls.loaders, before['loaders'], strict=True))
    assert learn.logger == before['logger'] and learn.opt is before['opt']
    assert environment() == {k: v for k, v in before['env'].items() if k not in PASSING}
    assert signal.getsignal(signal.SIGINT) is before['handler'] and not torch.distributed.is_initialized()
    new = set(vars(learn)) - before['attrs']
    local = make_learner()
    attrs = set(vars(local))
    local.fit_one_cycle(1)
    assert new <= set(vars(local)) - attrs, 'only what a local fit leaves behind too'
    assert learn.dls.train.rng.getstate() != before['rng']


@pytest.mark.parametrize('opt_func', [partial(SGD, mom=0.9), partial(OptimWrapper, opt=torch.optim.AdamW)],
                         ids=['sgd', 'adamw'])
def test_two_fits_are_one_of_two_epochs(opt_func):
    once, twice = make_learner(opt_func=opt_func), make_learner(opt_func=opt_func)
    once.distrib_fit(2, 0.01, nprocs=2)
    with twice.distrib_ctx(nprocs=2):
        twice.fit(1, 0.01)
        twice.fit(1, 0.01)
    for a, b in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert [h['lr'] for h in once.opt.hypers] == [h['lr'] for h in twice.opt.hypers]


def test_state_continues_in_a_local_fit():
    mixed, local = make_learner(bs=8), make_learner(bs=16)
    mixed.distrib_fit(1, 0.01, nprocs=2)
    mixed.dls.train.bs = mixed.dls.valid.bs = 16
    mixed.fit(1, 0.01)
    local.fit(2, 0.01)
    for a, b in zip(mixed.model.parameters(), local.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


class Boom(Callback):
    "Fails in the second epoch, or at once, on one of two workers"
    def __init__(self, epoch): self.at = epoch
    def before_batch(self):
        is_here = os.environ.get('RANK', '1') == '1'
        if is_here and self.epoch == self.at and self.training and self.iter == 1: raise ValueError('boom')


def test_a_failure_keeps_the_last_complete_epoch():
    learn, ref = make_learner(cbs=Boom(1)), make_learner()
    with pytest.raises(RankRaised, match='boom') as e: learn.distrib_fit(3, 0.01, nprocs=2)
    assert isinstance(e.value.__cause__, ValueError) and 'end of epoch 0' in str(e.value)
    ref.distrib_fit(1, 0.01, nprocs=2)
    for a, b in zip(learn.model.parameters(), ref.model.parameters(), strict=True): assert torch.equal(a, b)
    assert len(learn.recorder.values) == 1 and not torch.distributed.is_initialized()


class Heavy(nn.Module):
    "Carries 80 MB of frozen weights along, enough for memory to be reserved for states"
    def __init__(self):
        super().__init__()
        self.small, self.big = mlp(), nn.Parameter(torch.rand(20_000_000), requires_grad=False)
    def forward(self, x): return self.small(x)


class Marks(Callback):
    "Writes the number of the step into the frozen weights, in the notebook's process too"
    order = 100
    def after_batch(self):
        if self.training: self.learn.model.big.data[::1_000_000] = self.learn.train_iter


def test_large_states_come_back_whole():
    learn = make_learner(model=Heavy, cbs=[Marks(), Boom(5)], bs=64)
    start, before = learn.model.big.clone(), memfds()
    steps = len(learn.dls.train)
    def check(n_steps):
        want = start.clone()
        if n_steps: want[::1_000_000] = n_steps
        assert torch.equal(learn.model.big, want)
    with learn.distrib_ctx(nprocs=2, batch='global'):
        for n in (1, 3, 2):
            learn.fit(n, 0.01)
            check(n*steps)
        blocks = {os.stat(o.split()[0]).st_ino for o in memfds()-before}      # a mapping keeps a descriptor of its own
        assert len(blocks) <= 1+2+2, 'data, results of two ranks, the newest state of either kind'
        learn.boom.at = 2
        with pytest.raises(RankRaised, match='end of epoch 1'): learn.fit(4, 0.01)
        check(2*steps)
        learn.boom.at = 0
        with pytest.raises(RankRaised, match='learn is unchanged'): learn.fit(1, 0.01)
        check(2*steps)
        learn.boom.at = None
        learn.fit(1, 0.01)
        check(steps)


def test_a_failure_in_the_first_epoch_changes_nothing():
    learn = make_learner(cbs=Boom(0))
    weights, attrs, cbs = [p.clone() for p in learn.model.parameters()], dict(vars(learn)), list(learn.cbs)
    with pytest.raises(RankRaised, match='learn is unchanged'): learn.distrib_fit(1, 0.01, nprocs=2)
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), weights))
    assert list(learn.cbs) == cbs and learn.opt is None and vars(learn).keys() == attrs.keys()
    learn.remove_cb(learn.boom)
    learn.distrib_fit(1, 0.01, nprocs=2)
    assert not all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), weights))


def test_what_changes_between_two_fits_of_a_block_is_what_trains():
    learn, others = make_learner(), children()
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1, 0.01)
        workers = children()-others
        with torch.no_grad(): learn.model[0].weight.zero_()
        learn.model[0].weight.requires_grad_(False)
        learn.model[0].weight.grad = None       # with zeros, fastai's Adam moves it on
        learn.fit(1, 0.01)
        assert len(workers) == 2 and children()-others == workers, 'the workers stay'
    assert not learn.model[0].weight.any() and not learn.model[0].weight.requires_grad


def test_fits_that_others_patched_in():
    from fastai.learner import Learner
    def fit_twice(self, n, lr): self.fit(n, lr); self.fit(n, lr/2)
    Learner.fit_twice = fit_twice
    try:
        learn = make_learner()
        learn.distrib('fit_twice', 1, 0.01, nprocs=2)
        assert learn.opt.hypers[0]['lr'] == 0.005
    finally: del Learner.fit_twice


@pytest.mark.parametrize('name,args', [('fit_flat_cos', (1,)), ('fit_sgdr', (1, 1)), ('fine_tune', (1,))])
def test_the_other_words(name, args):
    learn = make_learner(splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    start = [p.clone() for p in learn.model.parameters()]
    getattr(learn, f'distrib_{name}')(*args, nprocs=2)
    now = list(learn.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(start, now)) and all(p.requires_grad for p in now)


def test_signatures_show_both_the_methods_and_our_options():
    import inspect
    from fastai.learner import Learner
    names = list(inspect.signature(Learner.distrib_fit_one_cycle).parameters)
    assert names[:4] == ['self', 'n_epoch', 'lr_max', 'div'] and {'nprocs', 'gpus', 'sync_bn', 'see'} <= set(names)


def test_one_rank_in_this_process_is_plain_fastai_to_the_bit():
    def net(): return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    a, b = make_learner(model=net), make_learner(model=net)
    seed_all(3)
    a.distrib_fit_one_cycle(2, launcher=InProcess())
    after_a = torch.rand(1)
    seed_all(3)
    b.fit_one_cycle(2)
    after_b = torch.rand(1)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert a.recorder.losses == b.recorder.losses and a.recorder.values == b.recorder.values and after_a == after_b


def test_factories_make_what_cannot_travel():
    def net():
        m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        m.handle = open(os.devnull)
        return m
    learn, plain = make_learner(model=net), make_learner()
    learn.distrib_fit(1, 0.01, nprocs=2, model_factory=net)
    plain.distrib_fit(1, 0.01, nprocs=2)
    for a, b in zip(learn.model.parameters(), plain.model.parameters(), strict=True): assert torch.equal(a, b)
    learn.model.handle.close()


def test_save_model_callback_writes_one_file(tmp_path):
    learn = make_learner(path=tmp_path, cbs=SaveModelCallback(fname='best'))
    learn.distrib_fit(2, 0.01, nprocs=2)
    saved = torch.load(tmp_path/'models'/'best.pth')
    assert [f.name for f in (tmp_path/'models').iterdir()] == ['best.pth']
    assert all(torch.equal(saved[k], v) for k, v in learn.model.state_dict().items())


class Says(Callback):
    def after_epoch(self): print(f'epoch {self.epoch} is over')


def test_see_all_ranks(capsys):
    "Rank 0 as it is, the others with a prefix; without `see`, rank 0 alone"
    for see, said in (('all', 1), ((0,), 0)):
        make_learner(n=64, cbs=[Says()]).distrib_fit(1, nprocs=2, see=see)
        out = capsys.readouterr().out
        assert out.count('[rank 1] epoch 0 is over\n') == said and out.count('epoch 0 is over') == said+1


class Named:
    "A data set that holds the names of many files, and asks whether they are a list"
    def __init__(self): self.names = [f'{i}.jpg' for i in range(20_000)]
    def __len__(self): return 32
    def __getitem__(self, i):
        assert isinstance(self.names, list) and self.names[i-32] == f'{19_968+i}.jpg'
        return torch.ones(8), torch.tensor(i%2)


class Notes(Callback):
    "Keeps what the worker has for a list of names, and a part of it"
    def before_fit(self):
        names = self.dls.train_ds.names
        self.had, self.part, self.all = type(names).__name__, names[:3], names


def test_long_lists_of_names_are_lists():
    dls = DataLoaders.from_dsets(Named(), Named(), bs=4, device='cpu', num_workers=2)
    learn = Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss(), lr=0.05)
    learn.distrib_fit(1, nprocs=2, cbs=(notes := Notes()))
    assert notes.had == 'list' and notes.part == ['0.jpg', '1.jpg', '2.jpg']
    assert type(notes.all) is list and notes.all == learn.dls.train_ds.names and type(learn.dls.train_ds.names) is list


class Ones:
    "A data set that holds the names of many files"
    def __init__(self, names): self.names = names
    def __len__(self): return 32
    def __getitem__(self, i): return torch.ones(8), torch.tensor(i%2)


class Renames(Callback):
    "Changes the list of names in place"
    def before_fit(self):
        names = self.dls.train_ds.names
        names[0] = 'first.jpg'
        del names[1]


@pytest.mark.parametrize('kind', [list, L])
@pytest.mark.parametrize('n', [100, 20_000])
def test_a_list_that_a_fit_changes_comes_back(kind, n):
    names, others = (kind([f'{i}.jpg' for i in range(n)]) for _ in range(2))
    dls = DataLoaders.from_dsets(Ones(names), Ones(others), bs=4, device='cpu')
    learn = Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss(), lr=0.05)
    learn.distrib_fit(1, nprocs=2, cbs=Renames())
    assert dls.train_ds.names is names and [*names[:2]] == ['first.jpg', '2.jpg'] and len(names) == n-1
    assert dls.valid_ds.names is others and [*others[:2]] == ['0.jpg', '1.jpg'] and len(others) == n


# In every corner

@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Counting(torch.optim.SGD):
    "Its rate falls by what it counts in an attribute of its own; it keeps a tensor, too"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.slow, self.seen = 0, torch.zeros(3), []
    def step(self, closure=None):
        self.count += 1
        self.slow += 1
        self.seen.append(self.count)
        for g in self.param_groups: g['lr'] = .1/self.count
        return super().step(closure)


def lookahead(*args, **kwargs): return Lookahead(SGD(*args, **kwargs), k=4)


@pytest.mark.holds('Weights', "An optimizer's own attributes (`Lookahead`'s count and slow weights) go on in the next "
                   "fit")
@pytest.mark.parametrize('opt_func', [lookahead, partial(OptimWrapper, opt=Counting)],
                         ids=['lookahead', 'own'])
def test_an_optimizers_own_attributes_go_on(opt_func, two):
    "Two fits of an epoch are one process's two"
    learn = learner(opt_func=opt_func)
    one = alone_like(learn, 2)
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        learn.fit(1)
    seed(1)
    one.fit(1)
    one.fit(1)
    assert_same(learn, one)
    a, b = (getattr(o.opt, 'opt', o.opt) if 'count' not in vars(o.opt) else o.opt for o in (learn, one))
    assert a.count == b.count > 0
    if hasattr(b, 'seen'): assert (a.seen, a.slow.tolist()) == (b.seen, b.slow.tolist())


def grads(learn): return [torch.zeros_like(p) if p.grad is None else p.grad for p in learn.model.parameters()]


@pytest.mark.holds('Weights', "Gradients that accumulation left at the end of a fit go into the next one")
def test_gradients_that_accumulation_left_travel_both_ways(two):
    "37 items, 16 of which make a step: 5 are left, and go into the next fit's first step"
    learn = learner(cbs=GradientAccumulation(16))
    one = alone_like(learn, 2)
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        first = [g.clone() for g in grads(learn)]
        learn.fit(1)
    seed(1)
    one.fit(1)
    assert largest(first, grads(one)) < 1e-6 < max(float(g.abs().max()) for g in first)
    one.fit(1)
    assert_same(learn, one)
    assert largest(grads(learn), grads(one)) < 1e-6


def test_gradients_of_a_loss_that_accumulation_left(two):
    "They are averaged, and travel both ways, as those of the model"
    learn = learner(cbs=GradientAccumulation(16), loss_func=Scaled())
    one = alone_like(learn, 2)
    for o in learn, one: o.splitter = lambda m, loss=o.loss_func: [[*m.parameters(), *loss.parameters()]]
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        first = learn.loss_func.scale.grad.clone()
        learn.fit(1)
    seed(1)
    one.fit(1)
    assert largest([first], [one.loss_func.scale.grad]) < 1e-6 < float(first.abs().max())
    one.fit(1)
    assert_same(learn, one)
    assert largest([learn.loss_func.scale], [one.loss_func.scale]) < 1e-5
    assert largest([learn.loss_func.scale.grad], [one.loss_func.scale.grad]) < 1e-6


class FreezesLate(Callback):
    "Trains all in the first epoch, then only the last layer"
    def before_epoch(self): self.learn.unfreeze() if self.epoch == 0 else self.learn.freeze()


def two_groups(model): return [[*model[0].parameters()], [*model[2].parameters()]]


def test_what_was_trained_and_is_frozen_decays_as_in_fastai(two):
    "Its gradient is zero, not None: within a fit, from one fit to the next, and in the notebook"
    learn = learner(splitter=two_groups, wd=.1)
    one = alone_like(learn, 2, 'global')
    def on_workers(*args, **kwargs): learn.distrib_fit(*args, nprocs=2, launcher=two, batch='global', **kwargs)
    for o, fit in (learn, on_workers), (one, one.fit):
        seed(1)
        fit(2, cbs=FreezesLate())
        for _ in range(2): fit(1)
    assert_same(learn, one)
    for o in learn, one:
        seed(2)
        o.fit(1)
    assert_same(learn, one)


class Grows(Callback):
    "A buffer, a layer with its optimizer, an attribute"
    def before_fit(self):
        if hasattr(self.model, 'ema'): return
        self.model.register_buffer('ema', torch.zeros(3))
        self.model.append(nn.Linear(3, 3))
        self.learn.create_opt()
        self.opt.set_hypers(lr=.05)
    def after_epoch(self):
        self.model.ema += 1
        self.model[0].epochs = self.epoch+1


@pytest.mark.holds('Weights', "A model that grows in the fit: buffers, layers, attributes")
def test_a_model_that_grows(two):
    learn = learner()
    model, first = learn.model, learn.model[0]
    for _ in range(2): learn.distrib_fit(2, nprocs=2, launcher=two, cbs=Grows())
    assert learn.model is model and model[0] is first and len(model) == 4
    assert (model.ema.tolist(), first.epochs) == ([4]*3, 2)
    assert {*map(id, model.parameters())} == {id(p) for pg in learn.opt.param_lists for p in pg}
    learn.fit(1)


class Holds(nn.Module):
    "A layer that can't travel"
    def __init__(self):
        super().__init__()
        self.layer, self.file = nn.Linear(3, 3), open('/dev/null')
    def forward(self, x): return self.layer(x)


class GrowsBadly(Callback):
    def before_fit(self):
        self.model[0].told = 'something'
        self.model.append(Holds())
        self.learn.create_opt()


def test_a_model_that_grows_by_what_cannot_travel_does_not_cost_the_training(two, tmp_path):
    learn = learner()
    learn.path = tmp_path
    learn.fit(1)
    before, model = [p.clone() for p in learn.model.parameters()], learn.model
    with pytest.warns(UserWarning, match="can't be sent"), pytest.raises(CantDistribute, match='All weights of'):
        learn.distrib_fit(2, nprocs=2, launcher=two, cbs=GrowsBadly())
    assert learn.model is model and len(model) == 3 and model[0].told == 'something' and len(learn.recorder.values) == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    saved = torch.load(tmp_path/'models'/'distrib-weights.pth')
    assert {'3.layer.weight', '3.layer.bias'} < {*saved} and torch.equal(saved['0.weight'], model[0].weight)
    learn.opt = None
    learn.fit(1)


class Leaves(Callback):
    "Sets attributes everywhere, and goes"
    def before_fit(self):
        self.model.told, self.dls.told, self.dls.train_ds.told = 'model', ['dls'], 'dataset'
        self.dls.train.after_batch.fs[0].told = 'transform'
    def after_fit(self):
        self.file = open('/dev/null')
        self.file.close()
        self.learn.add_cb(Comes())
        self.learn.remove_cb(self)


class Comes(Callback): pass


class Items(list): pass


@pytest.mark.holds('Decisions', "Callbacks that leave or come in a fit, attributes that they set on model, loaders "
                   "and transforms, exchanged loaders")
def test_attributes_and_callbacks_that_come_and_go(two):
    learn = learner(data=lambda *a, **k: Items(items(*a, **k)))
    learn.dls.train.after_batch = Pipeline([Transform(noop)])
    cb, ds = Leaves(), learn.dls.train_ds
    learn.add_cb(cb)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert (learn.model.told, learn.dls.told) == ('model', ['dls'])
    assert cb not in learn.cbs and [type(o) for o in learn.cbs].count(Comes) == 1 and cb.file.closed
    assert learn.dls.train_ds is ds and ds.told == 'dataset' and learn.dls.train.after_batch.fs[0].told == 'transform'


class Remembers(Metric):
    "Keeps a number of each phase, and of its last phase what it counts"
    def __init__(self): self.by_epoch = []
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += len(learn.y)
    @property
    def value(self):
        self.by_epoch.append(self.n)
        return self.n


@pytest.mark.holds('Decisions', "Attributes of metrics")
def test_attributes_of_metrics_come_back(two):
    "Those of a replayed one, of a mean, and of one that keeps all predictions as far as they are numbers"
    keeps = AccumMetric(lambda out, y: 0., flatten=False)
    learn, n = learner(metrics=[Remembers(), accuracy, keeps]), 21
    learn.distrib_fit(2, nprocs=2, launcher=two)
    remembers, mean, _ = learn.metrics
    assert remembers.by_epoch == [n]*2 and remembers.n == n
    assert mean.count == n and float(mean.value) == pytest.approx(learn.recorder.values[-1][3])
    one = learner(metrics=[Remembers(), accuracy])
    one.fit(2)
    assert vars(one.metrics[0]) == vars(remembers)


class Matrix(Metric):
    "Counts by class, and collects more than a megabyte"
    name = 'matrix'
    def reset(self): self.counts, self.all = torch.zeros(3, 3), []
    def accumulate(self, learn):
        for y, out in zip(learn.y, learn.pred): self.counts[y, out.argmax()] += 1
        self.all.append(torch.zeros(2**18+1))
    @property
    def value(self): return self.counts.trace()/self.counts.sum()


def test_what_a_metric_has_counted_comes_back(two):
    learn = learner(metrics=[Matrix(), F1Score(average='macro')])
    learn.distrib_fit(2, nprocs=2, launcher=two)
    matrix, f1 = learn.metrics
    assert matrix.counts.sum() == 21 and [float(m.value) for m in (matrix, f1)] == learn.recorder.values[-1][2:]
    assert len(matrix.all) == len(learn.dls.valid)
    matrix.counts = None
    learn.distrib_validate(nprocs=2, launcher=two)
    assert matrix.counts.sum() == 21
    assert float(learn.recorder.loss.value) == pytest.approx(learn.recorder.values[-1][0])


class NamesOfTheLearner(Callback):
    "Its attributes have names that the learner has, too"
    def __init__(self):
        self.loss, self.pred, self.opt, self.logger, self.scaler, self.model, self.dl = [], [], {}, [], 1., None, None
    def before_fit(self): self.model, self.dl = deepcopy(self.learn.model), self.learn.dls.valid
    def after_epoch(self):
        for o in self.loss, self.pred, self.logger: o.append(self.epoch)
        self.opt[self.epoch], self.scaler = 'seen', self.scaler*2
        self.model[0].weight.data[:] = self.epoch


@pytest.mark.holds('Decisions', "Attributes of callbacks that have the name of one of the learner's, such as `loss` "
                   "and `model`")
def test_attributes_named_as_the_learners(two):
    learn, cb = learner(), NamesOfTheLearner()
    loss = cb.loss
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=cb)
    assert cb.loss is loss == cb.pred == cb.logger == [0, 1] and (cb.opt, cb.scaler) == ({0: 'seen', 1: 'seen'}, 4.)
    assert (cb.model[0].weight == 1).all() and cb.model is not learn.model and cb.dl is learn.dls.valid


class KeepsLoaders(Callback):
    def __init__(self): self.seen = []
    def before_fit(self):
        self.valid_dl = self.learn.dls.valid
        self.by_name = dict(valid=[self.learn.dls.valid])       # new objects, which are sent whole
    def before_train(self): self.seen.append(self.learn.dl)


@pytest.mark.holds('Decisions', "A loader of the fit that a callback keeps is the notebook's own, undivided")
def test_a_callback_that_keeps_loaders_has_the_notebooks_own(two):
    learn, cb = learner(), KeepsLoaders()
    for _ in range(2): learn.distrib_fit(1, nprocs=2, launcher=two, cbs=cb)
    assert cb.valid_dl is learn.dls.valid and len(cb.seen) == 2 and all(o is learn.dls.train for o in cb.seen)
    assert cb.by_name['valid'][0] is learn.dls.valid and sum(len(y) for _, y in cb.valid_dl) == 21


class Curriculum(Callback):
    "Goes on from what it left on the data, the loss and the loaders in the last fit"
    def before_epoch(self):
        for o in self.objects(): o.difficulty = getattr(o, 'difficulty', 0)+1
        self.dls.train_ds.history.append(self.epoch)
        sampler = self.dls.train.sampler
        sampler.weights = sampler.weights*2
        sampler.order[0] += 1
    def objects(self):
        dl = self.dls.train
        return [self.dls.train_ds, self.dls.train_ds.dataset, self.learn.loss_func, self.learn.loss_func.inner, dl,
                dl.sampler, dl.batch_sampler]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss()
    def forward(self, out, y): return self.inner(out, y)


@pytest.mark.holds('Decisions', "Attributes that callbacks set on data sets, samplers, torch's loaders, pipelines and "
                   "the loss function")
def test_attributes_of_data_sets_samplers_loss_and_torch_loaders_come_back(two):
    data = Subset(Items(items(37)), range(37))
    sampler = WeightedRandomSampler(torch.ones(37), 37)
    data.history, sampler.order = [], np.zeros(3)
    dls = DataLoaders(TorchLoader(data, 4, sampler=sampler), TorchLoader(items(9, s=1), 4))
    learn = Learner(dls, nn.Linear(4, 3), loss_func=Weighted())
    learn.logger = lambda *_: None
    history = data.history
    with learn.distrib_ctx(nprocs=2, launcher=two):
        for _ in range(2): learn.fit(2, cbs=(cb := Curriculum()))
    cb.learn = learn
    assert [o.difficulty for o in cb.objects()] == [4]*7
    assert learn.dls.train_ds is data and learn.dls.train.sampler is sampler
    assert data.history is history == [0, 1]*2
    assert (sampler.weights.tolist(), sampler.order[0]) == ([16.]*37, 4)


def test_a_pipelines_attributes_come_back(two):
    learn = learner()
    learn.dls.train.after_batch = Pipeline([Transform(noop)])
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=SetsOne())
    assert learn.dls.train.after_batch.told == 'pipeline' and learn.dls.train.told == 'loader'


class SetsOne(Callback):
    def before_fit(self): self.dls.train.after_batch.told, self.dls.train.told = 'pipeline', 'loader'


def test_nothing_is_left_of_the_last_batch(two):
    learn, one = learner(), learner()
    learn.distrib_fit(1, nprocs=2, launcher=two)
    one.fit(1)
    names = 'dl', 'xb', 'yb', 'pred', 'loss'
    assert [getattr(learn, k) for k in names] == [getattr(one, k) for k in names]
    assert learn.dl is None


class OtherData(Callback):
    def before_fit(self): self.learn.dls = loaders(items(24, s=5), items(9, s=6), 6)


def test_exchanged_loaders(two):
    learn = learner()
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=OtherData())
    assert (len(learn.dls.train_ds), len(learn.dls.valid_ds), learn.dls.train.bs) == (24, 9, 6)
    learn.fit(1)


def test_callbacks_get_nothing_extra(two):
    learn, one = learner(cbs=GradientAccumulation(8)), learner(cbs=GradientAccumulation(8))
    learn.distrib_fit(1, nprocs=2, launcher=two)
    one.fit(1)
    assert [{*vars(cb)} for cb in learn.cbs] == [{*vars(cb)} for cb in one.cbs]


class Lazily(torch.utils.data.Sampler):
    "Makes its generator when it needs it"
    def __init__(self, n, make, draw): self.n, self.make, self.draw, self.gen = n, make, draw, None
    def __len__(self): return self.n
    def __iter__(self):
        if self.gen is None: self.gen = self.make()
        return iter([int(o) for o in self.draw(self.gen, self.n)])


LAZY = dict(torch=(lambda: torch.Generator().manual_seed(3), lambda g, n: torch.randperm(n, generator=g)),
            numpy=(lambda: np.random.default_rng(3), lambda g, n: g.permutation(n)),
            python=(lambda: random.Random(3), lambda g, n: g.sample(range(n), n)))


@pytest.mark.parametrize('kind', LAZY)
def test_a_generator_that_a_sampler_makes(kind):
    "The notebook has none yet: it gets one, in the state of the worker's, and all else of the fit is there, too"
    learn, alone = (make_learner() for _ in range(2))
    for o in learn, alone:
        ds = torch.utils.data.TensorDataset(torch.arange(64.).view(8, 8), torch.arange(8) % 2)
        o.dls = DataLoaders(*(torch.utils.data.DataLoader(ds, 4, sampler=Lazily(8, *LAZY[kind])) for _ in range(2)))
    learn.distrib_fit(2, launcher=InProcess())
    alone.fit(2)
    assert learn.recorder.values == alone.recorder.values and learn.epoch == 1
    assert [*learn.dls.train.sampler] == [*alone.dls.train.sampler]


@pytest.mark.parametrize('names_self', [True, False])
def test_a_fit_that_a_cell_wraps(monkeypatch, names_self):
    "It takes `*args`, from which fastai's own names can't be read"
    plain, called = Learner.fit, []
    def fit(*args, **kwargs):
        called.append(args)
        return plain(*args, **kwargs)
    def method(self, *args, **kwargs): return fit(self, *args, **kwargs)
    monkeypatch.setattr(Learner, 'fit', method if names_self else fit)
    learn = make_learner()
    learn.distrib_fit(2, .1, launcher=InProcess())
    assert len(learn.recorder.values) == 2 and learn.recorder.lrs[-1] == .1
