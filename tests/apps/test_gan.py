"Generative adversarial networks: critic and generator take turns, in both of fastai's ways."
from functools import partial
import pytest, torch
from fastai.vision.all import Adam, DataBlock, ImageBlock, IndexSplitter, Learner, MSELossFlat, SGD, TransformBlock
from fastai.vision.all import cast
from fastai.vision.gan import AdaptiveGANSwitcher, AdaptiveLoss, FixedGANSwitcher, GANLearner, InvisibleTensor
from fastai.vision.gan import basic_critic, basic_generator
from torch import nn
import fastddp.all
from applications import as_one, weights
from learners import seed_all
from spread import long_but
from test_vision import items, picture


def noise(i):
    "The same for the same item, so that two workers see what one process does"
    return cast(torch.randn(16, generator=torch.Generator().manual_seed(i)), InvisibleTensor)


def wgan(**kwargs):
    seed_all()
    block = DataBlock((TransformBlock, ImageBlock), get_items=items, get_x=noise, get_y=picture,
                      splitter=IndexSplitter([40, 41, 42, 43]))
    dls = block.dataloaders('.', bs=8, num_workers=0, device='cpu')
    return GANLearner.wgan(dls, basic_generator(32, 3, in_sz=16, n_features=8), basic_critic(32, 3, n_features=8),
                           show_img=False, **kwargs)


def turns(learn, n_epoch=2):
    "Both halves have moved, and what they lost was written down"
    before = weights(learn)
    learn.recorder.train_metrics, learn.recorder.valid_metrics = True, False
    learn.distrib_fit(n_epoch, 1e-3, nprocs=2)
    moved = {k.split('.')[0] for k, v in weights(learn).items()
             if v.is_floating_point() and not torch.equal(v, before[k])}
    assert moved == {'generator', 'critic'} and len(learn.recorder.values) == n_epoch
    assert len(learn.gan_trainer.gen_loss.val.shape) == 0
    assert torch.isfinite(torch.tensor(learn.recorder.values[-1])).all()


def with_gen_loss(learn):
    "In a validation the critic doesn't run: its loss there is that of its last call in training"
    learn.metrics = learn.metrics[:1]
    return learn


def test_wgan():
    as_one(lambda: with_gen_loss(wgan(opt_func=SGD)), lr=1e-3)
    learn = wgan(opt_func=partial(Adam, mom=0.))
    turns(learn)
    # clipped before each step, whose length is lr
    assert all(p.abs().max() < 0.015 for p in learn.model.critic.parameters())


def switching(switcher):
    seed_all()
    block = DataBlock((ImageBlock, ImageBlock), get_items=items, get_x=picture, get_y=picture,
                      splitter=IndexSplitter([40, 41, 42, 43]))
    dls = block.dataloaders('.', bs=8, num_workers=0, device='cpu')
    gen = Learner(dls, nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)),
                  loss_func=MSELossFlat())
    crit = Learner(dls, nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.LeakyReLU(.2), nn.Conv2d(4, 1, 8), nn.Flatten()),
                   loss_func=AdaptiveLoss(nn.BCEWithLogitsLoss()))
    return GANLearner.from_learners(gen, crit, weights_gen=(1., 50.), switcher=switcher, show_img=False, opt_func=SGD)


SWITCHERS = {
    'after so many steps': lambda: FixedGANSwitcher(n_crit=1, n_gen=1),
    # all ranks must find so in the same step
    'when the critic is good enough': lambda: AdaptiveGANSwitcher(critic_thresh=.69)}


@pytest.mark.parametrize('when', long_but(SWITCHERS, 'after so many steps'))
def test_switching(when):
    "A generator and a critic that were trained by themselves, brought together: as in one process"
    learn = as_one(lambda: with_gen_loss(switching(SWITCHERS[when]())), lr=1e-3)
    turns(learn)
