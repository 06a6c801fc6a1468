"""Any loss of predictions and targets is that of one process: weights, losses, validation, on 2 to 4 workers."""
from functools import partial
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.metrics import Perplexity
from fastai.optimizer import Adam
from fastddp.base import group
from fastddp.base.device import OutOfMemory
from fastddp.base.errors import RankRaised
from fastddp.shard import whole
from torch import nn
import torch.nn.functional as F
from as_written import made
from losses import EXACT, numbers, pearson
from parity import (Collect, Steps, assert_ranks_alike, assert_same, fit_both, items, largest, learner, mlp, seed,
                    alone_like)
from parity import warm
from test_decisions import EVENTS, AtEnd, Leave

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module', params=[2, 3, 4])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def make(name, **kwargs):
    loss, kw, _ = EXACT[name]
    kw = dict(kw, **kwargs)
    model = kw.pop('model', mlp)()
    return learner(loss_func=loss(), model=model, **kw)


@pytest.mark.holds('Losses', "Any loss of predictions and targets: means, sums, class weights and ignored targets "
                   "inside a function, masked means, missing labels, roots, correlations, Dice over a batch, "
                   "contrastive losses, any nesting of them; in training and in validation. Losses that are not "
                   "torch's or fastai's own are computed over the predictions and targets of all workers; one line "
                   "says so")
@pytest.mark.few(9)
@pytest.mark.spread
@pytest.mark.parametrize('name', EXACT)
def test_any_loss_is_that_of_one_process(ranks, name, capfd):
    n, launcher = ranks
    steps = Steps()
    learn, one = fit_both(make(name, train=29, bs=12, valid=17), n, launcher, 2, batch='global', cbs=[steps])
    assert_same(learn, one)
    assert_ranks_alike(steps.ranks)
    said = capfd.readouterr().out.count('predictions of all workers')
    assert said == (EXACT[name][2] == 'gather')


@pytest.mark.holds('Losses', "The same where workers have unequal parts or none, and while gradients accumulate")
@pytest.mark.spread
@pytest.mark.parametrize('name', ['weighted', 'pearson', 'squares', 'supcon'])
def test_unequal_parts_and_ranks_without_items(ranks, name):
    n, launcher = ranks
    learn, one = fit_both(make(name, train=2*4*n+1, bs=4, valid=5), n, launcher, 2)
    assert_same(learn, one)


@pytest.mark.spread
@pytest.mark.parametrize('n_acc', [8, 30])
@pytest.mark.parametrize('name', ['variance', 'squares'])     # fastai divides in place: no root
def test_gradients_that_accumulate(ranks, name, n_acc):
    n, launcher = ranks
    assert_same(*fit_both(make(name, train=53, bs=2, cbs=GradientAccumulation(n_acc), opt_func=Adam), n, launcher, 2))


LEAVES = [o for o in EVENTS if not o[4] and o[0] in ('before_batch', 'after_pred', 'after_loss', 'after_batch')]


@pytest.mark.holds('Losses', "A rank that leaves a batch before its loss blocks no other rank")
@pytest.mark.few(4)
@pytest.mark.spread('event kind')
@pytest.mark.parametrize('event,kind,at,epoch,valid', LEAVES)
def test_one_rank_leaves_while_others_wait_for_its_predictions(two, event, kind, at, epoch, valid):
    learn, end = make('rmse', train=33, valid=21, bs=3), AtEnd()
    one = alone_like(learn, 2)
    seed(1)
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=[end, Leave(event, kind, 1, at, epoch, valid)])
    assert_ranks_alike(end.ranks)
    single = AtEnd()
    seed(1)
    one.fit(2, cbs=[single, Leave(event, kind, 0, at, epoch, valid)])
    assert end.ranks[0][0][0] == single.rows[0][0]
    assert largest(list(learn.model.state_dict().values()), list(one.model.state_dict().values())) < 1e-5


class Draws(nn.Module):
    "Draws, and keeps a buffer, an attribute and a list; a mean over items in all else"
    def __init__(self):
        super().__init__()
        self.register_buffer('center', torch.zeros(1))
        self.calls, self.seen = 0, []
    def forward(self, pred, y):
        self.calls += self.training
        if self.training: self.center.lerp_(y.mean(), .1)
        self.seen.append(len(y))
        return F.mse_loss(pred, y) + (pred-self.center).abs().mean()


class Kept(Collect):
    "What the loss function holds at the end of training, on each rank"
    def before_fit(self): self.rows = []
    def after_train(self): self.note(self.learn.loss_func.calls, self.learn.loss_func.center, torch.rand(()))


