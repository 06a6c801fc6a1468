from workflows import needs, same
VERSION = needs('albumentations', 'albumentations')
import albumentations, pytest, torch
from fastai.vision.all import *


class Albumented(Transform):
    "As fastai's documentation wraps it"
    split_idx = 0
    def __init__(self, aug): self.aug = aug
    def encodes(self, img:PILImage): return PILImage.create(self.aug(image=np.array(img))['image'])


class OfImageAndMask(ItemTransform):
    "Image and mask in one go"
    split_idx = 0
    def __init__(self, aug): self.aug = aug
    def encodes(self, pair):
        img, mask = pair
        res = self.aug(image=np.array(img), mask=np.array(mask))
        return PILImage.create(res['image']), PILMask.create(res['mask'])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.RandomState(0)
    for i in range(40):
        Image.fromarray(rng.randint(0, 255, (24, 24, 3), dtype=np.uint8)).save(tmp_path/f'{"ab"[i%2]}_{i}.png')
        Image.fromarray(rng.randint(0, 2, (24, 24), dtype=np.uint8)).save(tmp_path/f'mask_{i}.bmp')
    return tmp_path


def label(path): return path.name[0]
def mask_of(path): return path.parent/f"mask_{path.stem.split('_')[1]}.bmp"
def image_files(path): return sorted(o for o in path.glob('*.png'))


@pytest.mark.libraries('albumentations', 'in a `DataBlock`, with loader processes')
def test_images(folder):
    aug = albumentations.Compose([albumentations.HorizontalFlip(p=1.), albumentations.CenterCrop(16, 16)])
    block = DataBlock((ImageBlock, CategoryBlock), get_items=image_files, get_y=label,
                      splitter=IndexSplitter(range(30, 40)),
                      item_tfms=[Albumented(aug), Resize(16)])
    make = lambda bs: Learner(block.dataloaders(folder, bs=bs, val_bs=8, num_workers=2, device='cpu'),
                              nn.Sequential(nn.Flatten(), nn.Linear(768, 2)), loss_func=CrossEntropyLossFlat(),
                              metrics=accuracy, opt_func=SGD)
    same(make, 'fit', 2, 1e-3)


@pytest.mark.libraries('albumentations', 'images and masks, segmentation')
def test_masks(folder):
    aug = albumentations.Compose([albumentations.VerticalFlip(p=1.)])
    block = DataBlock((ImageBlock, MaskBlock(['no', 'yes'])), get_items=image_files, get_y=mask_of,
                      splitter=IndexSplitter(range(30, 40)), item_tfms=[OfImageAndMask(aug)])
    make = lambda bs: Learner(block.dataloaders(folder, bs=bs, val_bs=8, num_workers=0, device='cpu'),
                              nn.Conv2d(3, 2, 3, padding=1), loss_func=CrossEntropyLossFlat(axis=1),
                              metrics=foreground_acc, opt_func=SGD)
    same(make, 'fit', 1, .1)
