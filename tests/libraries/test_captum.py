from workflows import loaders, needs, same
VERSION = needs('captum', 'captum.attr')
import pytest, torch
from captum.attr import IntegratedGradients, Saliency
from fastai.basics import *

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


@pytest.mark.libraries('captum', 'attributions of the model after a fit',
                       compared='weights, losses, metrics, attributions')
def test_attributions():
    one, learn = same(lambda bs: Learner(loaders([*zip(x, y)], bs), nn.Sequential(nn.Linear(4, 8), nn.Tanh(),
                                                                                  nn.Linear(8, 2)),
                      loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD), 'fit', 2, .1)
    for kind in IntegratedGradients, Saliency:
        a, b = (kind(o.model).attribute(x[:5].clone().requires_grad_(), target=1) for o in (one, learn))
        assert torch.allclose(a, b, atol=1e-4)
