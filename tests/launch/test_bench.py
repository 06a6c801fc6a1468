"""`distrib_bench` trains a copy for some steps, and leaves the learner as it is."""
import copy, os
import pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.data.core import DataLoaders
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, RandomSampler, Sampler
from fastddp.all import *
from learners import make_learner


def test_steps_with_each_choice():
    learn = make_learner(cbs=[])
    before, stream = copy.deepcopy(learn.model.state_dict()), torch.get_rng_state()
    res = learn.distrib_bench(nprocs=2, bs=(8, 32), steps=6)
    assert [(o.workers, o.batch) for o in res] == [(1, 16), (2, 8), (2, 32)]
    assert all(0 < o.rate <= o.without_data for o in res)
    assert str(res).splitlines()[1].split()[-3] == '1.00'      # times one worker's rate
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream) and learn.dls.bs == 16 and learn.opt is None


class Unequal(Sampler):
    "A batch sampler of the user's own, which decides the sizes"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n//8
    def __iter__(self): return ([*range(i, i+8)] for i in range(0, self.n, 8))


def sampled(dl): return TorchLoader(dl.dataset, batch_sampler=BatchSampler(RandomSampler(dl.dataset), 8, False))
def unequal(dl): return TorchLoader(dl.dataset, batch_sampler=Unequal(len(dl.dataset)))


@pytest.mark.parametrize('made,bs', [(sampled, 8), (unequal, None), (list, None)])
def test_loaders_without_a_batch_size(made, bs):
    "A list of batches is read whole, and has no processes"
    learn = make_learner(cbs=[])
    learn.dls = DataLoaders(made(learn.dls.train), made(learn.dls.valid))
    one, row = res = learn.distrib_bench(nprocs=2, steps=2)
    assert (one.workers, row.workers) == (1, 2)     # beside one worker
    assert row.batch == bs and row.num_workers == 0 and row.rate > 0 and row.epoch > 0
    assert bs or ' -  ' in str(res)


class Ends(Callback):
    "Ends the fit before a step is timed"
    def after_batch(self): raise CancelFitException


def test_a_fit_that_ends_at_once_is_refused():
    with pytest.raises(CantDistribute, match='No step was timed'):
        make_learner(cbs=[Ends()]).distrib_bench(nprocs=2, steps=2)


class Full(torch.nn.Linear):
    "As on a GPU that holds 16 items"
    def forward(self, x):
        if len(x) > 16: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
        return super().forward(x)


def test_a_batch_that_does_not_fit_is_an_answer():
    learn = make_learner(cbs=[])
    learn.model = Full(8, 2)
    res = learn.distrib_bench(nprocs=2, bs=(16, 32), num_workers=(0, 99), steps=2)
    assert [(o.batch, o.rate > 0) for o in res] == [(16, True)]*3+[(32, False)]*2
    assert str(res).count('out of memory') == 2
    cores = len(os.sched_getaffinity(0))        # as many of them run at most
    assert [o.num_workers for o in res] == [min(learn.dls.train.fake_l.num_workers, cores)]+[0, max(1, cores//2)]*2
