from workflows import loaders, needs, same
VERSION = needs('deepflash2', 'deepflash2.all')
import pytest, torch
from deepflash2.losses import JointLoss, get_loss
from deepflash2.models import create_smp_model
from fastai.vision.all import *

images = torch.rand(24, 1, 32, 32, generator=torch.Generator().manual_seed(0))
masks = (images[:, 0] > .5).long()


@pytest.mark.libraries('deepflash2', 'its models and losses in a `Learner`')
@pytest.mark.parametrize('loss', ['CrossEntropyLoss', 'DiceLoss', 'CrossEntropyDiceLoss'])
def test_losses(loss):
    def make(bs):
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1))
        return Learner(loaders([*zip(images, masks)], bs, 16), net, loss_func=get_loss(loss, mode='multiclass',
                                                                                       classes=[0, 1]),
                       metrics=foreground_acc, opt_func=SGD)
    same(make, 'fit', 1, 1e-2, bs=4)
