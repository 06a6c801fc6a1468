from workflows import loaders, needs, same
VERSION = needs('pytorch-metric-learning', 'pytorch_metric_learning')
import pytest, torch
from fastai.basics import *
from pytorch_metric_learning import losses, miners, samplers

g = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 6, generator=g), torch.arange(64)%4
model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def learner(bs, loss, **kwargs): return Learner(loaders([*zip(x, y)], bs, 48), model(), loss_func=loss, opt_func=SGD,
                                                **kwargs)


@pytest.mark.libraries('pytorch-metric-learning', 'losses over pairs: contrastive, triplet, NTXent, SupCon, circle',
                       compared='weights, losses')
@pytest.mark.parametrize('kind', ['ContrastiveLoss', 'TripletMarginLoss', 'NTXentLoss', 'SupConLoss', 'CircleLoss'])
def test_pairs(kind): same(lambda bs: learner(bs, getattr(losses, kind)()), 'fit', 2, .01)


class Mined(nn.Module):
    "A loss with a miner, as its documentation has it"
    def __init__(self):
        super().__init__()
        self.miner, self.loss = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()
    def forward(self, emb, y): return self.loss(emb, y, self.miner(emb, y))


@pytest.mark.libraries('pytorch-metric-learning', 'a miner and a loss', compared='weights, losses')
def test_miner(): same(lambda bs: learner(bs, Mined()), 'fit', 2, .01)


def with_the_loss(model): return [params(model)]


@pytest.mark.libraries('pytorch-metric-learning',
                       'a loss with parameters of its own (ArcFace), trained by the optimizer',
                       compared="weights, losses, the loss's parameters")
def test_arcface():
    def make(bs):
        loss = losses.ArcFaceLoss(4, 5)
        return learner(bs, loss, splitter=lambda m: [params(m), params(loss)])
    one, learn = same(make, 'fit', 2, .01)
    a, b = one.loss_func.W, learn.loss_func.W
    assert torch.allclose(a, b, atol=1e-5)
