"""Ranks can't go apart: each backward pass is averaged, and weights are compared after each epoch."""
import pytest, torch
from fastai.callback.core import Callback
from fastai.optimizer import Optimizer, weight_decay
from torch import nn
from losses import Scaled
from parity import Collect, assert_ranks_alike, fit_both, largest, learner, mlp, warm

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings('default:fastddp')]


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
    learn = learner(cbs=Weights())
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert_ranks_alike(learn.weights.ranks)
    assert 'drifted' not in capfd.readouterr().err


# Gradients that changed after they were reduced


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
