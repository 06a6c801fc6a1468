"Hooks of parameters, modules and the optimizer travel to the workers, and stay in the notebook as they were."
from functools import partial
import pytest, torch
from fastai.callback.core import Callback
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.hooks import RemovableHandle
from fastddp.all import NotPicklable
from learners import make_learner, mlp, seed_all
from parity import warm

HOOKS = '_backward_hooks', '_post_accumulate_grad_hooks', '_optimizer_step_pre_hooks', '_optimizer_step_post_hooks'


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def rows(keep): return torch.tensor([1.]*keep+[0.]*(8-keep))
def masked(learn): return learn.model[0].weight.register_hook(lambda g: g*rows(4))
def halved(p): p.grad.mul_(.5)
def once_accumulated(learn): return learn.model[2].weight.register_post_accumulate_grad_hook(halved)
def twice(opt, args, kwargs):
    for p in opt.param_groups[0]['params']: p.grad.mul_(2)
def before_step(learn): return learn.opt.opt.register_step_pre_hook(twice)
def shrink(opt, args, kwargs):
    with torch.no_grad(): opt.param_groups[0]['params'][0].mul_(.9)
def after_step(learn): return learn.opt.opt.register_step_post_hook(shrink)
def of_module(learn): return learn.model[0].register_full_backward_hook(lambda m, gi, go: None if gi[0] is None else gi)
def of_output(learn): return learn.model[0].register_forward_hook(lambda m, x, out: out*rows(4).repeat(2))


def hooked(register):
    learn = make_learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.create_opt()
    return learn, register(learn)


def hooks(learn):
    objs = [*learn.model.parameters(), learn.opt.opt]
    return [(i, k, [*h.values()]) for i, o in enumerate(objs) for k in HOOKS if (h := getattr(o, k, None))]


@pytest.mark.holds('Weights', "Linear hooks of parameters (frozen rows), of modules and of torch's optimizers; "
                   "afterwards the notebook's are as they were")
@pytest.mark.few(3)
@pytest.mark.parametrize('register', [masked, once_accumulated, before_step, after_step, of_module, of_output])
def test_linear_hooks_give_the_weights_of_one_process(register, two):
    (learn, handle), (one, _) = hooked(register), hooked(register)
    plain, before = make_learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD)), hooks(learn)
    for l in one, plain:
        seed_all(1)
        for _ in range(2): l.fit(1)
    seed_all(1)
    for _ in range(2): learn.distrib_fit(1, batch='global', nprocs=2, launcher=two)
    for p, q in zip(learn.model.parameters(), one.model.parameters()): torch.testing.assert_close(p, q)
    if register is not of_module:
        assert any((p-q).abs().max() > 1e-3 for p, q in zip(learn.model.parameters(), plain.model.parameters()))
    assert hooks(learn) == before       # the same functions, none twice
    handle.remove()
    assert hooks(learn) == []


class Registers(Callback):
    "Has a hook of its own on what has one already, for the time of the fit"
    def before_fit(self):
        self.n, weight = 0, next(self.model.parameters())
        self.handle, self.kept = weight.register_hook(self.note), len(weight._backward_hooks)
    def note(self, g): self.n += 1
    def after_fit(self): self.handle.remove()


def test_hooks_of_a_worker_dont_take_the_place_of_others(two, monkeypatch):
    "torch numbers hooks in each process anew, and a hook of the same number takes the place of the other"
    monkeypatch.setattr(RemovableHandle, 'next_id', 0)
    learn, _ = hooked(lambda l: [masked(l) for _ in range(200)][0])
    learn.add_cb(Registers())
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert learn.registers.kept == 201 and learn.registers.n and len(hooks(learn)[0][2]) == 200


def test_a_hook_that_cant_travel_is_named():
    learn = make_learner()
    f = open(__file__)
    with f:
        learn.model[0].weight.register_hook(lambda g: g if f.closed else g*1)
        with pytest.raises(NotPicklable, match='hook'): learn.distrib_fit(1, nprocs=2)
