"Vision: classes, several labels, points, segmentation, other people's models."
import math
from pathlib import Path
import numpy as np, pytest, torch
from fastai.vision.all import (
    BCEWithLogitsLossFlat, Categorize, CategoryBlock, CrossEntropyLossFlat, DataBlock, Datasets, Dice, Flip,
    ImageBlock, IndexSplitter, IntToFloatTensor, L, Learner, MSELossFlat, MaskBlock, MultiCategoryBlock,
    PILImage, PILMask, PointBlock, RegressionBlock, SGD, TensorPoint, ToTensor, Transform, accuracy,
    accuracy_multi, aug_transforms, fastuple, params, resnet18, unet_learner, vision_learner)
from torch import nn
import fastddp.all
from applications import Double, as_one, same_preds
from learners import seed_all
from spread import long_but

N, SIZE = 44, 32


def picture(i, size=SIZE):
    "A noisy square, light or dark by the parity of `i`, somewhere"
    r = np.random.RandomState(i)
    a = r.randint(90, 160, (size, size, 3), dtype=np.uint8)
    x, y = corner(i)
    a[y:y+8, x:x+8] = 250 if i % 2 else 5
    return a


def corner(i): return (i*7) % (SIZE-8), (i*11) % (SIZE-8)
def kind(i): return 'light' if i % 2 else 'dark'
def kinds(i): return [kind(i), 'left' if corner(i)[0] < 12 else 'right']
def point(i): return TensorPoint(torch.tensor([corner(i)], dtype=torch.float32))
def number(i): return corner(i)[0]/SIZE
def items(_): return list(range(N))


def mask(i):
    m = np.zeros((SIZE, SIZE), dtype=np.uint8)
    x, y = corner(i)
    m[y:y+8, x:x+8] = 1
    return m


def loaders(block, get_y, bs=8, batch_tfms=None):
    seed_all()
    block = DataBlock((ImageBlock, block), get_items=items, get_x=picture, get_y=get_y, batch_tfms=batch_tfms,
                      splitter=IndexSplitter(list(range(33, N))))
    return block.dataloaders('.', bs=bs, num_workers=0, device='cpu')


@pytest.fixture
def cached_weights(tmp_path, monkeypatch):
    "What torchvision would download lies in its cache already"
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    (tmp_path/'hub'/'checkpoints').mkdir(parents=True)
    seed_all(5)
    state = resnet18().state_dict()
    torch.save(state, tmp_path/'hub'/'checkpoints'/'resnet18-f37072fd.pth')
    return state


@pytest.mark.full
def test_fine_tuned_classifier(cached_weights):
    "Frozen, then all of it; the body begins with the cached weights"
    dls = loaders(CategoryBlock, kind, batch_tfms=[Flip()])
    learn = vision_learner(dls, resnet18, metrics=accuracy, normalize=False)
    body = learn.model[0][0].weight.detach().clone()
    assert torch.equal(body, cached_weights['conv1.weight'])
    learn.distrib_fine_tune(1, nprocs=2)
    assert not torch.equal(body, learn.model[0][0].weight) and math.isfinite(learn.recorder.values[-1][1])
    last = [*learn.recorder.values[-1][1:]]
    assert [*learn.validate()] == pytest.approx(last, abs=1e-4)
    same_preds(learn, eps=1e-4)


def convs(n_out):
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                         nn.Flatten(), nn.Linear(32, n_out))


def sigm_acc(inp, targ): return accuracy_multi(inp, targ)


KINDS = {
    'single label': lambda: Learner(loaders(CategoryBlock, kind), convs(2), metrics=accuracy, opt_func=SGD),
    'several labels': lambda: Learner(loaders(MultiCategoryBlock, kinds), convs(4), loss_func=BCEWithLogitsLossFlat(),
                                      metrics=sigm_acc, opt_func=SGD),
    'points': lambda: Learner(loaders(PointBlock, point), convs(2), loss_func=MSELossFlat(), opt_func=SGD),
    'a number': lambda: Learner(loaders(RegressionBlock, number), convs(1), loss_func=MSELossFlat(), opt_func=SGD)}


@pytest.mark.parametrize('what', long_but(KINDS, 'several labels'))
def test_as_one_process(what): same_preds(as_one(KINDS[what]))


@pytest.mark.full
def test_segmentation():
    "A U-Net, scored by `Dice`, as one process"
    def make():
        dls = loaders(MaskBlock(['none', 'square']), mask, bs=16)
        return unet_learner(dls, resnet18, pretrained=False, metrics=Dice(), n_out=2, normalize=False, opt_func=SGD,
                            cbs=Double())
    learn = as_one(make, n_epoch=1, lr=1e-3)
    assert 0 < learn.recorder.values[-1][2] < 1


@pytest.mark.full
def test_timm(tmp_path):
    "A model of the timm library, by name, as one process; its pretrained weights lie on disk already"
    timm = pytest.importorskip('timm', reason='timm is not installed')
    seed_all(5)
    state = timm.create_model('resnet10t').state_dict()
    torch.save(state, tmp_path/'weights.pth')
    def make():
        learn = vision_learner(loaders(CategoryBlock, kind), 'resnet10t', metrics=accuracy, normalize=False, ps=0.,
                               opt_func=SGD, cbs=Double(),
                               pretrained_cfg_overlay=dict(file=str(tmp_path/'weights.pth')))
        assert torch.equal(learn.model[0].model.conv1[0].weight, state['conv1.0.weight'])
        learn.unfreeze()
        return learn
    learn = as_one(make)
    assert not torch.equal(learn.model[0].model.conv1[0].weight, state['conv1.0.weight'])


class Film(fastuple): "Pictures one after the other"


class Frames(Transform):
    "Three pictures of a square, which is light or dark by the first"
    split_idx = None
    def encodes(self, i): return Film(PILImage.create(picture(o)) for o in (i, i+1, i+2))


class Seen(nn.Module):
    "A body for each picture, a recurrent head for all"
    def __init__(self):
        super().__init__()
        self.body, self.rnn, self.head = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                                                       nn.Flatten()), nn.RNN(16, 8, batch_first=True), nn.Linear(8, 2)
    def forward(self, film): return self.head(self.rnn(torch.stack([self.body(o) for o in film], 1))[0][:, -1])


def films():
    "By the mid-level API: `Datasets` of a type of its own, augmented alike over a film"
    seed_all()
    dsets = Datasets(list(range(N)), [[Frames()], [kind, Categorize()]], splits=[list(range(33)), list(range(33, N))])
    dls = dsets.dataloaders(bs=8, after_item=[ToTensor()], after_batch=[IntToFloatTensor()], num_workers=0,
                            device='cpu')
    return Learner(dls, Seen(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD)


@pytest.mark.full
def test_image_sequences():
    learn = as_one(films)
    assert type(learn.dls.one_batch()[0]) is Film
    same_preds(learn)
