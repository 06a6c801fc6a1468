from workflows import assert_same, both, needs
VERSION = needs('fastMONAI', 'torchio', 'fastMONAI.vision_all')
import nibabel, pytest
from fastMONAI.vision_all import *
from fastMONAI.vision_patch import MedPatchDataLoaders, PatchConfig
from monai.losses import DiceLoss
from monai.networks.nets import UNet


@pytest.fixture
def table(tmp_path):
    rng, rows = np.random.RandomState(0), []
    for i in range(14):
        volume = rng.rand(12, 12, 12).astype('float32')
        for name, o in dict(image=volume, mask=(volume > .5).astype('float32')).items():
            nibabel.save(nibabel.Nifti1Image(o, np.eye(4)), tmp_path/f'{name}{i}.nii.gz')
        rows.append(dict(image=str(tmp_path/f'image{i}.nii.gz'), mask=str(tmp_path/f'mask{i}.nii.gz'), valid=i >= 8))
    return pd.DataFrame(rows)


@pytest.mark.libraries('fastMONAI', '`MedPatchDataLoaders`: patches of volumes',
                       know='`learn.dls = DataLoaders(dls.train, dls.valid)`, as the error says')
def test_patches(table):
    config = PatchConfig(patch_size=[8, 8, 8], samples_per_volume=4, queue_length=100, queue_num_workers=0)
    def make(bs):
        dls = MedPatchDataLoaders.from_df(table, 'image', 'mask', valid_col='valid', patch_config=config, bs=bs,
                                          device=torch.device('cpu'))
        dls = DataLoaders(dls.train, dls.valid)
        return Learner(dls, UNet(3, 1, 1, channels=(4, 8), strides=(2,), norm='INSTANCE'),
                       loss_func=CustomLoss(loss_func=DiceLoss(sigmoid=True)), metrics=binary_dice_score, opt_func=SGD)
    assert_same(*both(make, 'fit', 1, 1e-2, bs=2), 1e-3)


@pytest.mark.libraries('fastMONAI', '`MedDataBlock`, segmentation of volumes', compared='weights, losses, metrics')
def test_segmentation(table):
    block = MedDataBlock(blocks=(ImageBlock(cls=MedImage), MedMaskBlock()), splitter=ColSplitter('valid'),
                         get_x=ColReader('image'),
                         get_y=ColReader('mask'), item_tfms=[ZNormalization(), PadOrCrop(8)])
    def make(bs):
        return Learner(block.dataloaders(table, bs=bs, val_bs=2, num_workers=0, device='cpu'),
                       UNet(3, 1, 1, channels=(4, 8), strides=(2,), norm='INSTANCE'),
                       loss_func=CustomLoss(loss_func=DiceLoss(sigmoid=True)), metrics=binary_dice_score, opt_func=SGD)
    assert_same(*both(make, 'fit', 1, 1e-2, bs=2), 1e-3)
