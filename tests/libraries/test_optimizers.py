from workflows import loaders, needs, same
VERSION = needs('pytorch_optimizer', 'pytorch_optimizer')
import pytest, pytorch_optimizer, torch
from fastai.basics import *

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


def learner(bs, opt):
    return Learner(loaders([*zip(x, y)], bs), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
                   metrics=accuracy,
                   loss_func=CrossEntropyLossFlat(), opt_func=partial(OptimWrapper, opt=opt))


@pytest.mark.libraries('pytorch_optimizer',
                       'AdaBelief, Adan, Lamb, Lion, NovoGrad, StableAdamW, ADOPT by `OptimWrapper`')
@pytest.mark.parametrize('name', ['AdaBelief', 'Adan', 'Lamb', 'Lion', 'NovoGrad', 'StableAdamW', 'ADOPT'])
def test_by_name(name): same(lambda bs: learner(bs, getattr(pytorch_optimizer, name)), 'fit_one_cycle', 2, 1e-2)


@pytest.mark.libraries('pytorch_optimizer', '`Lookahead` around another one')
def test_lookahead():
    class Ahead(pytorch_optimizer.Lookahead):
        def __init__(self, params, lr, **kwargs): super().__init__(torch.optim.SGD(params, lr), k=2)
    same(lambda bs: learner(bs, Ahead), 'fit', 2, 1e-2)
