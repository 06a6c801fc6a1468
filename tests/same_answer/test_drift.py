"""Ranks can't go apart: each backward pass is averaged, and weights are compared after each epoch."""
from functools import partial
import pytest, torch
from fastai.callback.core import Callback, CancelBackwardException
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper, SGD, Optimizer, weight_decay
from torch import nn
from torch.utils.checkpoint import checkpoint
from losses import Scaled
from parity import Collect, assert_ranks_alike, assert_same, fit_both, largest, learner, mlp, seed, alone_like, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture(scope='module')
def three():
    with warm(3) as launcher: yield launcher


# Weights that went apart

class Weights(Collect):
    "Notes the weights of each rank at the beginning of each validation"
    def before_fit(self): self.rows = []
    def before_validate(self): self.note(*(p.detach().double().pow(2).sum() for p in self.learn.model.parameters()))


class Reset(Callback):
    "A new last layer in each epoch, after the first batch"
    # there DDP of torch 2.6, which has no `init_sync`, gives all ranks rank 0's weights
    def after_batch(self):
        if self.training and self.iter == 0: self.model[2].reset_parameters()


class Noise(Callback):
    def after_step(self):
        for p in self.model.parameters(): p.data.add_(torch.randn_like(p)*.01)


class RateOfBatch(Callback):
    "A learning rate that is set from what this rank sees"
    def after_loss(self):
        if self.training: self.opt.set_hyper('lr', float(self.xb[0].abs().mean())/10)


def langevin(p, lr, **kwargs): p.data.add_(torch.randn_like(p), alpha=lr*.1)


def sgld(params, **kwargs): return Optimizer(params, [weight_decay, langevin], lr=.05)


class Noisy(nn.Sequential):
    "Its hook makes its own weights differ"
    def __init__(self):
        super().__init__(*mlp())
        self.register_forward_pre_hook(jitter)


def jitter(module, _):
    if module.training: module[0].bias.data.uniform_(-.1, .1)


# name -> (what the learner is made with, which weights are named)
DRIFTS = {'reset': (dict(cbs=Reset), '(2.weight'), 'noise': (dict(cbs=Noise), '(0.weight'),
          'rate': (dict(cbs=RateOfBatch), '(0.weight'),
          'sgld': (dict(opt_func=sgld), '(0.weight'),
          'hook': (dict(model=Noisy), '(0.bias')}


def made(model=None, cbs=None, **kwargs):
    return learner(model=model and model(), cbs=cbs and cbs(), **kwargs)


@pytest.mark.holds('Limits', "Weights that each rank changes in its own way: at the end of each epoch the ranks "
                   "compare their weights. If they went apart, all go on with rank 0's, and one warning says how far "
                   "apart they were, and names them")
@pytest.mark.parametrize('case', DRIFTS)
def test_weights_that_drift_become_rank_0s_with_one_warning(case, two, capfd):
    kwargs, which = DRIFTS[case]
    learn, notes = made(**kwargs), Weights()
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=notes)
    assert_ranks_alike(notes.ranks)
    said = ' '.join(capfd.readouterr().err.split())
    assert said.count('drifted apart') == 1 and f'the end of epoch 0 {which}' in said, said


class NoiseBeside(Callback):
    "Noise on the loss's weight and on a weight of its own, which the optimizer trains"
    def __init__(self): self.own = nn.Parameter(torch.ones(1))
    def after_pred(self): self.learn.pred = self.pred+self.own
    def after_step(self):
        for p in (self.learn.loss_func.scale, self.own): p.data.add_(torch.randn_like(p)*.01)


class WeightsBeside(Collect):
    def before_validate(self): self.note(*self.learn.loss_func.scale, self.learn.noise_beside.own)


