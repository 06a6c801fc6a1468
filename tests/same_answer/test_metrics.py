"""Metrics and losses of N workers are those of one process, for any size of the validation set, alike to the bit on all
ranks."""
import pytest, torch
from fastai.callback.core import Callback
from fastai.learner import AvgLoss, AvgMetric, AvgSmoothLoss, Metric
from fastai.losses import CrossEntropyLossFlat, MSELossFlat
from fastai.metrics import (AccumMetric, CorpusBLEUMetric, Dice, DiceMulti, F1Score, JaccardCoeff, JaccardCoeffMulti,
                            LossMetric, LossMetrics,
                            MatthewsCorrCoef, PearsonCorrCoef, Perplexity, R2Score, RocAuc, accuracy, error_rate, mae,
                            mse, rmse,
                            skm_to_fastai)
from torch import nn
from fastddp.all import CantDistribute, RankRaised
from parity import Collect, assert_ranks_alike, fit_both, items, learner, mlp, seed, alone_like, values, warm
from spread import long_but


@pytest.fixture(scope='module', params=long_but([2, 3, 4], 2, 3))
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


class Values(Collect):
    "What the recorder says at the end of each epoch, on every rank"
    def before_fit(self): self.rows = []
    def after_epoch(self): self.note(*(float('nan') if v is None else v for v in self.recorder.values[-1]))


def close(a, b, tol=1e-6):
    for ra, rb in zip(a, b, strict=True):
        for x, y in zip(ra, rb, strict=True):
            assert x == y or x != x and y != y or abs(x-y) <= tol*max(1, abs(y)), (a, b)


class Spread(Metric):
    "Keeps all predictions in a list of its own"
    def reset(self): self.seen = []
    def accumulate(self, learn): self.seen += learn.pred.flatten().tolist()
    @property
    def value(self): return torch.tensor(self.seen).std(correction=0).item() if self.seen else None


class WorstBatch(Metric):
    "Depends on what a batch is, and on the order of batches"
    def reset(self): self.worst, self.last, self.n = 0., 0., 0
    def accumulate(self, learn):
        self.worst, self.last, self.n = max(self.worst, learn.loss.item()), learn.pred[-1].sum().item(), self.n+1
    @property
    def value(self): return self.worst + 10*self.last + 100*self.n


class Largest(Metric):
    "Says how its state is brought together"
    def reset(self): self.top, self.counts, self.sums = -9., [0, 0], {}
    def accumulate(self, learn):
        self.top = max(self.top, learn.pred.max().item())
        self.counts = [self.counts[0]+len(learn.pred), self.counts[1]+1]
        for x, y in zip(learn.pred, learn.y): self.sums[int(y)] = self.sums.get(int(y), 0.) + x.sum().item()
    def merge(self, states):
        self.top, self.counts = max(s['top'] for s in states), [sum(s['counts'][0] for s in states), 0]
        self.sums = {k: sum(s['sums'].get(k, 0.) for s in states) for k in range(3)}
    @property
    def value(self): return self.top + self.counts[0] + self.sums.get(1, 0.) - self.sums.get(0, 0.)


class Doubled(AvgMetric):
    "A subclass of a known class with state of its own"
    def reset(self): super().reset(); self.more = 0
    def accumulate(self, learn): super().accumulate(learn); self.more += len(learn.pred)
    @property
    def value(self): return super().value + self.more if self.count else None


class WithParts(nn.Module):
    "A loss that leaves a part of itself behind"
    def forward(self, pred, y):
        self.size, self.ce = pred.detach().abs().mean(), nn.functional.cross_entropy(pred, y)
        return self.ce + .1*pred.abs().mean()


def first_item(preds, targs): return (preds[0]+preds[-1]*2).sum().item() + targs[:3].sum().item()


def images(n, s=0):
    g = torch.Generator().manual_seed(s)
    return [(torch.randn(1, 3, 3, generator=g), torch.randint(2, (3, 3), generator=g)) for _ in range(n)]


def texts(n, s=0):
    g = torch.Generator().manual_seed(s)
    return [(torch.randn(6, 4, generator=g), torch.randint(3, (6,), generator=g)) for _ in range(n)]


