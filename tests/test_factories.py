"Models and data that are made in the workers, and what happens when they are made wrong."
import pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.optimizer import Adam
from torch import nn
from fastai.torch_core import set_seed
from fastddp.all import *
from fastddp.base import group
from learners import make_learner, mlp, points
from test_inference import bits, frozen, same


class Streaming(list):
    "A dataset that holds what can't travel"
    def __init__(self, items):
        super().__init__(items)
        self.stream = (o for o in items)


def loaders(): return DataLoaders.from_dsets(Streaming(points(64)), Streaming(points(41, seed=1)), bs=8, device='cpu')


def test_data_made_in_the_workers(capfd):
    "Fit, validation and predictions, over datasets that never travel"
    learn = make_learner(bs=8)
    learn.dls = loaders()
    with pytest.raises(NotPicklable, match='dataset'): learn.distrib_fit(1, nprocs=2)
    with learn.distrib_ctx(nprocs=2, dls_factory=loaders):
        learn.fit(1)
        got = learn.validate(), learn.get_preds(), learn.get_preds(ds_idx=0, with_input=True)
    assert 'in this process' not in capfd.readouterr().out
    same(got, (learn.validate(), learn.get_preds(), learn.get_preds(ds_idx=0, with_input=True)))


class Split(Streaming):
    "Holds the items in an order of its own"
    def __init__(self, n):
        self.items = torch.randperm(64)[:n].tolist()
        super().__init__([points(64)[i] for i in self.items])


def split_loaders(): return DataLoaders.from_dsets(Split(48), Split(16), bs=8, device='cpu')


class NotesItems(Callback):
    def after_fit(self): self.items = group.all_gather_object([dl.dataset.items for dl in self.learn.dls.loaders])


@pytest.mark.filterwarnings('default:fastddp')
def test_data_that_a_factory_splits_at_random(capfd):
    "Is split alike on all workers and in each call; a warning says that the notebook's was split otherwise"
    learn, found = make_learner(bs=8, cbs=NotesItems()), []
    torch.manual_seed(3)
    learn.dls = split_loaders()
    with learn.distrib_ctx(nprocs=2, dls_factory=split_loaders):
        for _ in range(2):
            learn.fit(1)
            found += learn.notes_items.items
    assert all(o == found[0] for o in found)
    assert 'dls_factory has made other items' in capfd.readouterr().err
    set_seed(0)
    learn.dls = split_loaders()
    learn.distrib_fit(1, nprocs=2, dls_factory=split_loaders)
    assert 'other items' not in capfd.readouterr().err


def test_model_made_in_the_workers():
    def net():
        m = mlp()
        m.stream = (o for o in ())
        return m
    learn = make_learner(model=net, opt_func=Adam)
    with learn.distrib_ctx(nprocs=2, model_factory=net):
        learn.fit(1)
        before = frozen(learn)
        got = learn.validate(), learn.get_preds()
    assert bits(before, frozen(learn)) and learn.opt.state
    same(got, (learn.validate(), learn.get_preds()))


WRONG = {
    'dls_factory returned a list': dict(dls_factory=lambda: points(8)),
    "model_factory returned a Linear whose weights aren't those of learn.model":
        dict(model_factory=lambda: nn.Linear(8, 2)),
    'model_factory returned a NoneType': dict(model_factory=lambda: None)}


def test_wrong_factories():
    "Said by the workers, of which none is left; the learner trains afterwards"
    learn = make_learner(n=32)
    before = [p.detach().clone() for p in learn.model.parameters()]
    for message, option in WRONG.items():
        with pytest.raises(RankRaised, match=message): learn.distrib_fit(1, nprocs=2, **option)
    with pytest.raises(RankRaised, match='no data today'): learn.distrib_validate(nprocs=2, dls_factory=no_data)
    same(before, [p.detach() for p in learn.model.parameters()])
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1


def no_data(): raise OSError('no data today')


def test_inference_leaves_the_momenta_at_home(monkeypatch):
    "What travels is the weights, not the optimizer's state, which is untouched"
    sizes, run = [], Local.run
    def noting(self, job, *args, **kwargs):
        sizes.append(job.payload.nbytes)
        return run(self, job, *args, **kwargs)
    monkeypatch.setattr(Local, 'run', noting)
    learn = make_learner(model=lambda: nn.Sequential(nn.Linear(8, 100_000), nn.ReLU(), nn.Linear(100_000, 2)),
                         opt_func=Adam, n=32)
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        before = frozen(learn)
        learn.validate()
        learn.fit(1)
    weights = 4*sum(p.numel() for p in learn.model.parameters())
    assert sizes[1] < weights*1.2 and sizes[2] > weights*2.9
    assert all('sqr_avg' in o for o in before[1]['state']) and not bits(before, frozen(learn))


class Keeps(Callback):
    "Changes a learner's parts, and keeps one of them"
    def after_fit(self):
        self.kept = self.learn.model[0]
        self.learn.model.note = self.learn.loss_func.note = 'of the fit'
        self.learn.dls.train.note = 'of the loader'


class Loss(nn.CrossEntropyLoss): pass


def small_loaders(): return DataLoaders.from_dsets(points(64), bs=8, device='cpu')


@pytest.mark.filterwarnings('default:fastddp')
def test_what_a_factory_does_not_make_is_the_notebooks():
    "Its attributes come back, also where the notebook's loaders are other ones than those of the factory"
    learn = make_learner(bs=8, model=mlp, loss_func=Loss(), cbs=Keeps())
    learn.dls = small_loaders()
    learn.distrib_fit(1, nprocs=2, dls_factory=loaders)
    assert (learn.model.note, learn.loss_func.note) == ('of the fit', 'of the fit')
    assert learn.keeps.kept is learn.model[0]
    assert not hasattr(learn.dls.train, 'note')

    learn = make_learner(bs=8, model=mlp, loss_func=Loss(), cbs=Keeps())
    learn.distrib_fit(1, nprocs=2, model_factory=mlp)
    assert (learn.dls.train.note, learn.loss_func.note) == ('of the loader', 'of the fit')
    assert learn.keeps.kept is learn.model[0] and learn.model.note == 'of the fit'
