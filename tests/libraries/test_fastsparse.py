from workflows import loaders, needs, same
VERSION = needs('fastsparse', 'fastsparse.core')
import pytest, torch
from fastai.basics import *
from fastsparse.core import DynamicSparseTrainingCallback, RigL_presets, SNFS_presets, sparsify_model

x = torch.rand(60, 8, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 4).long()


def sparse(bs, presets):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    learn = Learner(loaders([*zip(x, y)], bs), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy,
                    opt_func=partial(SGD, mom=.9), cbs=DynamicSparseTrainingCallback(batches_per_update=2, **presets))
    sparsify_model(learn, .5)
    return learn


@pytest.mark.libraries('fastsparse', '`sparsify_model`, RigL and SNFS: connections that are dropped and grown')
@pytest.mark.parametrize('presets', [RigL_presets, SNFS_presets])
def test_dynamic(presets):
    one, learn = same(lambda bs: sparse(bs, presets), 'fit', 3, .1)
    assert float((learn.model[0].weight*learn.model[0].weight_mask == 0).float().mean()) > .3
