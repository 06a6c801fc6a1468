"""What a step does with numbers that only a GPU knows, held to one process on the CPU:
`GlobalLoss.sums_on_device` says that they are there. Nothing of ours reads a value in a step."""
import collections, functools, sys
from pathlib import Path
import pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.tracker import TerminateOnNaNCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from torch import nn
from fastddp.base import group
from losses import RMSE, numbers
from parity import Idle, assert_ranks_alike, assert_same, fit_both, learner, mlp, warm
from test_step import LeavesOutAPass, LossOfBatch

READS = 'item', 'tolist', 'numpy', '__bool__', '__float__', '__int__', 'cpu'


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def yes(device): return True


class OnDevice(Callback):
    "The numbers of this fit's steps stay where they are; notes how often they were summed there"
    def before_fit(self):
        from fastddp.fastai2 import global_loss as there
        self.n_sums = 0
        sum_there = there.GlobalLoss._sum_on_device
        def counted(*args):
            self.n_sums += 1
            return sum_there(*args)
        self.real = there, there.is_accelerator, sum_there
        there.is_accelerator, there.GlobalLoss._sum_on_device = yes, counted
    def after_fit(self):
        there, there.is_accelerator, there.GlobalLoss._sum_on_device = self.real
        self.real = None


def some_ignored(n, s=0):
    from parity import items
    return [(x, torch.tensor(1) if i % 2 else y) for i, (x, y) in enumerate(items(n, s=s))]


KINDS = {
    'plain': {}, 'adam': dict(opt_func=Adam),
    'class weights': dict(loss_func=CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5]))),
    'ignored class': dict(loss_func=nn.CrossEntropyLoss(ignore_index=1), data=some_ignored),
    'weight zero': dict(loss_func=nn.CrossEntropyLoss(weight=torch.tensor([0., 1., 1.]))),
    'sum': dict(loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.005),
    'gathered': dict(loss_func=RMSE(), data=numbers, model=functools.partial(mlp, n_out=1)),
    'accumulating': dict(cbs=GradientAccumulation(16)),
    'unused layer': dict(model=Idle), 'clipped': dict(cbs=GradientClip(.1)),
    'adamw': dict(opt_func=functools.partial(OptimWrapper, opt=torch.optim.AdamW)),
}


@pytest.mark.few(5)
@pytest.mark.parametrize('kind', KINDS)
def test_a_fit_is_that_of_one_process(two, kind):
    options = dict(KINDS[kind])
    if 'model' in options: options['model'] = options['model']()
    there = OnDevice()
    assert_same(*fit_both(learner(**options), 2, two, 2, cbs=[there]))
    assert there.n_sums == 10       # 37 items, 8 to a step, in two epochs


class LeavesLast(Callback):
    "The last rank, or the only process, ends the fit after its third batch"
    order, run_valid = 70, False    # after the Recorder
    def after_batch(self):
        if self.iter == 2 and group.rank() == group.world_size()-1: raise CancelFitException()


def test_one_rank_leaves_and_all_do(two):
    "At the end of a batch, before the others make another step"
    learn, one = fit_both(learner(cbs=LeavesLast()), 2, two, 3, cbs=[OnDevice()])
    assert_same(learn, one)
    assert len(learn.recorder.losses) == len(one.recorder.losses) == 3


@pytest.mark.filterwarnings('default:fastddp')
def test_one_rank_makes_no_backward_pass(two):
    "It takes part in the sums of the others, and has their loss"
    learn, there, loss = learner(train=16, kind=LeavesOutAPass), OnDevice(), LossOfBatch()
    learn.n = 2
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=[there, loss], timeout=60)
    assert there.n_sums == 2
    assert_ranks_alike(loss.ranks)


def test_a_nan_ends_the_fit_on_all_ranks(two):
    learn = learner(cbs=[TerminateOnNaNCallback(), OnDevice()], lr=float('inf'))
    learn.distrib_fit(3, nprocs=2, launcher=two)
    assert 1 <= len(learn.recorder.losses) < 15         # the Recorder comes after the callback that ends the fit


class Reads:
    "Who reads tensors' values, by the file and the name of the function"
    def __enter__(self):
        self.found, self.own = collections.Counter(), {k: vars(torch.Tensor).get(k) for k in READS}
        for k in READS: setattr(torch.Tensor, k, self.counted(k, getattr(torch.Tensor, k)))
        return self
    def counted(self, name, real):
        def read(*args, **kwargs):
            self.found[Path(sys._getframe(1).f_code.co_filename).name, name] += 1
            return real(*args, **kwargs)
        return read
    def __exit__(self, *_):
        for k, own in self.own.items(): setattr(torch.Tensor, k, own) if own else delattr(torch.Tensor, k)


class CountReads(Callback):
    "The reads of each training phase"
    def before_train(self):
        self.mode = Reads().__enter__()
    def after_train(self):
        self.mode.__exit__(None, None, None)
        self.found, self.mode = self.mode.found, None


def reads_of(two, steps, cbs):
    learn = learner(train=8*steps, cbs=[CountReads(), *cbs])
    learn.distrib_fit(1, nprocs=2, launcher=two)
    return learn.count_reads.found


def ours(two, *cbs):
    "Reads of ours in five steps; what belongs to an epoch falls out"
    of_five = reads_of(two, 10, cbs)-reads_of(two, 5, cbs)
    return {k: n for k, n in of_five.items() if k[0] not in ('torch_core.py', 'learner.py')}


def test_nothing_of_ours_is_read_in_a_step(two):
    assert ours(two, OnDevice()) == {}
    # on the CPU, loss and sum of weights are numbers at once, which nobody waits for
    assert set(ours(two)) == {('global_loss.py', 'item'), ('loss.py', 'item')}
