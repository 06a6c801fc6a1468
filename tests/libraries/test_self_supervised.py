from workflows import loaders, needs, same
VERSION = needs('self-supervised', 'self_supervised.vision.simclr', 'self_supervised.vision.byol',
                'self_supervised.vision.barlow_twins')
import copy, pytest
from fastai.vision.all import *
from self_supervised.vision.barlow_twins import BarlowTwins, create_barlow_twins_model
from self_supervised.vision.byol import BYOL, create_byol_model
from self_supervised.vision.simclr import SimCLR, create_simclr_model

images = torch.rand(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Darker(Transform):
    "A view that is not random: random ones differ between processes"
    def __init__(self, by): self.by = by
    def encodes(self, x): return x*self.by


def views(): return [Pipeline([Darker(o)], split_idx=0) for o in (.5, .8)]
def encoder(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def learner(bs, model, cb):
    dls = loaders([(o, 0) for o in images], bs, 32)
    return Learner(dls, model, loss_func=noop, opt_func=SGD, cbs=cb)


@pytest.mark.libraries('self-supervised', 'SimCLR',
                       compared='weights, losses')
def test_simclr():
    "Its loss is a method of the callback; negatives are the other items of the batch"
    same(lambda bs: learner(bs, create_simclr_model(encoder(), 8, 8), SimCLR(views())), 'fit', 1, .01)


@pytest.mark.libraries('self-supervised', 'Barlow Twins', compared='weights, losses')
def test_barlow():
    "It divides by small deviations: a change of weights by 1e-7 before the fit changes them as much"
    same(lambda bs: learner(bs, create_barlow_twins_model(encoder(), 8, 8, bn=False), BarlowTwins(views())), 'fit', 1,
         .01, tol=1e-3)


@pytest.mark.libraries('self-supervised', 'BYOL', compared='weights, losses')
def test_byol():
    same(lambda bs: learner(bs, create_byol_model(encoder(), 8, 8, bn=False), BYOL(views())), 'fit', 1, .01)
