"""The way that a step takes on a GPU, held to one process on the CPU: `FASTDDP_STEP=device` chooses it.

The whole parity suite may run so: `make test-device`. That no value is read before a step: nbs/fastai2, device_step.
"""
import collections, functools, sys
from pathlib import Path
import pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.training import GradientClip
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from torch import nn
from torch.overrides import TorchFunctionMode
from fastddp.base import group
from fastddp.fastai2.device_step import DeviceStepSync
from parity import assert_same, fit_both, learner, mlp, warm

READS = 'item', 'tolist', 'numpy', '__bool__', '__float__', '__int__', 'cpu'


@pytest.fixture(autouse=True)
def on_device(monkeypatch): monkeypatch.setenv('FASTDDP_STEP', 'device')


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class TookThatWay(Callback):
    "Did every batch's numbers wait until its step was over? Also notes the kind of the loss at the end of each"
    run_valid = False
    def before_fit(self): self.waited = []
    def after_batch(self):
        self.waited += [o.waits() for o in self.learn.cbs if isinstance(o, DeviceStepSync)]


def unused():
    "A layer that nothing uses"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.idle = mlp(), nn.Linear(2, 2)
        def forward(self, x): return self.net(x)
    return Net()


weighted = CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5]))
KINDS = {
    'plain': {}, 'adam': dict(opt_func=Adam), 'class weights': dict(loss_func=weighted),
    'ignored class': dict(loss_func=nn.CrossEntropyLoss(ignore_index=1)),
    'sum': dict(loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.005),
    'unused layer': dict(model=unused), 'clipped': dict(cbs=GradientClip(.1)),
    'adamw': dict(opt_func=functools.partial(OptimWrapper, opt=torch.optim.AdamW)),
}


@pytest.mark.parametrize('kind', KINDS)
def test_a_fit_is_that_of_one_process(two, kind):
    options = dict(KINDS[kind])
    if 'model' in options: options['model'] = options['model']()
    took = TookThatWay()
    assert_same(*fit_both(learner(**options), 2, two, 2, cbs=[took]))
    assert took.waited == [True]*10     # 37 items, 8 to a step, in two epochs


class Within(Callback):
    "Acts within a batch"
    def after_loss(self): pass


def test_a_callback_that_acts_within_a_batch_takes_the_other_way(two):
    took = TookThatWay()
    assert_same(*fit_both(learner(cbs=Within()), 2, two, 1, cbs=[took]))
    assert took.waited == [False]*5


class LeavesLast(Callback):
    "The last rank, or the only process, ends the fit after its third batch"
    order, run_valid = 70, False    # after the Recorder
    def after_batch(self):
        if self.iter == 2: self.leave()
    def leave(self):
        if group.rank() == group.world_size()-1: raise CancelFitException()


class HearsAll(LeavesLast):
    after_batch = None
    def __call__(self, event_name):
        if event_name == 'after_batch' and self.training and self.iter == 2: self.leave()


@pytest.mark.parametrize('cb', [LeavesLast, HearsAll])
def test_one_rank_leaves_and_all_do(two, cb):
    "At the end of a batch, before the others make another step"
    learn, one = fit_both(learner(cbs=cb()), 2, two, 3)
    assert_same(learn, one)
    assert len(learn.recorder.losses) == len(one.recorder.losses) == 3


def test_a_nan_ends_the_fit_on_all_ranks(two):
    from fastai.callback.tracker import TerminateOnNaNCallback
    learn = learner(cbs=TerminateOnNaNCallback(), lr=float('inf'))
    learn.distrib_fit(3, nprocs=2, launcher=two)
    assert 1 <= len(learn.recorder.losses) < 15         # the Recorder comes after the callback that ends the fit


class Reads(TorchFunctionMode):
    "Who reads tensors' values, by the file and the name of the function"
    def __init__(self):
        super().__init__()
        self.found = collections.Counter()
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, '__name__', '')
        if name in READS: self.found[Path(sys._getframe(1).f_code.co_filename).name, name] += 1
        return func(*args, **(kwargs or {}))


class CountReads(Callback):
    "The reads of each training phase"
    def before_train(self):
        self.mode = Reads()
        self.mode.__enter__()
    def after_train(self):
        self.mode.__exit__(None, None, None)
        self.found, self.mode = self.mode.found, None


def reads_of(two, steps):
    learn = learner(train=8*steps, cbs=CountReads())
    learn.distrib_fit(1, nprocs=2, launcher=two)
    return learn.count_reads.found


def test_one_read_of_ours_in_a_step(two):
    of_five = reads_of(two, 10)-reads_of(two, 5)        # what belongs to an epoch falls out
    ours = {k: n for k, n in of_five.items() if k[0] not in ('torch_core.py', 'learner.py')}
    # on the CPU, loss and sum of weights are numbers at once, which nobody waits for
    assert ours == {('device_step.py', 'tolist'): 5, ('loss_part.py', 'item'): 10}
