"""Learners that are checked, all over generated data"""
import contextlib
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from . import machine


def convnet(norm=nn.BatchNorm2d, width=machine.size(64, 8)):
    def block(a, b, stride): return nn.Conv2d(a, b, 3, stride=stride, padding=1), norm(b), nn.ReLU()
    return nn.Sequential(*block(3, width, 1), *block(width, 2*width, 2), *block(2*width, 4*width, 2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4*width, 10))


def pictures(n, side=32, seed=0):
    "`n` pictures of noise, brighter in one channel by their class, so that there is something to learn"
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    x = torch.randn(n, 3, side, side, generator=g)
    return x+(y/10)[:, None, None, None], y


class Items:
    "What is validated; `tta` wants to have the training set's transforms applied, of which there are none"
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def set_split_idx(self, i): return contextlib.nullcontext()


def learner(model=convnet, n=None, bs=None, side=32, metrics=accuracy, device=None, **kwargs):
    "A learner of pictures on the first GPU"
    torch.manual_seed(0)
    n, bs = n or machine.size(8192, 64), bs or machine.size(256, 16)
    x, y = pictures(n+n//8+1, side)
    items = list(zip(x, y))
    dls = DataLoaders.from_dsets(items[:n], Items(items[n:]), bs=bs, device=device or machine.device())
    model = model().to(machine.device())
    return Learner(dls, model, loss_func=nn.CrossEntropyLoss(), metrics=metrics, **kwargs)


def torch_loaders(tensors, valid, bs, workers=0):
    "DataLoaders of torch's own, as a hand-written script has them"
    def dl(ts, **kwargs):
        return DataLoader(TensorDataset(*ts), bs, num_workers=workers, pin_memory=not machine.DRY, **kwargs)
    train, few = dl(tensors, shuffle=True, drop_last=True), dl([t[:valid] for t in tensors])
    return DataLoaders(train, few, device=machine.device())
