"Each case of the table (tests/cases) on N workers: one process's weights, optimizer state, losses, metrics, rates."
import math
import pytest
import cases.data, cases.losses, cases.steps     # they fill the table
from cases import CASES
from fastddp.output import replay
from parity import assert_same, largest, seed, warm

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings('ignore:Using backward')]
LINES = dict(whole='is computed over the predictions of all workers',
             averaged='averaged over workers, weighted by items')


def combinations():
    """Each case with each number of workers and kind of batch. `make test` takes every third case, with one of these,
    another one for each"""
    for i, (name, case) in enumerate(CASES.items()):
        ways = [(n, batch) for n in case.ranks for batch in case.batch]
        short = None if i % 3 else ways[i//3 % len(ways)]
        for n, batch in ways: yield pytest.param(n, name, batch, marks=[] if (n, batch) == short else pytest.mark.full)


@pytest.fixture(scope='module')
def launchers():
    "By their number of workers"
    with warm(2) as two, warm(3) as three: yield {2: two, 3: three}


@pytest.mark.parametrize('n,name,batch', sorted(combinations(), key=lambda o: o.values[0]))
def test_case(launchers, n, name, batch, capfd, monkeypatch):
    launcher, case = launchers[n], CASES[name]
    monkeypatch.setattr(replay, '_printed', set())      # a line comes once in a process
    learn, one = (case.learner(scale, batch) for scale in (1, n if batch == 'per_worker' else 1))
    def on_workers(how, *args, **kwargs):
        learn.distrib(how, *args, nprocs=n, launcher=launcher, batch=batch, timeout=60, **case.options, **kwargs)
    seed(1)
    case.run(learn, on_workers)
    said = ''.join(capfd.readouterr())
    seed(1)
    case.run(one, lambda how, *args, **kwargs: getattr(one, how)(*args, **kwargs))
    if case.tol != math.inf: assert_same(learn, one, case.tol, min(case.tol/10, 2e-6) if case.tol < .01 else .05)
    assert largest(learn.recorder.lrs, one.recorder.lrs) < 1e-9
    if case.check: case.check(learn, one)
    assert 'drifted apart' not in said
    assert {o: said.count(o) for o in case.says} == {o: 1 for o in case.says}, said
    if case.loss: assert {k for k, line in LINES.items() if line in said} == {case.loss} - {'weighted'}, said