@pytest.mark.holds('Losses', "A loss function is called as often as in one process, so its counters, attributes and "
                   "running means are those of one process, at any depth: in closures, dicts, lists, iterators, "
                   "objects in modules; also if its first call with the whole batch failed")
def test_what_a_loss_keeps_is_as_in_one_process(ranks):
    n, launcher = ranks
    kept, single = Kept(), Kept()
    learn = learner(loss_func=Draws(), data=numbers, model=mlp(n_out=1), metrics=Perplexity())
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[kept])
    seed(1)
    one.fit(2, cbs=[single])
    assert_same(learn, one)
    assert largest([r[:2] for r in kept.ranks[0]], [r[:2] for r in single.rows]) < 1e-6
    for rank in kept.ranks: assert largest([r[1] for r in rank], [r[1] for r in single.rows]) < 1e-6
    assert len({r[-1][2] for r in kept.ranks}) == n     # a probe leaves each rank its own random stream
    assert largest([learn.loss_func.center], [one.loss_func.center]) < 1e-6


class CountsLate:
    "Counts in an attribute that its first call creates"
    def __call__(self, pred, y):
        self.calls = getattr(self, 'calls', 0)+1
        return F.mse_loss(pred, y)*(1+self.calls/10)


def test_a_counter_that_the_first_call_creates(two):
    learn = learner(loss_func=CountsLate(), data=numbers, model=mlp(n_out=1))
    learn, one = fit_both(learn, 2, two, 2)
    assert_same(learn, one)
    assert learn.loss_func.calls == one.loss_func.calls


@pytest.mark.holds('Losses', "`loss='mean'`, `'sum'` or `'gather'` says what a loss is")
def test_the_option_overrules(two, capfd):
    learn, one = fit_both(make('rmse', train=16, valid=8), 2, two, 1, ddp=dict(loss='gather'))
    assert_same(learn, one)
    capfd.readouterr()
    learn = make('rmse')
    one = alone_like(learn, 2)
    learn.distrib_fit(1, nprocs=2, launcher=two, loss='mean')
    assert 'of all workers' not in capfd.readouterr().out
    seed(1)
    assert_same(*fit_both(learner(), 2, two, 1, ddp=dict(loss='mean')))
    assert_same(*fit_both(make('squares'), 2, two, 1, ddp=dict(loss='sum')))
    assert_same(*fit_both(learner(), 2, two, 1, ddp=dict(loss='gather')))


class Swaps(Callback):
    "Another loss in the second epoch"
    def before_epoch(self):
        if self.epoch == 1: self.learn.loss_func = pearson


def test_a_loss_that_changes_during_the_fit(two):
    learn, one = fit_both(make('mean'), 2, two, 2, cbs=[Swaps()])
    assert_same(learn, one)
    assert learn.loss_func is pearson


def rarely(pred, y): return F.cross_entropy(pred, y, ignore_index=-100)


def one_missing(n, s=0): return [(x, torch.tensor(-100) if i == n-1 else y) for i, (x, y) in enumerate(items(n, s=s))]


@pytest.mark.holds('Losses', "One ignored target in the whole batch is noticed; predictions with several views of "
                   "each item are put in order")
def test_one_ignored_target_is_found(two):
    "It is the only one of its batch; batches before it are means"
    learn, one = fit_both(learner(loss_func=rarely, data=one_missing, train=16, valid=8, bs=8), 2, two, 1)
    assert_same(learn, one)


class Views(Callback):
    "Two views of each item, all first ones first"
    order = 60
    def before_batch(self): self.learn.xb = (torch.cat([self.x, self.x*.5+.1]),)


def contrast(pred, y, t=.5):
    a, b = F.normalize(pred, dim=1).chunk(2)
    return F.cross_entropy(a@b.T/t, torch.arange(len(a)))


def test_several_views_of_each_item(two):
    assert_same(*fit_both(learner(loss_func=contrast, bs=8, train=32, valid=16), 2, two, 2, cbs=[Views()]))


class ReturnsLoss(nn.Module):
    "A model that computes its loss, as Hugging Face's do"
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x, y=None):
        out = self.m(x)
        return dict(loss=None if y is None else F.cross_entropy(out, y), logits=out)


class GivesTargets(Callback):
    def before_batch(self): self.learn.xb = (*self.xb, *self.yb)


def own_loss(out, y): return out['loss']
def its_number(out, y): return out


class Number(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x).pow(2).mean()


@pytest.mark.holds('Limits', "A number that the model computed is weighted by items, and a line says so")
@pytest.mark.spread
@pytest.mark.parametrize('model,loss,cbs', [(ReturnsLoss, own_loss, [GivesTargets()]), (Number, its_number, [])])
def test_what_the_model_averaged_is_weighted_by_items_and_named(ranks, model, loss, cbs, capfd):
    n, launcher = ranks
    learn, one = fit_both(learner(model=model(), loss_func=loss, cbs=cbs), n, launcher, 2)
    assert_same(learn, one)         # these are means over items
    assert capfd.readouterr().out.count('averaged over workers') == 1


class Penalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad + .1*self.pred.pow(2).mean()


@pytest.mark.holds('Limits', "So is a penalty that a callback adds to `loss_grad`")
@pytest.mark.spread
@pytest.mark.parametrize('name', ['mean', 'rmse'])
def test_a_penalty_of_a_callback_is_weighted_by_items_and_named(ranks, name, capfd):
    n, launcher = ranks
    learn, one = fit_both(make(name), n, launcher, 2, cbs=[Penalty()])
    assert_same(learn, one)
    assert capfd.readouterr().out.count('Penalty changes the loss') == 1


class ArcFace(nn.Module):
    "A loss with weights of its own, and one for how much it counts"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.scale = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.zeros(()))
        self.register_buffer('margin', torch.tensor(.1))
    def forward(self, pred, y):
        cos = F.normalize(pred, dim=1)@F.normalize(self.classes, dim=1).T
        return F.cross_entropy(4*(cos-self.margin*F.one_hot(y, 3)), y)*torch.exp(-self.scale) + self.scale


class RootArc(ArcFace):
    def forward(self, pred, y): return super().forward(pred, y).sqrt()


class LossParams(Collect):
    def before_fit(self): self.rows = []
    def after_batch(self):
        if self.training: self.note(*(p.detach().double().sum() for p in self.learn.loss_func.parameters()))


@pytest.mark.holds('Losses', "Parameters of the loss function are trained like those of the model, and are in the "
                   "notebook's loss afterwards")
@pytest.mark.spread
@pytest.mark.spread
@pytest.mark.parametrize('loss', [ArcFace, RootArc])
@pytest.mark.parametrize('late', [False, True])
def test_a_loss_with_parameters(ranks, loss, late):
    n, launcher = ranks
    loss_func, noted = loss(), LossParams()
    learn = learner(loss_func=loss_func, opt_func=Adam, train=29, bs=12,
                    cbs=GradientAccumulation(24) if late and loss is ArcFace else None,
                    splitter=lambda m: [list(m.parameters()), list(loss_func.parameters())])
    one = alone_like(learn, n, 'global')
    one.splitter = lambda m: [list(m.parameters()), list(one.loss_func.parameters())]
    for o in (learn, one): o.create_opt()
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[noted], batch='global')
    seed(1)
    one.fit(2)
    assert_same(learn, one)
    assert_ranks_alike(noted.ranks)
    assert learn.loss_func is loss_func
    assert largest(list(loss_func.parameters()), list(one.loss_func.parameters())) < 1e-5
    assert not torch.equal(loss_func.classes, loss().classes)
    if late: return             # what accumulation leaves in gradients stays in the workers
    for o in (learn, one):      # and it goes on in the notebook
        seed(2)
        o.fit(1)
    assert_same(learn, one)


@pytest.mark.holds('Losses', "Random losses of all these kinds")
@pytest.mark.parametrize('how_many', [4, pytest.param(12, marks=pytest.mark.full)])
def test_some_random_losses(how_many):
    from random_losses import main
    assert main(how_many, 0)


class Letters(nn.Module):
    "Log-probabilities of 5 letters, one of them blank, at each time"
    def __init__(self):
        super().__init__()
        self.net = mlp(n_out=5)
    def forward(self, x): return self.net(x).log_softmax(-1).transpose(0, 1)


def texts(n, s=0):
    "`n` pairs of 9 vectors and a text of 1 to 4 letters"
    g = torch.Generator().manual_seed(s)
    lengths = torch.randint(1, 5, (n,), generator=g).tolist()
    return [(torch.randn(9, 4, generator=g), torch.randint(1, 5, (m,), generator=g)) for m in lengths]


def text_batch(pairs, join):
    xs, ys = zip(*pairs)
    return torch.stack(xs), join(ys), torch.full((len(ys),), 9), torch.tensor([len(y) for y in ys])


@pytest.mark.full
@pytest.mark.spread
@pytest.mark.parametrize('loss', [nn.CTCLoss(), F.ctc_loss, partial(F.ctc_loss, zero_infinity=True)])
@pytest.mark.parametrize('join', [torch.cat, partial(nn.utils.rnn.pad_sequence, batch_first=True)])
def test_ctc_of_texts_of_any_length(two, loss, join):
    "Targets are rows, or one row of all letters: the mean is over texts"
    learn = learner(train=26, valid=17, model=Letters(), loss_func=loss, data=texts)
    learn.dls = DataLoaders(*[DataLoader(dl.dataset, bs=4, shuffle=i == 0, num_workers=0,
                                         create_batch=partial(text_batch, join=join))
                              for i, dl in enumerate(learn.dls)])
    learn.dls.train.n_inp = 1
    assert_same(*fit_both(learn, 2, two, 2))


