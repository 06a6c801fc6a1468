"""After fits on workers all that can be reached from the learner is as after fits in one process: each object is the
notebook's own if it is there, with what the fits wrote (tests/cases/held.py)."""
import sys
import pytest
from cases.held import HELD
from graphs import differs, places
from parity import seed, warm

pytestmark = [pytest.mark.timeout(120)]
# The time at which a fit began; of the last batch the loss with its graph, and the number, which is of a worker's share
# in a validation; and the order of an epoch that is over.
OTHERWISE = {'start_epoch', 'loss_grad', 'iter', '_DataLoader__idxs'}


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture(autouse=True)
def main():
    "The notebook's namespace is as it was, at the end"
    main = vars(sys.modules['__main__'])
    before = dict(main)
    yield
    for k in main.keys()-before.keys(): del main[k]
    main.update(before)


class Kept:
    "What a case has made, and where all of it was before the fits"
    def __init__(self, name):
        seed()
        made = HELD[name]()
        self.learn, self.more = made if isinstance(made, tuple) else (made, [])
        self.learn.recorder.add_time = False
        self.before, self._alive = places(self.roots())
    def roots(self): return [self.learn, self.more() if callable(self.more) else self.more]
    def fit(self):
        "Two fits with a validation between them, the calls of a block"
        seed(1)
        self.learn.fit(2)
        self.learn.validate()
        self.learn.fit(1)
        self.after = self.roots()


@pytest.mark.parametrize('name', HELD)
def test_held(two, name, recwarn):
    there = Kept(name)
    with there.learn.distrib_ctx(nprocs=2, launcher=two, batch='global'): there.fit()
    here = Kept(name)
    here.fit()
    def compare(): return differs(there.after, here.after, (there.before, here.before), 1e-5, OTHERWISE)
    found = compare()
    assert found is None, found
    assert not [w.message for w in recwarn if 'fastddp' in str(w.message)]
    if callable(here.more): return      # there is one notebook, and its variables are now those of the last learner
    for o in there, here:
        seed(3)
        o.learn.fit(1)
    assert compare() is None