def numbers(n, s=0): return [(x, x[:1]*2+y) for x, y in items(n, s=s)]


class PerToken(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x)


def weights(): return CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5]))


KINDS = dict(
    classes=lambda v: dict(metrics=[accuracy, error_rate, F1Score(average='macro'), MatthewsCorrCoef(), Perplexity(),
                                    LossMetric('size'), Largest(),
                                    *LossMetrics('size,ce'), AccumMetric(first_item, flatten=False), Spread(),
                                    WorstBatch(), Doubled(accuracy)]
                                   + [RocAuc()]*(v >= 21), loss_func=WithParts()),
    weighted=lambda v: dict(metrics=[accuracy, Perplexity()], loss_func=weights()),
    summed=lambda v: dict(metrics=accuracy, loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.001),
    numbers=lambda v: dict(metrics=[mse, mae, rmse, skm_to_fastai(_mae, is_class=False)] + [R2Score(),
                                                                                            PearsonCorrCoef()]*(v > 1),
                           data=numbers,
                           loss_func=MSELossFlat(), model=mlp(n_out=1)),
    segments=lambda v: dict(metrics=[Dice(), JaccardCoeff(), DiceMulti(), JaccardCoeffMulti()], data=images,
                            model=nn.Conv2d(1, 2, 3, padding=1)),
    tokens=lambda v: dict(metrics=[CorpusBLEUMetric(vocab_sz=3), accuracy, Perplexity()], data=texts, model=PerToken(),
                          loss_func=CrossEntropyLossFlat()))


def _mae(a, b): return float(abs(a-b).mean())


@pytest.mark.holds('Losses', "A fit validates as `learn.validate()` does: each worker takes whole batches of your own "
                   "loader, in turn. So a row of the table is what `learn.validate()` gives for the same weights, for "
                   "any metric (averages, accumulated predictions, `Dice`, `JaccardCoeff`, `Perplexity`, BLEU, "
                   "scikit-learn's, your own `Metric`) and any loss, for any size of the validation set, and the same "
                   "to the bit on all ranks")
@pytest.mark.few(2)
@pytest.mark.spread
@pytest.mark.parametrize('bs', [4, 64])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.filterwarnings('ignore')
def test_any_size_of_the_validation_set(ranks, kind, bs):
    n, launcher = ranks
    for v in (1, 7, 21, 100):
        seen = Values()
        learn, one = fit_both(learner(train=16, valid=v, bs=bs, **KINDS[kind](v)), n, launcher, 1, cbs=[seen],
                              batch='per_worker')
        close(values(learn), values(one))
        assert_ranks_alike(seen.ranks)
        if kind in ('classes', 'summed'): continue      # state that depends on what a batch is
        one.remove_cb(Values)
        if kind == 'weighted': continue
        for dl in one.dls.loaders: dl.bs = bs
        close([one.validate()], [values(learn)[-1][1:]])


@pytest.mark.holds('Losses', "`train_metrics=True` counts each item once")
@pytest.mark.spread
@pytest.mark.parametrize('train', [25, 26, 37])
def test_metrics_of_training(ranks, train):
    "Items that a rank doubled or borrowed for batch norm don't count"
    n, launcher = ranks
    learn = learner(train=train, bs=2, metrics=[accuracy, F1Score(average='macro'), Perplexity(), Largest()])
    learn.recorder.train_metrics = True
    seen = Values()
    learn, one = fit_both(learn, n, launcher, 2, cbs=[seen])
    close(values(learn), values(one), 1e-5)     # the second epoch starts from weights that agree to 1e-5
    assert_ranks_alike(seen.ranks)


class TwoViews(Callback):
    "Makes two views of each item"
    order = -5
    def before_batch(self):
        self.learn.xb = tuple(torch.cat([x, x+.1]) for x in self.xb)
        self.learn.yb = tuple(torch.cat([y, y]) for y in self.yb)


@pytest.mark.holds('Losses', "Where a callback makes several views of each item, all of them")
@pytest.mark.parametrize('metric', [lambda: accuracy, Largest])
def test_metrics_of_training_count_all_views(ranks, metric):
    n, launcher = ranks
    learn, seen = learner(train=8*n+1, bs=4, metrics=metric(), cbs=TwoViews()), Values()
    learn.recorder.train_metrics = True
    learn, one = fit_both(learn, n, launcher, 1, cbs=[seen])
    close(values(learn), values(one), 1e-5)