def test_weights_beside_the_model_that_drift(two, capfd):
    "Those of a loss and of a callback"
    loss, noise, notes = Scaled(), NoiseBeside(), WeightsBeside()
    learn = learner(loss_func=loss, cbs=noise, splitter=lambda m: [[*m.parameters(), loss.scale, noise.own]])
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=notes)
    assert_ranks_alike(notes.ranks)
    said = ' '.join(capfd.readouterr().err.split())
    assert said.count('drifted apart') == 1 and '(loss_func.scale, opt.1)' in said, said


def test_ranks_that_stay_together_are_not_warned_of(two, capfd):
    learn, notes = learner(cbs=Weights()), None
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert_ranks_alike(learn.weights.ranks)
    assert 'drifted' not in capfd.readouterr().err


# Gradients that changed after they were reduced

class Sam(Callback):
    "Sharpness-aware minimization: the gradient of weights that were moved uphill; `event` says when"
    rho = .05
    def __init__(self, event): setattr(self, event, self.twice)
    def _uphill(self):
        "Moves the weights, and returns by how much"
        ps = [p for p in self.model.parameters() if p.grad is not None]
        by = self.rho/(torch.stack([p.grad.norm() for p in ps]).norm()+1e-12)
        moved = [(p, p.grad*by) for p in ps]
        with torch.no_grad():
            for p, e in moved: p.add_(e)
        return moved
    def twice(self):
        moved = self._uphill()
        self.model.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p, e in moved: p.sub_(e)


class Awp(Sam):
    "Adversarial weight perturbation: the gradient there is added"
    def twice(self):
        moved = self._uphill()
        self.learn.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p, e in moved: p.sub_(e)


class SamLearner(Learner):
    "SAM without any of fastai's events"
    def _do_grad_opt(self):
        self.loss_grad.backward()
        Sam.twice(self)
        self.opt.step()
        self.opt.zero_grad()
    rho, _uphill = Sam.rho, Sam._uphill


class SamBackward(Learner):
    def _backward(self):
        super()._backward()
        Sam.twice(self)
    rho, _uphill = Sam.rho, Sam._uphill


class SamStep(Learner):
    def _step(self):
        Sam.twice(self)
        super()._step()
    rho, _uphill = Sam.rho, Sam._uphill


class OwnPass(Callback):
    "A backward pass of its own in place of fastai's"
    def before_backward(self):
        (self.learn.loss_grad*1.).backward()
        raise CancelBackwardException()


class Halves(Callback):
    "One backward pass of two losses"
    def before_backward(self):
        torch.autograd.backward([self.learn.loss_grad*.5, self.learn.loss_grad*.5])
        raise CancelBackwardException()


class OwnBatch(Learner):
    "Does everything by itself"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        if not self.training: return
        self.loss_grad.backward()
        self.opt.step()
        self.opt.zero_grad()


class Clip(Callback):
    "Alike on all ranks"
    def before_step(self): nn.utils.clip_grad_norm_(self.model.parameters(), .1)


STEPS = {'sam': dict(cbs=lambda: Sam('before_step')), 'sam after_backward': dict(cbs=lambda: Sam('after_backward')),
         'awp': dict(cbs=lambda: Awp('before_step')), 'clip': dict(cbs=Clip), '_do_grad_opt': dict(kind=SamLearner),
         '_backward': dict(kind=SamBackward), '_step': dict(kind=SamStep), 'own pass': dict(cbs=OwnPass),
         'two losses': dict(cbs=Halves), '_do_one_batch': dict(kind=OwnBatch)}


@pytest.mark.holds('Weights', "SAM, adversarial weight perturbation, a learner's own `_do_grad_opt`, `_backward`, "
                   "`_step` or `_do_one_batch`, a backward pass of a callback's own: each backward pass of a batch is "
                   "weighed and averaged over all workers")
@pytest.mark.few(5)
@pytest.mark.spread
@pytest.mark.parametrize('opt_func', [partial(SGD, mom=.9), partial(OptimWrapper, opt=torch.optim.Adam)],
                         ids=['sgd', 'adam'])
