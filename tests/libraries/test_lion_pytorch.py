from workflows import loaders, needs, same
VERSION = needs('lion-pytorch', 'lion_pytorch')
import pytest, torch
from fastai.basics import *
from lion_pytorch import Lion

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


@pytest.mark.libraries('lion-pytorch', '`Lion` by `OptimWrapper`')
def test_lion():
    same(lambda bs: Learner(loaders([*zip(x, y)], bs), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(),
                            metrics=accuracy,
                            opt_func=partial(OptimWrapper, opt=Lion)), 'fit_one_cycle', 2, 1e-3)