class Smooth(AvgSmoothLoss): name = 'of_its_own'


@pytest.mark.holds('Losses', "A metric derived from `AvgSmoothLoss`, of training, also where a worker has no items in "
                   "a batch")
def test_a_smooth_loss_of_ones_own_where_a_rank_has_no_items(ranks):
    n, launcher = ranks
    learn, seen = learner(train=2*n+1, bs=2, metrics=Smooth(beta=.5)), Values()
    learn.recorder.train_metrics, learn.recorder.valid_metrics = True, False
    learn, one = fit_both(learn, n, launcher, 2, cbs=[seen])
    close(values(learn), values(one), 1e-5)
    assert_ranks_alike(seen.ranks)


class Other(Collect):
    "Validates on another loader after each epoch"
    order = 70
    def __init__(self, dl, how): super().__init__(); self.dl, self.how = dl, how
    def before_fit(self): self.__dict__.setdefault('busy', False)
    def after_fit(self):
        if not self.busy: super().after_fit()
    def after_epoch(self):
        if self.busy: return
        self.busy = True
        if self.how == 'validate': res = self.learn.validate(dl=self.dl)
        else:
            self.learn._do_epoch_validate(dl=self.dl)
            res = [self.recorder.loss.value, *(m.value for m in self.learn.metrics)]
        self.note(*res)
        self.busy = False


@pytest.mark.holds('Losses', "Another loader, validated in a callback")
@pytest.mark.spread
@pytest.mark.parametrize('how', ['validate', '_do_epoch_validate'])
def test_another_loader_within_a_callback(ranks, how):
    n, launcher = ranks
    learn = learner(metrics=[accuracy, Perplexity(), Spread()])
    learn, one = fit_both(learn, n, launcher, 1,
                          cbs=[other := Other(learn.dls.train.new(dataset=items(9, s=4), shuffle=False, bs=3), how)])
    plain = alone_like(learner(metrics=[accuracy, Perplexity(), Spread()]), n)
    plain.model.load_state_dict(one.model.state_dict())
    res = plain.validate(dl=plain.dls.train.new(dataset=items(9, s=4), shuffle=False, bs=3))
    close([other.ranks[0][0][-3:]], [list(res)[-3:]], 1e-5)
    assert_ranks_alike(other.ranks)


class Exchange(Callback):
    "Puts a plain list of batches in the place of the loader of a phase"
    def __init__(self, train, valid): self.train, self.valid = train, valid
    def before_train(self): self.learn.dl = self.train
    def before_validate(self): self.learn.dl = self.valid


@pytest.mark.holds('Losses', "A callback puts a list of batches in the place of the loader: each rank goes over all "
                   "of it")
@pytest.mark.parametrize('loss_func', [None, WithParts()])
def test_a_list_of_batches_in_the_place_of_the_loader(ranks, loss_func):
    "Each rank goes over all of it, so each has the metrics of one process"
    n, launcher = ranks
    pairs = items(20, s=3)
    batches = [tuple(map(torch.stack, zip(*pairs[i:i+5]))) for i in range(0, 20, 5)]
    learn = learner(metrics=[accuracy, Perplexity(), Largest()], loss_func=loss_func)
    learn.recorder.train_metrics = True
    cbs = [seen := Values(), Exchange(batches[:3], batches[2:])]
    learn, one = fit_both(learn, n, launcher, 2, cbs=cbs)
    close(values(learn), values(one), 1e-5)
    assert_ranks_alike(seen.ranks)


class Twice(Callback):
    "Runs each batch of a validation twice"
    order = 49      # before the Recorder
    is_second = False
    def after_batch(self):
        if self.training or self.is_second: return
        self.is_second = True
        self.learn.one_batch(self.iter, (*self.xb, *self.yb))
        self.is_second = False


@pytest.mark.holds('Losses', "A batch of a validation that a callback runs again")
def test_a_batch_of_a_validation_that_runs_again(ranks):
    "It counts twice, though the loader yielded it once"
    n, launcher = ranks
    learn = learner(valid=21, metrics=[accuracy, Perplexity(), Spread(), ReadsInput()])
    learn, one = fit_both(learn, n, launcher, 1, cbs=[Twice()])
    close(values(learn), values(one), 1e-5)


