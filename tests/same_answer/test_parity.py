"""N workers are one process with N times the batch: batches, weights, optimizer state, losses (CPU, gloo, real
processes)."""
import copy, functools
import numpy as np, pytest, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat, MSELossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, Lamb, OptimWrapper, RMSProp, ranger
from torch import nn
import torch.nn.functional as F
from fastddp.base import group
from fastddp.base.errors import CantDistribute
from fastddp.launch.engine import InProcess
from fastddp.output import replay
from parity import (Collect, Steps, assert_ranks_alike, assert_same, fit_both, items, largest, learner, mlp, seed,
                    alone_like,
                    values, warm)


@pytest.fixture(scope='module', params=[2, 3, 4])
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


def layers(m): return [list(m[0].parameters()), list(m[2].parameters())]


def weighted(): return CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5]))


def some_ignored(n, n_in=4, n_out=3, s=0):
    "Most items of a class that is ignored, so that many a rank's share is all ignored"
    return [(x, torch.tensor(-100) if i % 3 else y) for i, (x, y) in enumerate(items(n, n_in, n_out, s))]


def tokens(n, s=0):
    "Sequences whose padding is ignored"
    g = torch.Generator().manual_seed(s)
    return [(torch.randn(5, 4, generator=g),
             torch.where(torch.arange(5) < 1+i % 5, torch.randint(3, (5,), generator=g), -100)) for i in range(n)]


def regression(n, s=0): return [(x, x[:1]*2+y) for x, y in items(n, s=s)]


class Transposed(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x).transpose(1, 2)


CASES = dict(
    sgd=dict(opt_func=SGD, wd=.1),
    momentum=dict(opt_func=functools.partial(SGD, mom=.9), wd=.01),
    adam=dict(opt_func=Adam, wd=.1),
    rmsprop=dict(opt_func=RMSProp, lr=.005),
    lamb=dict(opt_func=Lamb),
    ranger=dict(opt_func=ranger, lr=.01),
    adamw=dict(opt_func=functools.partial(OptimWrapper, opt=torch.optim.AdamW)),
    torch_sgd=dict(opt_func=functools.partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, weight_decay=.1)),
    clip=dict(cbs=GradientClip(.1)),
    smoothing=dict(loss_func=LabelSmoothingCrossEntropyFlat()),
    class_weights=dict(loss_func=weighted, train=41),
    class_weight_zero=dict(loss_func=lambda: CrossEntropyLossFlat(weight=torch.tensor([1., 0., 2.])), train=29),
    functional_weights=dict(loss_func=lambda: functools.partial(F.cross_entropy, weight=torch.tensor([1., 3., .5]))),
    ignored=dict(data=some_ignored, train=29),
    ignored_tokens=dict(data=tokens, train=29, model=Transposed),
    summed=dict(loss_func=lambda: nn.CrossEntropyLoss(reduction='sum'), lr=.005),
    mse=dict(data=regression, loss_func=MSELossFlat, model=lambda: mlp(n_out=1)),
    drop_last=dict(drop_last=True, train=50),
    one_over=dict(train=25, bs=2),
)


def make(case):
    kw = {k: v() if k in ('loss_func', 'model') and callable(v) and not isinstance(v, (nn.Module,)) and k != 'x'
          and not hasattr(v, 'func')
          else copy.deepcopy(v) for k, v in CASES[case].items()}
    return learner(**kw)


@pytest.mark.holds('Weights', "Weights and optimizer state are those of one process to 1e-5: fastai's optimizers and "
                   "torch's in `OptimWrapper`, weight decay, gradient clipping, label smoothing, class weights, "
                   "ignored classes, summed losses, sizes that divide by nothing")
@pytest.mark.few(10)
@pytest.mark.spread
@pytest.mark.parametrize('case', CASES)
def test_weights_are_those_of_one_process(ranks, case):
    n, launcher = ranks
    steps = Steps()
    learn, one = fit_both(make(case), n, launcher, 3, cbs=[steps])
    assert_same(learn, one)
    assert_ranks_alike(steps.ranks)
    assert len(learn.recorder.losses) == steps.ranks[0][0][0] > 3


