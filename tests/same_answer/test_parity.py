"""N workers are one process with N times the batch: batches, weights, optimizer state, losses (CPU, gloo, real
processes)."""
import copy, functools
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn
from fastddp.base.errors import CantDistribute
from fastddp.launch.engine import InProcess
from fastddp.output import replay
from parity import (Collect, Steps, assert_ranks_alike, assert_same, fit_both, items, largest, learner, mlp, seed,
                    alone_like, values, warm)
from spread import long_but


@pytest.fixture(scope='module', params=long_but([2, 3, 4], 2, 3))
def ranks(request):
    "`(number of ranks, launcher with these workers, which stay from fit to fit)`"
    with warm(request.param) as launcher: yield request.param, launcher


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Seen(Collect):
    "The items that count of each training batch, as the sums that name them"
    def before_fit(self): self.rows = []
    def before_batch(self):
        if not self.training: return
        shard = getattr(self.learn.dl, '_shard', None)
        n = shard.epoch.steps[self.iter].counts[0] if shard else len(self.xb[0])
        for x in self.xb[0][:n]: self.note(self.epoch, self.iter, x[0])


def batches(rows):
    "`{(epoch, step): sorted items}`"
    res = {}
    for e, i, x in rows: res.setdefault((e, i), []).append(x)
    return {k: sorted(v) for k, v in res.items()}


@pytest.mark.holds('Batches', "The global batches are those of one process, in order; an epoch holds each item once; "
                   "`drop_last` as you set it; each epoch has its own order")
@pytest.mark.spread
@pytest.mark.parametrize('batch', ['per_worker', 'global'])
@pytest.mark.parametrize('drop_last', [False, True])
def test_global_batches_are_those_of_one_process(ranks, batch, drop_last):
    n, launcher = ranks
    seen = Seen()
    learn, one = fit_both(learner(train=53, drop_last=drop_last, bs=4 if batch == 'per_worker' else 8), n, launcher, 3,
                          batch=batch, cbs=[seen])
    own = batches([row for rank in seen.ranks for row in rank if row])
    single = Seen()
    seed(1)
    again = alone_like(learner(train=53, drop_last=drop_last, bs=4 if batch == 'per_worker' else 8), n, batch)
    again.fit(3, cbs=single)
    want = batches(single.rows)
    assert own == want
    per_epoch = {e: sorted(x for (ep, _), xs in own.items() if ep == e for x in xs) for e in range(3)}
    whole = sorted(float(x[0]) for x, _ in items(53))
    size = 8 if batch == 'global' else 4*n
    kept = 53 - 53 % size if drop_last else 53
    assert all(len(v) == kept and len(set(v)) == kept and set(v) <= set(whole) for v in per_epoch.values())
    assert len({tuple(own[e, 0]) for e in range(3)}) == 3      # each epoch its own order


@pytest.mark.holds('Batches', "`set_seed` reproduces a run, and two fits in a row differ")
def test_a_seed_reproduces_and_fits_differ(two):
    first, second, third = Seen(), Seen(), Seen()
    learn = learner(train=20)
    seed(5)
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=first)
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=second)
    again = learner(train=20)
    seed(5)
    again.distrib_fit(1, nprocs=2, launcher=two, cbs=third)
    assert first.ranks == third.ranks != second.ranks


def weighted(): return CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5]))


def _alone(ctx, obj):
    "A rank's own plain steps on its share, without any reduction; the sums of its weights"
    learn, batches = obj
    for x, y in batches[ctx.rank]:
        learn.loss_func(learn.model(x), y).backward()
        learn.opt.step()
        learn.opt.zero_grad()
    return [float(p.detach().double().sum()) for p in learn.model.parameters()]


@pytest.mark.holds('Weights', "Without the averaging of gradients the ranks would go apart, so these tests can fail")
def test_control_without_reduction_ranks_differ(two):
    "The comparison above would notice: on their shares alone the ranks go apart"
    from fastddp.fastai2.loaders import shard_dl
    from fastddp.launch.engine import Job
    from fastddp.base.rng import CommonRNG
    learn = learner(train=32)
    learn.create_opt()
    common = CommonRNG.capture().state()
    own = [list(shard_dl(copy.deepcopy(learn.dls.train), r, 2, common=CommonRNG(common))) for r in range(2)]
    learn.dls = None
    res = two.run(Job.of(_alone, (learn, own)), 2).results
    assert largest(*res) > 1e-3


