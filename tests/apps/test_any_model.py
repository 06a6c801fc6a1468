"Plain PyTorch data, many inputs and outputs, and models with something special about them."
from collections import OrderedDict
from dataclasses import dataclass
import pytest, torch
from fastai.callback.rnn import ModelResetter
from fastai.data.all import Categorize, DataLoaders, Datasets, ItemTransform, RandomSplitter, TfmdLists, fastuple
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from fastai.callback.core import Callback
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
import fastddp.all
from applications import as_one, check, same_preds
from learners import make_learner, points, seed_all


def learner(model, loss=None, items=None, n_inp=None, **kwargs):
    seed_all()
    items = items or points(83)
    dls = DataLoaders.from_dsets(items[:60], items[60:], bs=8, device='cpu')
    if n_inp: dls.n_inp = n_inp
    return Learner(dls, model(), loss_func=loss or nn.CrossEntropyLoss(), opt_func=SGD, **kwargs)


def test_plain_pytorch():
    "TensorDataset and DataLoader, as in any PyTorch tutorial"
    def make():
        seed_all()
        x = torch.randn(90, 8)
        ds = [TensorDataset(o, (o.sum(1) > 0).long()) for o in (x[:60], x[60:])]
        dls = DataLoaders(TorchLoader(ds[0], batch_size=8, shuffle=True), TorchLoader(ds[1], batch_size=8))
        return Learner(dls, nn.Linear(8, 2), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, opt_func=SGD)
    learn = as_one(make)
    same_preds(learn, dl=learn.dls.valid)


def many(n=83):
    g = torch.Generator().manual_seed(0)
    return [((a := torch.randn(4, generator=g)), torch.randn(3, generator=g), a.sum(), a[:2].clone()) for _ in range(n)]


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 3)
    def forward(self, x, z):
        h = self.a(x)+self.b(z)
        return h[:, 0], h[:, 1:]


def many_loss(out, y, z, reduction='mean'):
    res = (out[0]-y)**2 + ((out[1]-z)**2).mean(1)
    return res.mean() if reduction == 'mean' else res


@pytest.mark.full
def test_several_inputs_and_targets():
    same_preds(as_one(lambda: learner(Many, many_loss, many(), 2)), with_input=True, with_loss=True)


def dicts(n=83):
    g = torch.Generator().manual_seed(0)
    return [(dict(a=(a := torch.randn(4, generator=g)), b=torch.randn(3, generator=g)), dict(y=a.sum()))
            for _ in range(n)]


class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(3, 1)
    def forward(self, d): return dict(out=(self.a(d['a'])+self.b(d['b'])).squeeze(1))


def dict_loss(out, t, reduction='mean'): return nn.functional.mse_loss(out['out'], t['y'], reduction=reduction)


def test_dicts(): as_one(lambda: learner(Dicts, dict_loss, dicts()))


@dataclass
class ModelOutput(OrderedDict):
    "As in Hugging Face's library: a dict, a dataclass and a tuple at once"
    loss: torch.Tensor = None
    logits: torch.Tensor = None
    def __post_init__(self):
        self.update({k: v for k, v in (('loss', self.loss), ('logits', self.logits)) if v is not None})


class HF(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)
    def forward(self, x): return ModelOutput(logits=self.head(x))


class TakeLogits(Callback):
    def after_pred(self): self.learn.pred = self.pred.logits


def test_model_output(): as_one(lambda: learner(HF, cbs=TakeLogits()))


class Resets(nn.Module):
    "Hidden state from batch to batch, of the batch's size, and a `reset` that forgets it"
    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.h, self.own = nn.RNN(8, 4, batch_first=True), nn.Linear(4, 2), None, 0
        self.register_buffer('resets', torch.zeros((), dtype=torch.long))
    def reset(self):
        self.h, self.own = None, self.own+1
        self.resets += 1
    def forward(self, x):
        if self.h is not None and self.h.shape[1] != len(x): self.h = None
        out, h = self.rnn(x[:, None], self.h)
        self.h = h.detach()
        return self.head(out[:, -1])


def test_reset():
    "As often as in one process, in a buffer and in an attribute"
    there, here = learner(Resets, cbs=ModelResetter()), learner(Resets, cbs=ModelResetter())
    there.distrib_fit(2, nprocs=2)
    here.fit(2)
    assert len(there.recorder.values) == 2
    assert there.model.resets == here.model.resets == here.model.own == there.model.own > 2


class Pair(fastuple): "Two things seen together"


class Join(ItemTransform):
    def encodes(self, o): return Pair(o[0], o[1]), torch.tensor(float(o[2]))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 4), nn.Linear(8, 1)
    def forward(self, pair): return self.head(torch.cat([self.body(o).relu() for o in pair], 1)).squeeze(1)


def test_siamese():
    "Pairs by the mid-level API: a type of its own and a transform"
    def make():
        seed_all()
        data = points(84)
        items = [(data[i][0], data[(i*5+1) % 84][0], data[i][1] == data[(i*5+1) % 84][1]) for i in range(84)]
        tls = TfmdLists(items, Join(), splits=[list(range(60)), list(range(60, 84))])
        dls = tls.dataloaders(bs=8, num_workers=0, device='cpu')
        return Learner(dls, Siamese(), loss_func=nn.BCEWithLogitsLoss(), opt_func=SGD)
    as_one(make)


def vector(name): return torch.tensor([sum(ord(c)*(j+k) for j, c in enumerate(name)) % 97/97 for k in range(4)])


@pytest.mark.full
def test_many_names():
    "A list of names so long that it lies in memory once for all workers, through the mid-level API"
    names = [f'{"dark" if i % 3 else "light"}_{i}' for i in range(10_500)]
    def make():
        seed_all()
        dsets = Datasets(names, [[vector], [lambda o: o.split('_')[0], Categorize()]],
                         splits=RandomSplitter(seed=1)(names))
        return Learner(dsets.dataloaders(bs=500, num_workers=0, device='cpu'), nn.Linear(4, 2),
                       loss_func=CrossEntropyLossFlat(), opt_func=SGD)
    learn = as_one(make)
    assert learn.dls.vocab == ['dark', 'light'] and type(learn.dls.train_ds.items) is list