@pytest.mark.holds('Weights', "Frozen groups and discriminative learning rates, before and after `unfreeze`")
@pytest.mark.spread
@pytest.mark.parametrize('opt_func', [SGD, Adam])
def test_groups_frozen_and_with_their_own_rates(ranks, opt_func):
    n, launcher = ranks
    learn = learner(opt_func=opt_func, splitter=layers, wd=.1)
    learn.freeze()
    learn, one = fit_both(learn, n, launcher, 2, slice(.001, .05))
    assert_same(learn, one)
    assert torch.equal(learn.model[0].weight, learner().model[0].weight)     # frozen is frozen
    for o in (learn, one): o.unfreeze()
    seed(2)
    learn.distrib_fit(2, slice(.001, .05), nprocs=n, launcher=launcher)
    seed(2)
    one.fit(2, slice(.001, .05))
    assert_same(learn, one)


@pytest.mark.holds('Weights', "`fit_one_cycle`, `fine_tune`, `fit_flat_cos`, with the same schedule")
@pytest.mark.parametrize('how,args', [('fit_one_cycle', (2, .05)), ('fine_tune', (1, .05)), ('fit_flat_cos', (2, .05))])
def test_schedules(two, how, args):
    learn = learner(opt_func=Adam, splitter=layers)
    one = alone_like(learn, 2)
    seed(1)
    learn.distrib(how, *args, nprocs=2, launcher=two)
    seed(1)
    getattr(one, how)(*args)
    assert_same(learn, one)
    assert learn.recorder.lrs == one.recorder.lrs


@pytest.mark.holds('Batches', "`batch='global'` is plain `learn.fit`")
def test_batch_global_is_plain_fit(ranks):
    n, launcher = ranks
    learn, one = fit_both(learner(bs=8), n, launcher, 3, batch='global')
    assert_same(learn, one)


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


def test_running_means_are_those_of_the_global_batch(two):
    "Each worker sees its part of the batch: without the average they would be rank 0's"
    learn, one = fit_both(learner(train=24, model=nn.Sequential(nn.BatchNorm1d(4), mlp())), 2, two, 1)
    torch.testing.assert_close(learn.model[0].running_mean, one.model[0].running_mean)


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
                   "per optimizer step")
@pytest.mark.spread
@pytest.mark.parametrize('n_acc', [8, 24, 30])
@pytest.mark.parametrize('loss_func', [nn.CrossEntropyLoss, weighted])
def test_accumulation_counts_all_items_and_reduces_once_per_step(ranks, n_acc, loss_func):
    n, launcher = ranks
    steps, reductions = Steps(), Reductions()
    learn = learner(train=53, bs=2, loss_func=loss_func(), cbs=GradientAccumulation(n_acc), opt_func=Adam,
                    metrics=accuracy)
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(3, nprocs=n, launcher=launcher, cbs=[steps, reductions])
    single = Steps()
    seed(1)
    one.fit(3, cbs=single)
    assert_same(learn, one)
    assert_ranks_alike(steps.ranks)
    assert steps.ranks[0][0][0] == single.rows[0][0] == reductions.n


@pytest.mark.holds('Weights', "`to_fp16` and `to_bf16` do no harm on the CPU")
@pytest.mark.parametrize('how', ['to_fp16', 'to_bf16'])
def test_mixed_precision_does_no_harm_on_the_cpu(two, how):
    learn = learner()
    getattr(learn, how)()
    learn, one = fit_both(learn, 2, two, 2)
    assert_same(learn, one)


@pytest.mark.holds('Weights', "Options of DDP (`static_graph`, `bucket_cap_mb`) change no result")
@pytest.mark.parametrize('options', [dict(static_graph=True), dict(bucket_cap_mb=.001)], ids=lambda o: next(iter(o)))
def test_options_of_ddp_change_no_result(two, options):
    assert_same(*fit_both(learner(train=53), 2, two, 2, ddp=options))


@pytest.mark.holds('Weights', "`gradient_as_bucket_view` neither, with torch's optimizers; with fastai's own it is "
                   "refused")
def test_gradients_as_views_of_buckets(two):
    torch_sgd = functools.partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9)
    assert_same(*fit_both(learner(train=53, opt_func=torch_sgd), 2, two, 2, ddp=dict(gradient_as_bucket_view=True)))
    own = learner(train=53)
    with pytest.raises(CantDistribute, match='opt_func=partial'):
        own.distrib_fit(1, nprocs=2, launcher=two, gradient_as_bucket_view=True)
    assert own.opt is None
