"""After fits on workers all that can be reached from the learner is as after fits in one process: each object is the
notebook's own if it is there, with what the fits wrote (tests/cases/held.py)."""
import contextlib, sys
from pathlib import Path
import pytest
from cases.held import HELD
from faults import OneFault
from graphs import differs, places
from parity import seed, warm
from fastddp.all import InProcess, RankRaised

pytestmark = [pytest.mark.timeout(120)]
# The time at which a fit began; of the last batch the loss with its graph, and the number, which is of a worker's share
# in a validation; and the order of an epoch that is over.
OTHERWISE = {'start_epoch', 'loss_grad', 'iter', '_DataLoader__idxs'}
# Of a fit that goes on also locks, and what transforms keep of their types
OF_CUT = OTHERWISE | {'lock', '__signature__', 'encodes', '_resolver'}
# The logger gets the names of columns again when a fit goes on; this one ends in its first epoch
NOT_CUT = {'rows_that_a_logger_collects', 'a_finder_of_ones_own'}


@pytest.fixture(scope='module')
def two(request):
    with warm(2) as launcher:
        # its memory for large payloads stays
        is_large = any('large' in o.name for o in request.session.items)
        for _ in range(2*is_large): Kept('large objects of any kind').learn.distrib_fit(1, nprocs=2, launcher=launcher)
        yield launcher


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
    def __init__(self, name, *cbs):
        seed()
        made = HELD[name]()
        self.learn, self.more = made if isinstance(made, tuple) else (made, [])
        self.learn.recorder.add_time = False
        self.learn.add_cbs(cbs)
        self.before, self._alive = places(self.roots())
        seed(1)
    def roots(self): return [self.learn, self.more() if callable(self.more) else self.more]
    def done(self):
        self.after = self.roots()
        return self


def assert_same(there, here, otherwise=OTHERWISE):
    "Now, and after a fit of each in this process"
    def compare(): return differs(there.after, here.after, (there.before, here.before), 1e-5, otherwise)
    found = compare()
    assert found is None, found
    if callable(here.more): return      # there is one notebook, and its variables are now those of the last learner
    for o in there, here:
        seed(3)
        o.learn.fit(1)
    assert compare() is None


@pytest.mark.few(24)
@pytest.mark.parametrize('name', HELD)
@pytest.mark.parametrize('here', [False, True])
def test_held(two, here, name):
    "After two fits with a validation between them, the calls of a block, on workers or with `InProcess()`"
    def run(options):
        kept = Kept(name)
        with kept.learn.distrib_ctx(**options) if options else contextlib.nullcontext():
            kept.learn.fit(2)
            kept.learn.validate()
            kept.learn.fit(1)
        return kept.done()
    options = dict(launcher=InProcess()) if here else dict(nprocs=2, launcher=two, batch='global')
    assert_same(run(options), run(None))


def in_a_job(make, **options):
    kept = make()
    Path(kept.learn.one_fault.marker).touch()       # it isn't cut
    kept.learn.distrib_fit(3, wait=False, **options).result()
    return kept


def restarted(make, **options):
    kept = make()
    kept.learn.distrib_fit(3, restarts=1, **options)
    return kept


def resumed(make, **options):
    kept = make()
    with pytest.raises(RankRaised): kept.learn.distrib_fit(3, **options)
    kept.learn.distrib_resume()
    return kept


def from_the_file(make, **options):
    "A learner made anew, as in a new kernel"
    with pytest.raises(RankRaised): make().learn.distrib_fit(3, checkpoint='epoch', **options)
    kept = make()
    kept.learn.distrib_resume('distrib')
    return kept


# Of those that found something, one each
SHORT = [(in_a_job, 'deep_in_a_callback'), (restarted, 'gradients_that_accumulation_left'),
         (resumed, 'a_model_and_an_optimizer_of_a_fit'), (from_the_file, 'exchanged_loaders'),
         (from_the_file, 'a hook collects'), (from_the_file, 'views_of_dicts_and_of_attributes')]
CUT = [(how, name) for how in (in_a_job, restarted, resumed, from_the_file)
       for name in HELD if name not in NOT_CUT]


@pytest.mark.parametrize('how, name', [o if o in SHORT else pytest.param(*o, marks=pytest.mark.full) for o in CUT])
def test_held_by_a_fit_that_was_cut(how, name, tmp_path):
    "In its second epoch, or that ran beside the notebook: as if nothing had happened"
    def make():
        kept = Kept(name, OneFault('exception', 'after_pred', 1, 1, 1, marker=str(tmp_path/'fired')))
        kept.learn.path = tmp_path
        return kept
    there = how(make, nprocs=2, batch='global').done()
    here = make()
    here.learn.fit(3)
    assert_same(there, here.done(), OF_CUT)
