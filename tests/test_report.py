"""What a fit says about where its time went."""
import time
from fastddp.all import *
from learners import make_learner

STEPS = ['ship', 'join', 'load', 'first step', 'train', 'back']


def test_phases_of_a_fit_add_up():
    learn = make_learner()
    assert learn.distrib_report is None
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        called = time.time()
        learn.fit(1)
        first, ended = learn.distrib_report, time.time()
        learn.fit(1)
        second = learn.distrib_report
        learn.get_preds()
        preds = learn.distrib_report
    # workers that have just started meet while the notebook still writes
    assert list(first.phases) == ['snapshot', 'helper', 'fork', 'join', 'ship', *STEPS[2:]]
    assert list(second.phases) == ['snapshot', *STEPS]      # the workers are there
    assert list(preds.phases) == ['snapshot', *['validate' if o == 'train' else o for o in STEPS]]
    assert all(secs > 0 for secs in first.phases.values())
    assert called <= first.began and first.began+first.total <= ended
    assert abs(first.marks[-1][1]-first.began-first.total) < 1e-6       # nothing is missing, nothing counted twice
    assert all(phase in repr(first) for phase in first.phases) and repr(first).startswith('1 epoch: ')
