from workflows import both, loaders, needs, same, worst
VERSION = needs('segmentation-models-pytorch', 'segmentation_models_pytorch')
import pytest, torch, segmentation_models_pytorch as smp
from fastai.vision.all import *

g = torch.Generator().manual_seed(0)
images = torch.rand(32, 3, 32, 32, generator=g)
masks = (images.mean(1) > .5).long()


def learner(bs, loss, norm=False):
    model = smp.Unet('resnet18', encoder_weights=None, classes=2)
    if not norm:
        for o in [*model.modules()]:
            for k, m in [*o.named_children()]:
                if isinstance(m, nn.BatchNorm2d): setattr(o, k, nn.Identity())
    return Learner(loaders([*zip(images, masks)], bs, 24), model, loss_func=loss, metrics=foreground_acc, opt_func=SGD)


LOSSES = dict(dice=lambda: smp.losses.DiceLoss('multiclass'), jaccard=lambda: smp.losses.JaccardLoss('multiclass'),
              focal=lambda: smp.losses.FocalLoss('multiclass'), lovasz=lambda: smp.losses.LovaszLoss('multiclass'),
              tversky=lambda: smp.losses.TverskyLoss('multiclass'))


@pytest.mark.libraries('segmentation-models-pytorch', 'U-Net with Dice, Jaccard, focal, Lovasz, Tversky loss')
@pytest.mark.parametrize('loss', LOSSES)
def test_losses(loss): same(lambda bs: learner(bs, LOSSES[loss]()), 'fit', 1, 1e-2, bs=4)


@pytest.mark.libraries('segmentation-models-pytorch', 'U-Net with batch norm',
                       compared='losses, to 10 %',
                       know='On CPUs each worker has batch norm of its own; on GPUs it is synchronized.')
def test_batch_norm():
    one, learn = both(lambda bs: learner(bs, LOSSES['dice'](), True), 'fit', 1, 1e-2, bs=4)
    assert worst(one.recorder.losses, learn.recorder.losses) < .1
