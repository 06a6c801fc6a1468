from workflows import loaders, needs, same
VERSION = needs('fastxtend', 'fastxtend.vision.all')
import pytest
from fastai.vision.all import *
from fastxtend.vision.all import *

g = torch.Generator().manual_seed(0)
x = torch.randn(60, 4, generator=g)
y = (x.sum(1) > 0).long()


def learner(bs, **kwargs):
    return Learner(loaders([*zip(x, y)], bs), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
                   loss_func=CrossEntropyLossFlat(), **{**dict(opt_func=SGD, metrics=accuracy), **kwargs})


@pytest.mark.libraries('fastxtend', "fastai's metrics, with its Recorder")
def test_fit(): same(lambda bs: learner(bs), 'fit_one_cycle', 2, .1)


@pytest.mark.libraries('fastxtend', 'its metrics: averages, over all items, in training and validation')
def test_metrics():
    make = lambda bs: learner(bs, metrics=[Accuracy(), F1Score(), Accuracy(log_metric=LogMetric.Both)])
    same(make, 'fit', 2, .1, tol=1e-3)


@pytest.mark.libraries('fastxtend', 'its fused optimizers and `fit_flat_warmup`')
def test_optimizer(): same(lambda bs: learner(bs, opt_func=adam(foreach=True)), 'fit_flat_warmup', 2, 1e-2)
