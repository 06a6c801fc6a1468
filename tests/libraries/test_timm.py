from workflows import both, loaders, needs, same, worst
VERSION = needs('timm', 'timm')
import pytest, timm, timm.optim, torch
from fastai.vision.all import *
from timm.loss import LabelSmoothingCrossEntropy
from timm.utils import ModelEmaV3

g = torch.Generator().manual_seed(0)
images, labels = torch.rand(48, 3, 32, 32, generator=g), torch.randint(2, (48,), generator=g)


def data(bs):
    dls = loaders([*zip(images, labels)], bs, 32)
    dls.c = 2
    return dls


@pytest.mark.libraries('timm', '`vision_learner` with a timm model, `fine_tune`',
                       compared='losses, to 10 %',
                       know='On CPUs each worker has batch norm of its own; on GPUs it is synchronized.')
def test_vision_learner():
    def make(bs):
        learn = vision_learner(data(bs), 'resnet10t', n_out=2, pretrained=False, normalize=False, opt_func=SGD,
                               loss_func=CrossEntropyLossFlat(), metrics=accuracy)
        for o in learn.model.modules():
            if isinstance(o, nn.Dropout): o.p = 0.
        return learn
    one, learn = both(make, 'fine_tune', 1, 1e-2)
    assert worst(one.recorder.losses, learn.recorder.losses) < .1


def vit(): return timm.create_model('vit_tiny_patch16_224', img_size=32, num_classes=2, depth=2)


@pytest.mark.libraries('timm', 'a ViT, a loss and an optimizer of timm in a `Learner`')
def test_vit():
    make = lambda bs: Learner(data(bs), vit(), loss_func=LabelSmoothingCrossEntropy(), metrics=accuracy,
                              opt_func=partial(OptimWrapper, opt=timm.optim.Lamb))
    same(make, 'fit_one_cycle', 1, 1e-3)


@pytest.mark.libraries('timm', "timm's optimizers: Lamb, Adan, Lion, NAdamW")
def test_optimizers():
    from timm.optim import Adan, Lamb, Lion, NAdamW
    for o in Lamb, Adan, Lion, NAdamW:
        same(lambda bs: Learner(data(bs), nn.Sequential(nn.Flatten(), nn.Linear(3072, 2)), metrics=accuracy,
                                loss_func=CrossEntropyLossFlat(), opt_func=partial(OptimWrapper,
                                                                                   opt=o)), 'fit', 1, 1e-4)


class EMA(Callback):
    "Averaged weights, as people write it with timm's class"
    def before_fit(self): self.ema = ModelEmaV3(self.model, decay=.9)
    def after_step(self): self.ema.update(self.model)


@pytest.mark.libraries('timm', '`ModelEmaV3` in a callback', compared='weights, losses, metrics, averaged weights')
def test_ema():
    make = lambda bs: Learner(data(bs), vit(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=EMA(),
                              opt_func=SGD)
    one, learn = same(make, 'fit', 2, 1e-2)
    a, b = (o.ema.ema.module.state_dict() for o in (one, learn))
    assert max(float((a[k]-b[k]).abs().max()) for k in a) < 1e-5
