from workflows import loaders, needs, same
VERSION = needs('torch-geometric', 'torch_geometric')
import pytest, torch
from fastai.basics import *
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GCNConv, global_mean_pool


def graphs(n=60):
    g = torch.Generator().manual_seed(0)
    res = []
    for i in range(n):
        k = 3 + i%4
        edges = torch.stack([torch.arange(k), (torch.arange(k)+1)%k])
        x = torch.randn(k, 4, generator=g)
        res.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=(x.mean() > 0).long().view(1)))
    return res


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(4, 8), nn.Linear(8, 2)
    def forward(self, data): return self.head(global_mean_pool(self.conv(data.x, data.edge_index).tanh(), data.batch))


def collate(items):
    batch = Batch.from_data_list(list(items))
    return batch, batch.y


class Pairs(GraphLoader):
    "Its own loader gives a batch with the targets inside: a pair for fastai"
    def __iter__(self):
        for o in super().__iter__(): yield o, o.y


def learner(dls): return Learner(dls, GCN(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=SGD)


@pytest.mark.libraries('torch-geometric', "graphs in fastai's loaders, `create_batch`")
def test_fastai_loaders():
    data = graphs()
    same(lambda bs: learner(DataLoaders(DataLoader(data[:40], bs=bs, shuffle=True, create_batch=collate,
                                                   num_workers=0),
                                        DataLoader(data[40:], bs=8, create_batch=collate,
                                                   num_workers=0), device='cpu')),
         'fit', 2, .1)


@pytest.mark.libraries('torch-geometric', "its own `DataLoader`, derived to give pairs")
def test_own_loader():
    data = graphs()
    same(lambda bs: learner(DataLoaders(Pairs(data[:40], bs), Pairs(data[40:], 8), device='cpu')), 'fit', 2, .1)
