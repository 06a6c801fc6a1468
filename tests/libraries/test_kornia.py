from workflows import loaders, needs, same
VERSION = needs('kornia', 'kornia')
import pytest, torch, kornia.augmentation as K
from fastai.vision.all import *
from kornia.losses import BinaryFocalLossWithLogits, FocalLoss, SSIMLoss

g = torch.Generator().manual_seed(0)
images, labels = torch.rand(48, 3, 16, 16, generator=g), torch.randint(2, (48,), generator=g)
model = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class Augment(Transform):
    "A pipeline of kornia over batches"
    split_idx = 0
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pipe = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.), K.Normalize(torch.zeros(3),
                                                                                       torch.ones(3)*2))
    def encodes(self, x:TensorImage): return TensorImage(self.pipe(x))


class Random(Callback):
    "Random augmentation in a callback"
    def __init__(self): self.pipe = K.RandomErasing(p=1.)
    def before_batch(self):
        if self.training: self.learn.xb = (self.pipe(self.x),)


def learner(bs, loss=None, **kwargs):
    return Learner(loaders([*zip(map(TensorImage, images), labels)], bs, **kwargs.pop('of_loaders', {})), model(),
                   loss_func=loss or CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD, **kwargs)


@pytest.mark.libraries('kornia', 'augmentation as a batch transform of the loaders')
def test_transform(): same(lambda bs: learner(bs, of_loaders=dict(after_batch=Augment())), 'fit', 2, .1)


@pytest.mark.libraries('kornia', 'random augmentation in a callback', compared='it trains, the loss is finite',
                       know='Random values differ from those of one process.')
def test_callback():
    from workflows import both
    one, learn = both(lambda bs: learner(bs, cbs=Random()), 'fit', 2, .1)
    assert len(learn.recorder.losses) == len(one.recorder.losses) and np.isfinite(learn.recorder.values).all()


@pytest.mark.libraries('kornia', 'focal loss')
def test_focal(): same(lambda bs: learner(bs, FocalLoss(alpha=.5, reduction='mean')), 'fit', 2, .1)
