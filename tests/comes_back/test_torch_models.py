"""Models that torch itself doesn't pickle: parametrized ones; TorchScript is refused by name"""
import copy, warnings
import pytest, torch
from fastai.callback.core import Callback
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from fastddp.all import *
from parity import assert_same, fit_both, learner, mlp, seed, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Doubled(nn.Module):
    "A parametrization of the user's own"
    def forward(self, w): return 2*w
    def right_inverse(self, w): return w/2


class Own(nn.Linear):
    "A layer of the user's own"
    def forward(self, x): return super().forward(x)+1


def parametrized(kind, *args, model=None):
    model = model or mlp()
    kind(model[0], *args)
    return model


def two_of_a_layer():
    model = parametrized(parametrizations.weight_norm)
    return parametrized(parametrize.register_parametrization, 'bias', Doubled(), model=model)


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return parametrized(weight_norm)


MODELS = dict(weight_norm=lambda: parametrized(parametrizations.weight_norm),
              orthogonal=lambda: parametrized(parametrizations.orthogonal),
              registered=lambda: parametrized(parametrize.register_parametrization, 'weight', Doubled()),
              two_of_a_layer=two_of_a_layer,
              own_layer=lambda: parametrized(parametrizations.weight_norm, model=nn.Sequential(Own(4, 3))),
              of_hooks=old_weight_norm,
              pruned=lambda: parametrized(prune.l1_unstructured, 'weight', .5))


def new(model, bs=4, **kwargs):
    seed()
    learn = learner(model=model(), bs=bs, **kwargs)
    learn.dls.valid.bs = 4
    return learn


@pytest.mark.few(4)
@pytest.mark.parametrize('kind', MODELS)
def test_trains_as_in_one_process(two, kind):
    learn, one = new(MODELS[kind]), new(MODELS[kind], bs=8)     # torch copies few of these models
    model, parts, params = learn.model, [*learn.model.modules()], [*learn.model.parameters()]
    before = [p.clone() for p in params]
    seed(1)
    learn.distrib_fit(2, nprocs=2, launcher=two)
    seed(1)
    one.fit(2)
    assert_same(learn, one)
    assert learn.model is model and all(a is b for a, b in zip(parts, model.modules(), strict=True))
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert any(not torch.equal(p, old) for p, old in zip(params, before))
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.distrib_get_preds(nprocs=2, launcher=two)[0].shape == (21, 3)


def test_spectral_norm(two):
    "Its estimate of a vector is a buffer, which every forward pass in training changes"
    learn = learner(model=parametrized(parametrizations.spectral_norm))
    layer, u = learn.model[0], learn.model[0].parametrizations.weight[0]._u
    before = u.clone()
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.model[0] is layer and layer.parametrizations.weight[0]._u is u and not torch.equal(u, before)
    assert len(learn.recorder.values) == 2


class Teacher(Callback):
    "Has a model, which changes"
    def __init__(self, net): self.net = net
    def after_epoch(self):
        for p in self.net.parameters(): p.data.fill_(self.epoch+1.)


@pytest.mark.parametrize('kind', ['weight_norm', 'own_layer'])
def test_a_model_of_a_callback(two, kind):
    teacher = Teacher(MODELS[kind]())
    net, params = teacher.net, [*teacher.net.parameters()]
    learner(cbs=teacher).distrib_fit(2, nprocs=2, launcher=two)
    assert teacher.net is net and all(a is b for a, b in zip(params, net.parameters(), strict=True))
    assert all((p == 2).all() for p in params)


class Student(Callback):
    "Makes a model in a worker"
    def before_fit(self): self.net = parametrized(parametrizations.weight_norm)


def test_a_model_that_a_callback_makes(two):
    learn = learner(cbs=Student())
    learn.distrib_fit(1, nprocs=2, launcher=two)
    x, student = torch.ones(2, 4), learn.student
    assert parametrize.is_parametrized(student.net[0], 'weight')
    assert copy.deepcopy(student.net)(x).shape == (2, 3)


@torch.jit.script
def squares(pred, y): return ((pred-nn.functional.one_hot(y, 3))**2).mean()


def test_a_scripted_loss(two):
    learn, one = new(mlp, loss_func=squares), new(mlp, bs=8, loss_func=squares)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    seed()
    one = new(mlp, bs=8, loss_func=squares)
    one.fit(1)
    assert_same(learn, one)
    assert learn.loss_func is squares


@pytest.mark.parametrize('model', [lambda: torch.jit.script(mlp()), lambda: torch.jit.trace(mlp(), torch.zeros(2, 4)),
                                   lambda: nn.Sequential(torch.jit.script(mlp()), nn.Linear(3, 3))])
def test_torchscript_is_refused_by_name(model):
    with pytest.raises(NotPicklable, match='learn.model.*a TorchScript module: train the module itself'):
        learner(model=model()).distrib_fit(1, nprocs=2)


@pytest.mark.parametrize('kind', ['weight_norm'])
def test_functions(kind):
    net, x = MODELS[kind](), torch.ones(1, 4)
    for out in ranch(2, called, net, x): assert torch.allclose(out, net(x))


def called(net, x): return net(x).detach()
