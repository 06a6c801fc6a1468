"What every application is held to: two epochs on two workers, as one process would have them."
import math
from functools import partial
import pytest, torch
from fastai.callback.core import Callback
from fastcore.foundation import L
from torch import nn
import fastddp.all
from learners import seed_all


def numbers(values): return [float(o) for row in values for o in row if o is not None]


def weights(learn): return {k: v.detach().clone() for k, v in learn.model.state_dict().items()}


def check(learn, n_epoch=2, valid_eps=1e-4, **kwargs):
    "Trains on two workers; the recorder's last row is what one process finds when it validates that model"
    before = weights(learn)
    learn.distrib_fit_one_cycle(n_epoch, nprocs=2, **kwargs)
    values = learn.recorder.values
    assert len(values) == n_epoch and all(map(math.isfinite, numbers(values)))
    assert any(not torch.equal(v, before[k]) for k, v in weights(learn).items())
    steps = len(learn.recorder.losses)
    assert 0 < steps == len(learn.recorder.lrs) and steps % n_epoch == 0
    if learn.recorder.valid_metrics: same_numbers([learn.validate()], [L(values[-1])[1:]], valid_eps)
    return learn


def same_numbers(a, b, eps): assert numbers(a) == pytest.approx(numbers(b), rel=eps, abs=eps)


class Double(Callback):
    "Feeds the model doubles: many layers of batch norm make much of the last digit of a float"
    order = -5
    def before_fit(self): self.model.double()
    def before_batch(self):
        f = lambda o: o.double() if o.is_floating_point() else o
        self.learn.xb, self.learn.yb = tuple(map(f, self.xb)), tuple(map(f, self.yb))


def as_one(make, n_epoch=2, lr=1e-2, eps=1e-5, metrics_eps=1e-5):
    "The invariant: with the batches of one process, the weights and metrics of one process"
    there, here = make(), make()
    for m in here.model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm): m.forward = partial(by_parts, m)
    seed_all(1)
    there.distrib_fit(n_epoch, lr, nprocs=2, batch='global')
    seed_all(1)
    here.fit(n_epoch, lr)
    for (k, a), b in zip(weights(there).items(), weights(here).values()):
        assert torch.allclose(a.float(), b.float(), atol=eps), (k, (a-b).abs().max())
    same_numbers([there.recorder.losses, *there.recorder.values], [here.recorder.losses, *here.recorder.values],
                 metrics_eps)
    return there


def by_parts(bn, x):
    "Batch norm as it is on two CPU workers: each normalizes its part of a batch, and running statistics are averaged"
    # a validation has whole batches, also of a model that stays in training mode there
    if not (bn.training and torch.is_grad_enabled()): return type(bn).forward(bn, x)
    begun, ends, out = (bn.running_mean, bn.running_var), [], torch.empty_like(x)
    for r in range(2):
        bn.running_mean, bn.running_var = (o.clone() for o in begun)
        out[r::2] = type(bn).forward(bn, x[r::2])
        ends.append((bn.running_mean, bn.running_var))
    bn.running_mean, bn.running_var = ((a+b)/2 for a, b in zip(*ends))
    bn.num_batches_tracked -= 1
    return out


def same_preds(learn, eps=1e-5, **kwargs):
    "Predictions on the workers are those of this process"
    a, b = learn.distrib_get_preds(nprocs=2, **kwargs), learn.get_preds(**kwargs)
    assert len(a) == len(b)
    for x, y in zip(a, b):
        for t, u in zip(*[o if isinstance(o, (list, tuple)) else [o] for o in (x, y)], strict=True):
            assert t.shape == u.shape and t.dtype == u.dtype and torch.allclose(t.float(), u.float(), atol=eps)
