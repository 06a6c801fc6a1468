"""`distrib_bench` trains a copy for some steps, and leaves the learner as it is."""
import copy
import torch
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
