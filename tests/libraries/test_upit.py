from workflows import loaders, needs, same
VERSION = needs('upit', 'upit.train.cyclegan')
import pytest, torch
from fastai.vision.all import *
from upit.models.cyclegan import CycleGAN
from upit.train.cyclegan import cycle_learner

g = torch.Generator().manual_seed(0)
pictures = [(TensorImage(a), TensorImage(b)) for a, b in torch.rand(24, 2, 3, 32, 32, generator=g)]


def cycle(bs):
    dls = loaders(pictures, bs, cut=16)
    return cycle_learner(dls, CycleGAN(3, 3, 4, disc_layers=1, gen_blocks=1), show_imgs=False, opt_func=SGD)


@pytest.mark.libraries('upit', 'CycleGAN: generators and discriminators with two optimizers')
def test_cycle_gan(): same(cycle, 'fit_flat_lin', 1, 1, 1e-3, bs=4)
