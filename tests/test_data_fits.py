"Whole fits on data that a lesson's loaders don't have: one process's answer, or an error that names the reason."
import os, signal
import pytest, torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from torch.utils.data import DataLoader as TorchLoader, get_worker_info
from fastddp.all import RankRaised
from parity import Warm, assert_same, fit_both, items, learner, loaders, seed, warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture
def brittle():
    "A launcher for fits that fail"
    launcher = Warm()
    yield launcher
    launcher.end()


# ---- what ends a rank's loader early

class Killed:
    "Items of which one kills the loader's process that makes it"
    def __init__(self, data, bad): self.data, self.bad = data, bad
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        if i == self.bad and get_worker_info(): os.kill(os.getpid(), signal.SIGKILL)
        return self.data[i]


def no_pickle(b): return torch.stack([x for x, _ in b]), torch.stack([y for _, y in b]), lambda: 'no pickle'
def fastai_dl(ds, **kw): return DataLoader(ds, bs=4, num_workers=2, **kw)
def fastai_lambdas(ds): return fastai_dl(ds, create_batch=no_pickle)
def torch_dl(ds, **kw): return TorchLoader(ds, batch_size=4, num_workers=2, **kw)
def torch_lambdas(ds): return torch_dl(ds, collate_fn=no_pickle)


@pytest.mark.parametrize('make,bad,why', [
    (fastai_dl, 9, 'DataLoader worker'), (torch_dl, 9, 'DataLoader worker'),
    (fastai_lambdas, None, "Can't pickle"), (torch_lambdas, None, "Can't pickle")])
def test_what_ends_a_loader_is_its_ranks_error(make, bad, why, brittle):
    learn = learner(train=24, valid=8)
    learn.dls = DataLoaders(make(Killed(items(24), bad)), learn.dls.valid)
    with pytest.raises(RankRaised, match=why) as caught: learn.distrib_fit(1, nprocs=2, launcher=brittle, timeout=100)
    if bad is not None: assert caught.value.rank == bad % 2


# ---- batches of a batch sampler

class Balanced:
    "Batches of different sizes, in an order of its own"
    def __init__(self, n): self.n, self.epoch = n, 0
    def __len__(self): return len(range(0, self.n, 7))
    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (order[i:i+(7 if i % 2 else 5)] for i in range(0, self.n, 7))


@pytest.mark.parametrize('num_workers', [0, 2])
def test_a_batch_sampler_of_ones_own(num_workers, two):
    data = items(31)
    learn = learner(valid=9)
    train = TorchLoader(data, batch_sampler=Balanced(31), num_workers=num_workers)
    learn.dls = DataLoaders(train, TorchLoader(items(9), batch_sampler=[[0, 1, 2], [3, 4, 5, 6], [7, 8]]))
    assert_same(*fit_both(learn, 2, two, 2, batch='global'))


def test_each_worker_takes_a_batch_of_a_batch_sampler(two):
    learn = learner(valid=9)
    learn.dls = DataLoaders(TorchLoader(items(31), batch_sampler=Balanced(31)), learn.dls.valid)
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert len(learn.recorder.losses) == 3
