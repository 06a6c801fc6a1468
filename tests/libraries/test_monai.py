from workflows import loaders, needs, same
VERSION = needs('monai', 'monai.losses', 'monai.networks.nets')
import monai, pytest, torch
from fastai.vision.all import *
from monai.losses import DiceCELoss, DiceLoss, FocalLoss, TverskyLoss
from monai.networks.nets import UNet

g = torch.Generator().manual_seed(0)
volumes = torch.rand(16, 1, 8, 8, 8, generator=g)
masks = (volumes > .5).float()
LOSSES = dict(dice=lambda: DiceLoss(sigmoid=True), dice_ce=lambda: DiceCELoss(sigmoid=True), focal=FocalLoss,
              tversky=lambda: TverskyLoss(sigmoid=True))


@pytest.mark.libraries('monai', 'a 3D U-Net with Dice, Dice and cross-entropy, focal, Tversky loss',
                       compared='weights, losses')
@pytest.mark.parametrize('loss', LOSSES)
def test_losses(loss):
    def make(bs):
        net = UNet(3, 1, 1, channels=(4, 8), strides=(2,), norm='INSTANCE')
        return Learner(loaders([*zip(volumes, masks)], bs, 8), net, loss_func=LOSSES[loss](), opt_func=SGD)
    same(make, 'fit', 1, 1e-2, bs=2)
