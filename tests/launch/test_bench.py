"""`distrib_bench` trains a copy for some steps, and leaves the learner as it is."""
import copy, os
import pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastddp.all import *
from learners import make_learner


def test_steps_with_each_choice():
    learn = make_learner(cbs=[])
    before, stream = copy.deepcopy(learn.model.state_dict()), torch.get_rng_state()
    res = learn.distrib_bench(nprocs=2, bs=(8, 32), steps=6)
    assert [(o.workers, o.batch) for o in res] == [(2, 8), (2, 32)] and all(0 < o.rate <= o.without_data for o in res)
    assert 'Worth it: 2 workers' in str(res) and '#'*20 in str(res)
    assert all(torch.equal(v, before[k]) for k, v in learn.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream) and learn.dls.bs == 16 and learn.opt is None


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
    assert [(o.batch, o.rate > 0) for o in res] == [(16, True)]*2+[(32, False)]*2
    assert str(res).count('out of memory') == 2 and res.worth_it.batch == 16
    assert [o.num_workers for o in res] == [0, max(1, len(os.sched_getaffinity(0))//2)]*2     # those that run
