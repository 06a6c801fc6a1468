"""Learners on a simulated GPU, and what tests ask of them"""
import random
import torch
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastddp.all import *
from fastddp.ranch import *
from parity import largest

N_ITEMS, N_VALID = 45, 18     # no multiple of two or three ranks' batches


def gpu(i=0): return torch.device('vgpu', i)


def pictures(n=N_ITEMS+N_VALID):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 6, 6, generator=g)
    return x, (x.mean((1, 2, 3))*12).long().clamp(-2, 2)+2


def loaders(bs=6, device=None, n_train=N_ITEMS, **kwargs):
    items = list(zip(*pictures(n_train+N_VALID)))
    dls = DataLoaders.from_dsets(items[:n_train], items[n_train:], bs=bs, device=device or gpu(), num_workers=0,
                                 **kwargs)
    dls.valid.bs = 6        # the same for one process and many
    dls.train.rng = random.Random(3)
    return dls


def convnet(norm=nn.Identity):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4*36, 5))


def learner(bs=6, device=None, model=None, loss=None, n_train=N_ITEMS, drop_last=False, **kwargs):
    learn = Learner(loaders(bs, device, n_train, drop_last=drop_last), (model or convnet()).to(device or gpu()),
                    loss_func=loss or CrossEntropyLossFlat(), **({'metrics': accuracy, 'opt_func': SGD} | kwargs))
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn


def places(learn):
    "The devices of all tensors of model and optimizer"
    state = [t for st in learn.opt.state.values() for t in st.values()] if hasattr(learn.opt, 'state') else []
    grads = [p.grad for p in learn.model.parameters()]
    tensors = [*learn.model.state_dict().values(), *grads, *state]
    return {t.device for t in tensors if isinstance(t, torch.Tensor) and t.dim()}


def assert_alike(one, other, tol=2e-5, metrics_tol=1e-4):
    a, b = ([t.cpu() for t in o.model.state_dict().values()] for o in (one, other))
    assert largest(a, b) <= tol, largest(a, b)
    a, b = ([v for row in o.recorder.values for v in row] for o in (one, other))
    assert largest(a, b) <= metrics_tol, (one.recorder.values, other.recorder.values)


__all__ = [o for o in globals() if not o.startswith(('_', 'test'))]     # fastai brings fastcore's tests along
