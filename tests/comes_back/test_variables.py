"""What cells write into their own variables (cases/held.py) in predictions, checks, and before a failure"""
import sys
from functools import partial
import pytest
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.fastai2 import resume
from cases.held import CELL
from parity import learner, seed, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture
def cell():
    "The namespace of a notebook in which the cell has run"
    main = vars(sys.modules['__main__'])
    before = dict(main)
    exec(CELL, main)
    yield main
    for k in main.keys()-before.keys(): del main[k]
    main.update(before)


def values(ns):
    Notes = ns['Notes']
    res = [ns[k] for k in ('seen', 'by_epoch', 'epochs', 'n', 'calls')]
    return [*res, ns['weights'].tolist(), ns['average'].tolist(), len(ns['frame']), ns['meter'].values, Notes.history,
            Notes.steps, getattr(ns['loss'], 'count', 0)]


def test_predictions_write_too_and_the_next_call_sees_it(cell, two):
    learn = learner(metrics=cell['rate'])
    learn.model[0].register_forward_hook(cell['hook'])
    outputs = cell['outputs']
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.get_preds()
        n = len(outputs)
        outputs.append('mine')
        learn.validate()
    assert n == len(learn.dls.valid) and outputs[n] == 'mine' and len(outputs) == 2*n+1 and len(cell['rated']) == 2*n


def test_in_process_the_notebooks_classes_stay_its_own(cell):
    learn, Notes = learner(loss_func=cell['loss'], cbs=cell['Notes']()), cell['Notes']
    method = Notes.after_batch
    with learn.distrib_ctx(launcher=InProcess()): learn.fit(1)
    assert Notes.after_batch is method and cell['n'] == Notes.steps == 10 and len(cell['losses']) == 10
    learn.fit(1)
    assert cell['n'] == Notes.steps == 20 and len(cell['calls']) == len(cell['losses']) == 20


def test_a_check_writes_nothing(cell, two):
    "But for its steps in this process"
    learn = learner(loss_func=cell['loss'], cbs=cell['Notes']())
    assert learn.distrib_check(3, nprocs=2, launcher=two).same
    assert cell['n'] == len(cell['losses']) == 3


def test_a_bench_writes_nothing(cell):
    learner(loss_func=cell['loss'], cbs=cell['Notes']()).distrib_bench((1, 2), steps=2)
    assert cell['n'] == len(cell['losses']) == cell['Notes'].steps == 0


def test_what_cannot_come_back_is_named(two):
    held, kept = [], []
    class Holds(Callback):
        def after_epoch(self):
            held.append(i for i in ())
            kept.append(self.epoch)
    learn = learner()
    with pytest.warns(UserWarning, match="fastddp: .*held.*can't be sent back from the workers"):
        learn.distrib_fit(1, nprocs=2, launcher=two, cbs=Holds())
    assert (held, kept) == ([], [0])


def test_a_checkpoint_has_them_for_a_new_kernel(cell, two, tmp_path, monkeypatch):
    "For what the same cells define there: not for the variables of functions that a function made"
    def make():
        learn = learner(path=tmp_path, metrics=cell['rate'], cbs=cell['Notes']())
        learn.model[0].register_forward_hook(cell['hook'])
        return learn
    def held(): return [*values(cell), cell['losses'][:], cell['rate'].__defaults__, len(cell['rated'])]
    seed(1)
    make().distrib_fit(3, nprocs=2, launcher=two)
    whole, written, write = held(), [], resume.write_checkpoint
    def until_the_second(*args):
        written.append(len(written) < 2 and write(*args))
    monkeypatch.setattr(resume, 'write_checkpoint', until_the_second)
    exec(CELL, cell)
    seed(1)
    make().distrib_fit(3, checkpoint='epoch', nprocs=2, launcher=two)
    assert len(written) == 3
    exec(CELL, cell)        # as in a new kernel
    losses, method = cell['losses'], cell['Notes'].after_batch
    seed(99)
    make().distrib_resume('distrib')
    assert held() == whole and len(losses) == 15
    assert cell['losses'] is losses and cell['Notes'].after_batch is method


class HoldsFunctions(Callback):
    def __init__(self, f): self.f, self.g = f, partial(f, calls=[])
    def before_epoch(self):
        if self.epoch == 1: raise KeyError('in the second epoch')


def test_after_a_failure_functions_of_cells_are_the_notebooks_own(cell):
    "Not copies, which would write into variables of their own"
    holds = HoldsFunctions(cell['rate'])
    learn, g = learner(metrics=cell['rate'], cbs=holds), holds.g
    with pytest.raises(RankRaised): learn.distrib_fit(2, nprocs=2)
    assert learn.metrics[0].func is cell['rate'] is holds.f and holds.g is g and len(learn.recorder.values) == 1