@pytest.mark.holds('Losses', "A loss with `reduction='sum'`, also as a metric (`AvgLoss()`)")
def test_the_loss_of_a_sum_is_that_of_one_process_also_as_a_metric(ranks):
    n, launcher = ranks
    learn = learner(metrics=[AvgLoss()], loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.001)
    learn, one = fit_both(learn, n, launcher, 1)
    close(values(learn), values(one), 1e-5)


def first_ignored(n, s=0):
    "In the validation set, which has another seed, no target of the first 16 items counts"
    return [(x, torch.tensor(-100) if s and i < 16 else y) for i, (x, y) in enumerate(items(n, s=s))]


@pytest.mark.holds('Losses', "A batch in which no target counts (`ignore_index`): `valid_loss` is NaN")
def test_a_batch_without_any_target_makes_the_loss_of_a_validation_nan(ranks):
    n, launcher = ranks
    learn, one = fit_both(learner(data=first_ignored), n, launcher, 1)
    assert values(one)[0][1] != values(one)[0][1]
    close(values(learn), values(one), 1e-5)


class ReadsInput(Metric):
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += len(learn.xb[0])
    @property
    def value(self): return self.n


class SumOfInputs(ReadsInput):
    def accumulate(self, learn): self.n += float(learn.x[:, 0].sum())


class ReadsTheModel(Metric):
    "Reads an attribute that the model sets in each forward pass"
    def reset(self): self.sum = 0.
    def accumulate(self, learn): self.sum += float(learn.model.kl)
    @property
    def value(self): return self.sum


class Sets(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x):
        out = self.net(x)
        self.kl = (out.detach()**2).sum()
        return out


@pytest.mark.holds('Losses', "With a metric class of your own every worker validates all batches: it may read what it "
                   "likes")
@pytest.mark.few(4)
@pytest.mark.parametrize('metric', [ReadsInput, SumOfInputs, ReadsTheModel])
def test_a_metric_may_read_what_it_likes(ranks, metric, capfd):
    n, launcher = ranks
    learn = learner(train=20, valid=21, model=Sets(), metrics=metric())
    close(*map(values, fit_both(learn, n, launcher, 2)), 1e-5)
    assert f"Each worker validates all batches, since {metric.__name__} has a state" in capfd.readouterr().out


@pytest.mark.holds('Losses', "A metric of training whose states can't be added up is refused")
def test_a_metric_of_training_whose_state_does_not_add_up_is_refused():
    learn = learner(metrics=Spread())
    learn.recorder.train_metrics = True
    with pytest.raises(CantDistribute, match=REFUSED): learn.distrib_fit(1, nprocs=2)


REFUSED = r"Spread in training.*merge\(states\)"


def accumulate_in_training(learn):
    if learn.training: learn.metrics[0].accumulate(learn)


def test_one_that_a_callback_accumulates_is_refused_in_the_first_batch():
    learn = learner(metrics=Spread(), cbs=Callback(after_loss=accumulate_in_training))
    with pytest.raises(RankRaised, match=REFUSED): learn.distrib_fit(1, nprocs=2)


@pytest.mark.holds('Losses', "Losses during training are those of the global batches")
def test_losses_are_those_of_the_global_batches(ranks):
    n, launcher = ranks
    class Losses(Collect):
        order = 60
        def before_fit(self): self.rows = []
        def after_batch(self):
            if self.training: self.note(self.learn.loss, self.learn.smooth_loss)
    noted = Losses()
    learn, one = fit_both(learner(train=25, bs=2), n, launcher, 2, cbs=[noted])
    assert_ranks_alike(noted.ranks)
    class Plain(Callback):
        order = 60
        def before_fit(self): self.rows = []
        def after_batch(self):
            if self.training: self.rows.append([float(self.learn.loss), float(self.learn.smooth_loss)])
    single, p = alone_like(learner(train=25, bs=2), n), Plain()
    seed(1)
    single.fit(2, cbs=p)
    close(noted.ranks[0], p.rows)
