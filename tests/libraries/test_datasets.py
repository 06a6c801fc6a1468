from workflows import needs, same
VERSION = needs('datasets', 'datasets')
import datasets, pytest, torch
from fastai.basics import *

g = torch.Generator().manual_seed(0)
x = torch.rand(60, 4, generator=g)
data = datasets.Dataset.from_dict(dict(x=x.tolist(), y=(x.sum(1) > 2).long().tolist())).with_format('torch')


def pairs(items): return torch.stack([o['x'] for o in items]), torch.stack([o['y'] for o in items])


def learner(dls): return Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), metrics=accuracy,
                                 opt_func=SGD)


@pytest.mark.libraries('datasets', 'a `Dataset` in loaders of torch')
def test_torch_loaders():
    train, valid = data.select(range(40)), data.select(range(40, 60))
    loader = torch.utils.data.DataLoader
    same(lambda bs: learner(DataLoaders(loader(train, bs, collate_fn=pairs), loader(valid, 8, collate_fn=pairs),
                                        device='cpu')), 'fit', 2, .1)


@pytest.mark.libraries('datasets', "a `Dataset` in fastai's loaders, `create_batch`")
def test_fastai_loaders():
    train, valid = data.select(range(40)), data.select(range(40, 60))
    same(lambda bs: learner(DataLoaders(DataLoader(train, bs=bs, shuffle=True, create_batch=pairs, num_workers=0),
                                        DataLoader(valid, bs=8, create_batch=pairs,
                                                   num_workers=0), device='cpu')), 'fit', 2, .1)
