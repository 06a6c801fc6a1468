"""What can't be sent, or can't come back, of what callbacks and layers hold, costs nothing else"""
import copyreg, os, sys
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.learner import Metric
from torch import nn
from fastddp.all import *
from cases.held import SLOTS, Reports
from parity import items, learner, warm

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


def count(o):
    o.n += 1
    return o


@pytest.mark.parametrize('name', ['Slots', 'Data'])
def test_functions_return_objects_with_slots(main, name):
    exec(SLOTS, main)
    assert [(type(o), o.n) for o in ranch(2, count, main[name]())] == [(main[name], 1)]*2


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
    learn = learner(cbs=[Stubborn(), Reports()])
    rows = learn.stubborn.rows
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert rows == [1] and learn.stubborn.n == 1
    assert learn.reports.trial.log.rows == [0] and len(learn.recorder.values) == 1
    assert learn.stubborn.learn is learn


# Tensors that grow


def grow(t, a):
    t.resize_(5)
    a.resize(6, refcheck=False)
    return t.shape, a.shape


def test_arguments_that_grow(): assert ranch(2, grow, torch.zeros(2), np.zeros(3)) == [((5,), (6,))]*2


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
