"""What the tests of libraries share: import one, or say why that fails; train in one process and on 2 workers, and
compare."""
import copy, importlib, os, random
from importlib import metadata
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('WANDB_MODE', 'offline')
import numpy as np, pytest, torch
import fastddp.all
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders

N = 2


def needs(package, *modules):
    "The version of `package`; skips the file of tests where it isn't installed, or can't be imported"
    try: version = metadata.version(package)
    except metadata.PackageNotFoundError: pytest.skip(f'{package} is not installed', allow_module_level=True)
    for o in modules:
        try: importlib.import_module(o)
        except Exception as e:
            said = f'{type(e).__name__}: {e}'.replace('\n', ' ')
            pytest.skip(f'{package} {version} cannot be imported: {said}', allow_module_level=True)
    return version


def seed(s=0):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


def loaders(items, bs, cut=40, **kwargs):
    "The first `cut` items to train, the others to validate, in batches that don't depend on the number of workers"
    dls = DataLoaders.from_dsets(items[:cut], items[cut:], bs=bs, device='cpu', num_workers=0, **kwargs)
    dls.valid.bs = 8
    return dls


def quiet(learn):
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn


def weights(learn): return {k: v.detach().clone() for k, v in learn.model.state_dict().items()}


def trained(make, bs, how, args, kwargs, **distrib):
    "`(learner, its weights before)`"
    seed()
    learn = quiet(make(bs))
    before = weights(learn)
    seed(1)
    if distrib: learn.distrib(how, *args, nprocs=N, **distrib, **kwargs)
    else: getattr(learn, how)(*args, **kwargs)
    return learn, before


def both(make, how='fit', *args, bs=8, batch='per_worker', **kwargs):
    """`(in one process, on workers)`: learners that `make(bs)` gives, trained on the same global batches. Weights
    change in training, else nothing would be compared"""
    one, before = trained(make, bs*N if batch == 'per_worker' else bs, how, args, kwargs)
    assert any(not torch.equal(v, before[k]) for k, v in weights(one).items()), 'nothing was trained'
    learn, _ = trained(make, bs, how, args, kwargs, batch=batch)
    return one, learn


def worst(a, b):
    "The largest difference of two sequences of numbers or tensors, relative to what they hold"
    assert len(a) == len(b), (len(a), len(b))
    res = 0.
    for x, y in zip(a, b):
        x, y = (torch.as_tensor(float('nan') if o is None else o).detach().cpu().double() for o in (x, y))
        assert x.shape == y.shape, (x.shape, y.shape)
        if x.numel(): res = max(res, float((x-y).abs().nan_to_num(0).max()/max(1., float(x.nan_to_num(0).abs().max()))))
        assert torch.equal(x.isnan(), y.isnan())
    return res


def assert_same(one, learn, tol=1e-4):
    "Weights and buffers, losses of training steps, and each epoch's losses and metrics"
    a, b = weights(one), weights(learn)
    assert a.keys() == b.keys()
    found = {k: worst([a[k]], [b[k]]) for k in a}
    assert max(found.values()) <= tol, {k: v for k, v in found.items() if v > tol}
    assert worst(one.recorder.losses, learn.recorder.losses) <= tol
    rows = [[v for row in o.recorder.values for v in row] for o in (one, learn)]
    assert rows[0] and worst(*rows) <= tol, rows


def same(make, how='fit', *args, tol=1e-4, **kwargs):
    "Train both, compare, and return them"
    one, learn = both(make, how, *args, **kwargs)
    assert_same(one, learn, tol)
    return one, learn