@pytest.mark.holds('Weights', "One rank alone is plain fastai to the bit, dropout included")
@pytest.mark.parametrize('model',
                         [mlp, lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(.5),
                                                     nn.Linear(8, 3))])
@pytest.mark.parametrize('opt_func', [SGD, Adam])
def test_one_rank_is_plain_fastai_to_the_bit(model, opt_func):
    learn, one = fit_both(learner(train=36, model=model(), opt_func=opt_func, wd=.1, metrics=accuracy), 1, InProcess(),
                          2)
    for a, b in zip(learn.model.state_dict().values(), one.model.state_dict().values()): assert torch.equal(a, b)
    assert [float(o) for o in learn.recorder.losses] == [float(o) for o in one.recorder.losses]
    assert values(learn) == values(one)


class Noise(Collect):
    "What each rank draws"
    def before_fit(self): self.rows = []
    def after_batch(self):
        if self.training: self.note(torch.rand(()), np.random.rand())


@pytest.mark.holds('Limits', "Each worker draws its own random numbers, reproducibly under a seed")
def test_random_streams_differ_between_ranks_and_reproduce(ranks):
    n, launcher = ranks
    first, second = Noise(), Noise()
    for cb in (first, second):
        learn = learner(train=24, model=nn.Sequential(nn.Linear(4, 8), nn.Dropout(.5), nn.Linear(8, 3)))
        seed(3)
        learn.distrib_fit(1, nprocs=n, launcher=launcher, cbs=cb)
    assert first.ranks == second.ranks
    assert len({tuple(r[0]) for r in first.ranks}) == n


class Smallest(Collect):
    def before_fit(self): self.rows = []
    def before_batch(self):
        if self.training: self.note(len(self.xb[0]))


def bn_net(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Stats(Collect):
    "Running statistics right after training, and as they are validated with"
    def before_fit(self): self.rows = []
    def before_validate(self): self.note(*self.learn.model[1].running_mean, *self.learn.model[1].running_var)


@pytest.mark.holds('Limits', "Batch norm on the CPU: each worker normalizes its own shard, running statistics are "
                   "averaged at the end of each epoch, and one line says so. No worker sees a batch of one item")
@pytest.mark.spread
@pytest.mark.parametrize('train', [21, 25, 37])
def test_batch_norm_is_averaged_and_never_sees_one_item(ranks, train, capfd, monkeypatch):
    n, launcher = ranks
    monkeypatch.setattr(replay, '_printed', set())     # a note comes once in a process
    small, stats = Smallest(), Stats()
    learn = learner(train=train, model=bn_net())
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[small, stats])
    assert min(o[0] for r in small.ranks for o in r) >= 2
    assert_ranks_alike(stats.ranks)
    assert type(learn.model[1]) is nn.BatchNorm1d
    assert capfd.readouterr().out.count('Batch norm') == 1


class Reductions(Callback):
    "Counts how often gradients are averaged"
    def before_fit(self):
        from fastddp.shard import gradients as passes
        self.n, self.real, passes.average_grads = 0, passes.average_grads, self.count
    def count(self, *args, **kwargs):
        self.n += 1
        return self.real(*args, **kwargs)
    def after_fit(self):
        from fastddp.shard import gradients as passes
        passes.average_grads, self.real = self.real, None


@pytest.mark.holds('Weights', "`GradientAccumulation` counts the items of all ranks, and gradients are reduced once "
                   "per optimizer step; in each batch if code of yours runs in it, which may use them")
@pytest.mark.parametrize('watches', [False, True])
def test_accumulation_counts_all_items_and_reduces_once_per_step(two, watches):
    reductions, single = Reductions(), Steps()
    learn = learner(train=53, bs=2, cbs=GradientAccumulation(24))
    one = alone_like(learn, 2)
    learn.distrib_fit(3, nprocs=2, launcher=two, cbs=[reductions, *([Steps()] if watches else [])])
    one.fit(3, cbs=single)
    assert reductions.n == (len(one.recorder.losses) if watches else single.rows[0][0])


@pytest.mark.holds('Weights', "`gradient_as_bucket_view` neither, with torch's optimizers; with fastai's own it is "
                   "refused")
def test_gradients_as_views_of_buckets(two):
    torch_sgd = functools.partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9)
    assert_same(*fit_both(learner(train=53, opt_func=torch_sgd), 2, two, 2, ddp=dict(gradient_as_bucket_view=True)))
    own = learner(train=53)
    with pytest.raises(CantDistribute, match='opt_func=partial'):
        own.distrib_fit(1, nprocs=2, launcher=two, gradient_as_bucket_view=True)
    assert own.opt is None
