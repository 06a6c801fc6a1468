"""What cells write into their own variables in a fit is in the notebook afterwards: globals, closures, attributes."""
import sys
from functools import partial
import numpy as np, pandas as pd, pytest
from fastai.callback.core import Callback
from fastai.metrics import AvgMetric, Metric
from fastddp.all import *
from fastddp.fastai2 import resume
from parity import alone_like, learner, seed, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


CELL = '''
import torch
from collections import Counter
from fastai.callback.core import Callback
import torch.nn.functional as F
import numpy as np, pandas as pd

losses, seen, by_epoch, epochs, weights = [], set(), {}, Counter(), np.zeros(3)
n, best, average, frame = 0, None, torch.zeros(2), pd.DataFrame(dict(loss=[]))

class Meter:
    def __init__(self): self.values = []
    def add(self, v): self.values.append(v)
meter = Meter()

def note(cb):
    global n, best
    n += 1
    best = min(best or 9., float(cb.loss))
    losses.append(float(cb.loss))
    meter.add(n)

class Notes(Callback):
    history, steps = [], 0
    def after_batch(self):
        if not self.training: return
        note(self)
        seen.add(self.epoch)
        epochs.update([self.epoch])
        by_epoch.setdefault(self.epoch, []).append(self.iter)
        weights[1] += 1
        average[0] += 1
        frame.loc[len(frame)] = float(self.loss)
        Notes.history.append(self.iter)
        Notes.steps += 1

def make_loss():
    calls = []
    def loss(out, y):
        if torch.is_grad_enabled(): calls.append(len(calls))
        loss.count = len(calls)
        return F.cross_entropy(out, y)
    return loss, calls
loss, calls = make_loss()

outputs = []
def hook(module, args, out): outputs.append(len(out))
rated = []
def rate(out, y, calls=[], *, kinds={}):
    rated.append(len(rated))
    calls.append(len(calls))
    kinds[len(kinds)] = type(out).__name__
    return (out.argmax(-1) == y).float().mean()
'''
NAMES = ('losses seen by_epoch epochs weights n best average frame meter Notes calls loss outputs rated hook rate '
         'Meter note make_loss').split()


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


@pytest.mark.holds('Decisions', "What code of cells writes into its variables: globals, variables of enclosing "
                   "functions, default arguments, attributes of classes and functions, into the same objects; what "
                   "can't come back is named. After `distrib_resume('distrib')` in a new kernel, too, but for "
                   "variables of functions that another function made")
def test_variables_of_cells_are_those_of_one_process(cell, two):
    learn = learner(loss_func=cell['loss'], metrics=cell['rate'], cbs=cell['Notes']())
    learn.model[0].register_forward_hook(cell['hook'])
    one = alone_like(learn, 2)
    held = {k: cell[k] for k in NAMES if k not in ('n', 'best')}
    history, method = cell['Notes'].history, cell['Notes'].after_batch
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(1)
        # the loss changes its state in each call, so every worker validates all 6 batches
        assert cell['n'] == 5 and len(cell['outputs']) == 5+6 and len(cell['rated']) > 0
        learn.fit(1)
    assert all(cell[k] is v for k, v in held.items())
    rate = cell['rate']
    assert len(rate.__defaults__[0]) == len(rate.__kwdefaults__['kinds']) == len(cell['rated']) > 0
    assert cell['Notes'].history is history and cell['Notes'].after_batch is method
    many, losses, best = values(cell), cell['losses'][:], cell['best']
    exec(CELL, cell)
    one.remove_cb(one.notes)
    one.add_cb(cell['Notes']())
    one.loss_func = cell['loss']
    seed(1)
    for _ in range(2): one.fit(1)
    assert many == values(cell)
    assert losses == pytest.approx(cell['losses'], abs=1e-5) and best == pytest.approx(cell['best'], abs=1e-5)


def test_predictions_write_too_and_the_next_call_sees_it(cell, two):
    learn = learner(metrics=cell['rate'])
    learn.model[0].register_forward_hook(cell['hook'])
    outputs = cell['outputs']
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.get_preds()
        n = len(outputs)
        outputs.append('mine')
        learn.validate()
    assert n and outputs[n] == 'mine' and len(outputs) == 2*n+1 and cell['rated']


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


def test_a_large_array_comes_back():
    "All of it is not compared, so that it costs no time where nothing changed"
    preds, kept = np.zeros(17_000_000), np.zeros(17_000_000)
    class Fills(Callback):
        def after_epoch(self): preds[len(kept)//2:] += 1
    learn = learner()
    learn.distrib_fit(2, nprocs=2, cbs=Fills())
    assert preds.sum() == 17_000_000 and not kept.any()


def test_a_large_frame_comes_back(two):
    "Rows of it are compared"
    frame = pd.DataFrame(dict(pred=np.zeros(17_000_000)))
    same = frame
    class Fills(Callback):
        def after_epoch(self): frame.loc[len(frame)//2:, 'pred'] += 1
    learn = learner()
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=Fills())
    assert same.pred.sum() == 17_000_000


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


class Best(Metric):
    "The best of all epochs, which it remembers"
    name = 'best'
    def __init__(self): self.seen, self.last = [], None
    def reset(self): self.right = self.n = 0
    def accumulate(self, learn):
        self.right += (learn.pred.argmax(-1) == learn.y).sum().item()
        self.n += len(learn.y)
    @property
    def value(self):
        self.last = self.right/self.n
        self.seen.append(self.last)
        return max(self.seen)


class Right:
    "A function with a history"
    def __init__(self): self.calls, self.__name__ = [], 'right'
    def __call__(self, out, y):
        self.calls.append(len(y))
        return (out.argmax(-1) == y).float().mean()


def test_what_metrics_remember_is_in_the_same_objects(two):
    learn = learner(metrics=[Best(), AvgMetric(Right())])
    one = alone_like(learn, 2)
    (best, right), seen, func = learn.metrics, learn.metrics[0].seen, learn.metrics[1].func
    seed(1)
    with learn.distrib_ctx(nprocs=2, launcher=two):
        learn.fit(2)
        learn.validate()
    seed(1)
    one.fit(2)
    one.validate()
    assert learn.metrics[0] is best and best.seen is seen and right.func is func
    assert seen == pytest.approx(one.metrics[0].seen) and best.last == one.metrics[0].last and len(seen) == 3
    assert right.value == pytest.approx(one.metrics[1].value) and func.calls


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


class Table(list):
    def add(self, row): self.append(len(row))


@pytest.mark.parametrize('make', [list, Table])
@pytest.mark.parametrize('background', [False, True])
def test_rows_that_a_logger_collects(two, make, background):
    "`learn.logger` stays on rank 0 for the time of a fit, since progress puts its own there; not what it writes to"
    learn, rows = learner(), make()
    learn.logger = rows.add if make is Table else lambda row: rows.append(len(row))
    learn.fit(1)
    was = learn.logger
    if background: learn.distrib_fit(2, nprocs=2, launcher=two, wait=False).result()
    else: learn.distrib_fit(2, nprocs=2, launcher=two)
    assert rows == [len(learn.recorder.metric_names)]*3 and learn.logger is was
