from workflows import assert_same, both, loaders, needs, quiet, same, seed, worst
VERSION = needs('torchmetrics', 'torchmetrics')
import copy, pytest, torch, torchmetrics as tm
from fastai.basics import *

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


class TM(Metric):
    "The usual adapter"
    def __init__(self, m, f=noop): self.m, self.f = m, f
    def reset(self): self.m.reset()
    def accumulate(self, learn): self.m.update(self.f(learn.pred.detach()), learn.y)
    @property
    def value(self): return self.m.compute().double().mean()
    @property
    def name(self): return type(self.m).__name__


class Twice(Callback):
    "A metric of torchmetrics in a callback; its values at the end of each epoch"
    def __init__(self): self.metric, self.found = tm.MeanSquaredError(), []
    def before_validate(self): self.metric.reset()
    def after_batch(self):
        if not self.training: self.metric.update(self.pred.softmax(1)[:, 1].contiguous(), self.y.float())
    def after_validate(self): self.found.append(float(self.metric.compute()))


def most_likely(pred): return pred.argmax(1)
def probability(pred): return pred.softmax(1)[:, 1]


def metrics():
    c = tm.classification
    return [TM(c.BinaryConfusionMatrix(), most_likely), TM(c.BinaryMatthewsCorrCoef(), most_likely),
            TM(c.BinaryStatScores(), most_likely), TM(c.BinaryAccuracy(), most_likely),
            TM(c.BinaryAUROC(), probability), TM(c.MulticlassF1Score(2, average='macro'))]


def learner(bs, **kwargs):
    return Learner(loaders([*zip(x, y)], bs), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), opt_func=SGD,
                   **kwargs)


@pytest.mark.libraries('torchmetrics', 'in a fastai `Metric`: confusion matrix, MCC, AUROC, F1 and others')
def test_metrics(): same(lambda bs: learner(bs, metrics=metrics()), 'fit', 2, .1)


@pytest.mark.libraries('torchmetrics', '`distrib_validate`', compared='metrics')
def test_validate():
    seed()
    learn = quiet(learner(8, metrics=metrics()))
    learn.fit(1, .1)
    plain = learn.validate()
    assert worst(plain, learn.distrib_validate(nprocs=2)) < 1e-5


@pytest.mark.libraries('torchmetrics', "the notebook's objects after a fit", compared='metrics')
def test_afterwards():
    seed()
    learn = quiet(learner(8, metrics=metrics()))
    objects = [o.m for o in learn.metrics]
    learn.distrib_fit(1, .1, nprocs=2)
    assert [o.m for o in learn.metrics] == objects
    of_fit = learn.recorder.values[-1][1:]
    found = [[*learn.validate()] for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert worst(found[0], of_fit) < 1e-5
    fresh = quiet(learner(8, metrics=metrics()))
    fresh.model = learn.model
    assert worst(found[0], fresh.validate()) < 1e-6


@pytest.mark.libraries('torchmetrics', "in a callback, over this worker's batches only", compared='weights, losses',
                       know='A callback sees its own worker; use a `Metric` for the value of all.')
def test_callback():
    "What a callback adds up is its worker's, like all that callbacks count; the object works afterwards"
    one, learn = same(lambda bs: learner(bs, cbs=Twice()), 'fit', 2, .1)
    assert len(one.twice.found) == len(learn.twice.found) == 2
    metric = learn.twice.metric
    metric.reset()
    metric.update(torch.tensor([1., 0.]), torch.tensor([0., 0.]))
    assert float(metric.compute()) == .5