@pytest.mark.parametrize('case', STEPS)
def test_another_backward_pass_is_that_of_one_process(case, opt_func, three, capfd):
    "Also with parts of unequal size, and a rank without items in the last batch"
    kind, cbs = STEPS[case].get('kind', Learner), STEPS[case].get('cbs')
    learn = learner(train=37, bs=4, opt_func=opt_func, cbs=cbs and cbs(), kind=kind)
    learn, one = fit_both(learn, 3, three, 2)
    assert_same(learn, one)
    assert 'drifted' not in capfd.readouterr().err


@pytest.mark.parametrize('case,n_acc', [('sam', 12), ('awp', 12), ('_step', 12), ('_step', 24)])
def test_a_second_pass_while_gradients_accumulate(case, n_acc, three, capfd):
    "fastai's callback multiplies the loop's loss by the items of a batch, and not that of the second pass"
    kind, cbs = STEPS[case].get('kind', Learner), STEPS[case].get('cbs')
    learn = learner(train=37, bs=4, cbs=[GradientAccumulation(n_acc), *([cbs()] if cbs else [])], kind=kind)
    learn, one = fit_both(learn, 3, three, 2)
    assert_same(learn, one)
    assert 'drifted' not in capfd.readouterr().err


class Checkpointed(nn.Module):
    "Computes its middle again in the backward pass, twice with the same weights"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    def forward(self, x):
        h = self.a(x)
        for _ in range(2): h = checkpoint(self.b, h, use_reentrant=True)
        return self.c(h)


@pytest.mark.holds('Weights', "Checkpointing with `use_reentrant=True`, which DDP can't follow: gradients are "
                   "averaged after the backward pass")
@pytest.mark.parametrize('how', [{}, dict(find_unused_parameters=True), dict(cbs=GradientAccumulation(24))],
                         ids=['plain', 'find_unused', 'accumulating'])
def test_reentrant_checkpointing_is_that_of_one_process(how, three, capfd):
    "Which DDP can't follow; also where a rank has nothing in the first step"
    how = dict(how)
    learn = learner(train=37, model=Checkpointed(), cbs=how.pop('cbs', None))
    learn, one = fit_both(learn, 3, three, 2, ddp=how)
    assert_same(learn, one)
    said = capfd.readouterr().out.count('use_reentrant=False gives the same results')
    assert said == (not learn.cbs.filter(lambda cb: isinstance(cb, GradientAccumulation)))     # that is flat anyway


@pytest.mark.holds('Limits', "A communication hook that rounds (`comm_hook=bf16_compress_hook`) rounds gradients, not "
                   "losses")
def test_gradients_in_bf16_leave_losses_exact(three):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    notes = Weights()
    learn, one = fit_both(learner(train=60), 3, three, 2, cbs=[notes], ddp=dict(comm_hook=bf16_compress_hook))
    assert_ranks_alike(learn.weights.ranks if hasattr(learn, 'weights') else notes.ranks)
    apart = largest([p.detach() for p in learn.model.parameters()], [p.detach() for p in one.model.parameters()])
    assert 1e-6 < apart < .01
    # the first loss comes before any gradient
    assert abs(learn.recorder.losses[0]-one.recorder.losses[0]) < 1e-6
    assert abs(learn.recorder.values[0][1]-one.recorder.values[0][1]) < 1e-2


class GradNoise(Callback):
    def before_step(self):
        for p in self.model.parameters(): p.grad.data.add_(torch.randn_like(p)*.01)


@pytest.mark.holds('Limits', "Noise that a callback adds to gradients: the same")
def test_noise_on_gradients_drifts_and_is_named(two, capfd):
    learn = learner(cbs=[GradNoise(), Weights()])
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert_ranks_alike(learn.weights.ranks)
    said = ' '.join(capfd.readouterr().err.split())
    assert said.count('drifted apart') == 1 and '(0.weight' in said, said
