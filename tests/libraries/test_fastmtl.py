from workflows import needs, same
VERSION = needs('fastmtl', 'fastmtl.loss', 'fastmtl.metric')
import pytest, torch
from fastai.basics import *
from fastmtl.loss import CombinedLoss
from fastmtl.metric import mtl_metrics

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
total, kind = x.sum(1, keepdim=True), (x.sum(1) > 2).long()


class Heads(Module):
    def __init__(self): self.body, self.total, self.kind = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 2)
    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.total(x), self.kind(x)


def two_tasks(bs):
    items = [*zip(x, total, kind)]
    dls = DataLoaders.from_dsets(items[:40], items[40:], bs=bs, device='cpu', num_workers=0)
    for dl in dls.loaders: dl._n_inp = 1
    dls.valid.bs = 8
    return Learner(dls, Heads(), loss_func=CombinedLoss.from_one_to_one_routing(MSELossFlat(), CrossEntropyLossFlat()),
                   metrics=mtl_metrics([mae, R2Score()], [accuracy, F1Score()]), opt_func=SGD)


@pytest.mark.libraries('fastmtl', 'two heads, `CombinedLoss`, metrics of each head')
def test_two_tasks(): same(two_tasks, 'fit', 3, .1)