class Views(Callback):
    "Two views of each item; the targets say in which row the other view of an item is, as in SimCLR"
    def __init__(self, together=False): self.together = together
    def before_batch(self):
        x = self.x
        rows = torch.arange(2*len(x))
        if self.together: self.learn.xb, self.learn.yb = (torch.stack([x*.5, x*.8], 1).flatten(0, 1),), (rows ^ 1,)
        else: self.learn.xb, self.learn.yb = (torch.cat([x*.5, x*.8]),), (rows.roll(len(x)),)


def contrast(pred, y):
    pred = nn.functional.normalize(pred, dim=1)
    like = pred @ pred.T
    return nn.functional.cross_entropy(like.masked_fill(torch.eye(len(y)).bool(), -1e9), y)


@pytest.mark.spread('train together')
@pytest.mark.parametrize('batch', ['per_worker', 'global'])
@pytest.mark.parametrize('train,together', [(32, False), (37, False), (32, True)])
def test_targets_that_number_the_rows(two, train, together, batch):
    "They number those of the global batch in the end"
    learn = learner(train=train, loss_func=contrast, cbs=Views(together))
    assert_same(*fit_both(learn, 2, two, 2, batch=batch))


class NeedsGradient(Callback):
    "Losses compute gradients with respect to inputs"
    order = -5
    def before_batch(self): self.learn.xb = (self.x.requires_grad_(),)


def penalty(learn, pred, y):
    "A gradient penalty: the loss differentiates its predictions"
    loss = nn.functional.cross_entropy(pred, y)
    if not learn.training: return loss
    g, = torch.autograd.grad(pred.sum(), learn.xb[0], create_graph=True)
    return loss+.1*g.square().sum(1).mean()


def physics(learn, pred, y):
    "A residual of an equation: the loss differentiates the model at points of its own"
    loss = nn.functional.cross_entropy(pred, y)
    if not learn.training: return loss
    x = learn.xb[0].detach().requires_grad_()
    g, = torch.autograd.grad(learn.model(x).sum(), x, create_graph=True)
    return loss+.1*(g[:len(y)].sum(1)-y).square().mean()


@pytest.mark.parametrize('batch', ['per_worker', 'global'])
@pytest.mark.parametrize('loss', [penalty, physics])
def test_a_loss_that_computes_gradients(two, loss, batch, capfd):
    learn, one = [learner(train=32, cbs=NeedsGradient()) for _ in range(2)]
    for o in learn, one: o.loss_func = partial(loss, o)
    if batch == 'per_worker': one.dls.train.bs *= 2
    for o, fit in (learn, partial(learn.distrib_fit, nprocs=2, launcher=two, batch=batch)), (one, one.fit):
        seed(1)
        fit(1)
    assert_same(learn, one)
    why = dict(penalty='computes gradients through', physics='raised RuntimeError')
    assert why[loss.__name__] in capfd.readouterr().out


def too_large(pred, y):
    "Rank 1 has no room for what the predictions of both ranks need"
    if group.rank() == 1 and len(pred) > 4: raise OutOfMemory('CUDA out of memory. Tried to allocate 2.00 GiB')
    return (pred-y).std()


def test_memory_that_a_loss_lacks_is_no_sign_of_what_it_reads(capfd):
    learn = make('rmse', train=16, valid=8)
    learn.loss_func = too_large
    with pytest.raises(RankRaised, match='CUDA out of memory') as e: learn.distrib_fit(1, nprocs=2, timeout=60)
    assert e.value.rank == 1
    assert 'averaged over workers' not in capfd.readouterr().out


class NoCopies:
    def apply(self, *args): raise ValueError('no copy of this tensor')


class CantJoin(Callback):
    "Rank 1 can't put the tensors of all ranks together"
    def before_fit(self):
        if group.rank() == 1: whole._ScaleGradient = NoCopies()


def test_a_rank_that_cant_join_lists_keeps_none_waiting(capfd):
    "Its targets are lists, which the ranks exchange after the tensors"
    learn, one = made('detection'), alone_like(made('detection'), 2)
    seed(1)
    learn.distrib_fit(1, nprocs=2, timeout=20, cbs=[CantJoin()])
    seed(1)
    one.fit(1)
    assert_same(learn, one)     # a mean over items, so that the average is exact
    assert 'averaged over workers' in capfd.readouterr().out

