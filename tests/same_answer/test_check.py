"""`learn.distrib_check`: the answer, the reasons, and a learner that stays as it was."""
import copy, pathlib, random, re
import numpy as np, pytest, torch, torch.distributed as dist
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders, Datasets
from fastai.data.load import DataLoader
from fastai.data.transforms import IntToFloatTensor, Normalize, ToTensor
from fastai.learner import Metric
from fastai.losses import MSELossFlat
from fastai.metrics import accuracy
from fastai.optimizer import Adam
from fastai.text.data import SortedDL, pad_input
from fastai.text.models.awdlstm import WeightDropout
from fastai.vision.augment import Flip, Resize
from fastai.vision.core import PILImage, imagenet_stats
from fastddp.all import CantDistribute, RankRaised
from fastddp.base import group
from fastddp.fastai2 import check
from torch import nn
from torch.utils.data import IterableDataset, Sampler
from parity import items, learner, mlp, warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def streams(): return random.getstate(), torch.get_rng_state().tolist()


@pytest.mark.holds('Batches', "`learn.distrib_check()` makes a few steps both ways, returns how far apart batches, "
                   "losses, gradients, weights and a validation are, relative to their size, and leaves all as it was")
def test_same_answer_and_nothing_changed(two):
    learn = learner(opt_func=Adam, metrics=accuracy, cbs=GradientClip(.1), wd=.1)
    learn.fit(1)        # an optimizer with state
    was = copy.deepcopy((learn.model.state_dict(), learn.opt.state_dict(), vars(learn.recorder)['losses'],
                         len(learn.cbs)))
    rng, order = streams(), learn.dls.train.rng.getstate()
    res = learn.distrib_check(nprocs=2, launcher=two)
    assert res.same and [r.what for r in res] == ['batches', 'losses', 'gradients', 'weights', 'validation']
    assert rng == streams() and order == learn.dls.train.rng.getstate()
    now = (learn.model.state_dict(), learn.opt.state_dict(), vars(learn.recorder)['losses'], len(learn.cbs))
    assert all(torch.equal(a, b) for a, b in zip(was[0].values(), now[0].values()))
    assert str(was[1:]) == str(now[1:])


class Halves(DataLoader):
    "Makes its batches by itself, of a size of its own"
    def create_batches(self, samps):
        for i in range(0, 32, 4): yield self.do_batch([self.do_item(j) for j in range(i, i+4)])


@pytest.mark.parametrize('make', [lambda ds: Halves(ds, bs=8), lambda ds: DataLoader([*DataLoader(ds, bs=4)], bs=None)],
                         ids=['own batches', 'no batch size'])
def test_a_loader_whose_batch_size_is_not_its_own(two, make):
    learn = learner()
    learn.dls = DataLoaders(make(items(32)), DataLoader(items(8), bs=4))
    res = learn.distrib_check(nprocs=2, launcher=two)
    assert res.same, res


class Awd(nn.Module):
    "Its weights are computed, so no copy can be made of them"
    def __init__(self): super().__init__(); self.rnn = WeightDropout(nn.LSTM(8, 8, batch_first=True), .5)
    def forward(self, x): return self.rnn(x[:, None].repeat(1, 3, 1))[0][:, -1]


@pytest.mark.parametrize('layer,why', [(nn.BatchNorm1d(8), 'batch norm on the CPU'), (nn.Dropout(.5), 'dropout'),
                                       (Awd(), 'dropout')])
def test_differences_have_their_reason(two, layer, why):
    res = learner(model=nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3))).distrib_check(nprocs=2, launcher=two)
    assert res.same and res.removed == [why], res
    assert res.verdict == f'Same, apart from {why}.' and str(res).startswith(res.verdict)
    assert all(r.largest < 1e-12 for r in res)      # in float64


def test_a_wrong_loss_option_is_named(two):
    res = learner().distrib_check(nprocs=2, launcher=two, loss='sum')
    assert not res.same and 'What differs first: losses' in res.verdict and 'the option loss=' in res.verdict


def test_what_is_removed_would_differ(two, monkeypatch):
    monkeypatch.setattr(check, '_no_dropout', lambda *_: None)
    res = learner(model=nn.Sequential(nn.Linear(4, 8), nn.Dropout(.5), nn.Linear(8, 3))).distrib_check(2, launcher=two)
    by = {r.what: r for r in res}
    assert by['batches'].same and not by['losses'].same, res


class Odd(nn.Module):
    "Its answer depends on the size of the batch"
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x)*len(x)


class Compares(nn.Module):
    "Attention over the items of a batch, behind dropout"
    def __init__(self): super().__init__(); self.m, self.drop = mlp(), nn.Dropout(.3)
    def forward(self, x): return self.m(x + torch.softmax(x@x.T, 1)@self.drop(x))


class DrawsNoise(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x+torch.randn_like(x))


class Skips(Callback):
    def before_batch(self):
        if self.training and random.random() < .5: raise CancelBatchException()


def largest(preds, targs): return preds.max()


class MovesAverage(nn.Module):
    "A buffer that a forward pass changes"
    def __init__(self): super().__init__(); self.m = mlp(); self.register_buffer('average', torch.zeros(3))
    def forward(self, x):
        out = self.m(x)
        if self.training: self.average.lerp_(out.detach().mean(0), .1)
        return out+self.average


class MeanOfAll(nn.Module):
    "Over the positions of a text, padding included"
    def __init__(self): super().__init__(); self.words = nn.Embedding(20, 3)
    def forward(self, x): return self.words(x).mean(1)


def padded():
    learn = learner(model=MeanOfAll())
    texts = [(torch.arange(2+i%7)+2, torch.tensor(i%3)) for i in range(30)]
    learn.dls = DataLoaders(*(SortedDL(texts, bs=4, shuffle=not i, before_batch=pad_input) for i in range(2)))
    return learn


def clamped(learn):
    learn.model[0].weight.register_hook(lambda g: g.clamp(-.01, .01))
    return learn


# learner -> what differs first
OWN = {'size': (lambda: learner(model=Odd()), 'losses'),
       'compares': (lambda: learner(model=Compares()), 'losses'),
       'draws': (lambda: learner(model=DrawsNoise()), 'losses'),
       'callback': (lambda: learner(cbs=Skips()), 'batches'),
       'hook': (lambda: clamped(learner()), 'gradients'),
       'buffers': (lambda: learner(model=MovesAverage()), 'losses'),
       'padding': (padded, 'batches')}


@pytest.mark.holds('Limits', "Padding that the model looks at: `distrib_check` shows it")
@pytest.mark.few(4)
@pytest.mark.parametrize('kind', OWN)
def test_what_differs_first_is_named(two, kind):
    make, first = OWN[kind]
    res = make().distrib_check(nprocs=2, launcher=two)
    assert not res.same and f'What differs first: {first} (' in res.verdict, res
    assert check._WHY[first] in res.verdict and (', also without dropout.' in res.verdict) == (kind == 'compares')


def test_the_verdict_points_to_a_page():
    docs = pathlib.Path(__file__).parents[2]/'docs'
    verdict = check.Answer([check.Row('losses', 1., 0.)]).verdict
    title = re.search("The page '(.*)' says", verdict)[1]
    assert f'# {title}\n' in (docs/'same_answer.md').read_text(encoding='utf-8')


@pytest.mark.parametrize('options', [{}, dict(gpus=None)])
@pytest.mark.parametrize('n,nprocs', [(0, 2), (1, 2), (3, 3)])
def test_without_options_as_many_workers_as_gpus(monkeypatch, n, nprocs, options):
    "At least two, or there is nothing to compare"
    made = []
    def compare(learn, steps, tol, options, removed, in_float64):
        made.append(options['nprocs'])
        return check.Answer([check.Row('batches', 0., tol)])
    monkeypatch.setattr(group, 'n_gpus', lambda: n)
    monkeypatch.setattr(check, '_compare', compare)
    learner().distrib_check(**options)
    assert made == [nprocs]


def test_torch_loaders(two):
    learn = learner()
    learn.dls.loaders = [torch.utils.data.DataLoader(items(30), batch_size=6, shuffle=True),
                         torch.utils.data.DataLoader(items(9, s=1), batch_size=4)]
    assert learn.distrib_check(nprocs=2, launcher=two).same


def root(pred, y): return ((pred.sum(1)-y)**2).mean().sqrt()


@pytest.mark.parametrize('loss_func,kind', [(nn.CrossEntropyLoss(), 'weighted by the elements that count'),
                                            (root, 'computed over the predictions and targets of all workers')])
def test_the_kind_of_loss_is_named(two, loss_func, kind):
    res = learner(loss_func=loss_func).distrib_check(nprocs=2, launcher=two)
    assert res.same and res.loss.endswith(f': {kind}') and f'loss: {res.loss}' in str(res)


def test_a_metric_that_is_no_mean_over_items_is_the_same(two):
    assert learner(metrics=largest).distrib_check(nprocs=2, launcher=two).same


def test_the_name_of_a_loss_decides_nothing(two):
    def own(pred, y): return root(pred, y)
    own.__name__ = 'averaged over workers'
    res = learner(loss_func=own).distrib_check(nprocs=2, launcher=two)
    assert res.same and res.loss.startswith(own.__name__)


class OwnOrder(Sampler):
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(np.random.default_rng().permutation(self.n).tolist())
    def __len__(self): return self.n


class ByIdxs(DataLoader):
    def get_idxs(self): return np.random.default_rng().permutation(self.n).tolist()


class Stream(IterableDataset):
    "Divides itself, as webdataset does; in an order of its own if `shuffled`"
    def __init__(self, shuffled): self.shuffled = shuffled
    def __len__(self): return 32
    def __iter__(self):
        order = np.random.default_rng().permutation(32) if self.shuffled else range(32)
        rank, n = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return iter([items(32)[i] for i in order][rank::n])


def over(train):
    learn = learner()
    learn.dls.loaders = [train, torch.utils.data.DataLoader(items(8, s=1), batch_size=4)]
    return learn


ORDERS = {'sampler': lambda: over(torch.utils.data.DataLoader(items(32), 4, sampler=OwnOrder(32))),
          'indices': lambda: over(ByIdxs(items(32), bs=4))}


@pytest.mark.parametrize('kind', ORDERS)
def test_an_order_of_its_own_is_named(two, kind):
    learn, rng = ORDERS[kind](), streams()
    res = learn.distrib_check(nprocs=2, launcher=two)
    assert rng == streams()
    assert not res.same and 'What differs first: batches' in res.verdict, res
    assert 'the order of the loader comes from a generator of its own' in res.verdict


def test_a_stream_with_an_order_of_its_own_is_refused_by_name():
    with pytest.raises(RankRaised, match='its order comes from a generator of its own'):
        over(torch.utils.data.DataLoader(Stream(True), 4)).distrib_check(nprocs=2)


def annealed():
    n = 0
    def loss(pred, y):
        nonlocal n
        n += 1
        return nn.functional.cross_entropy(pred, y)*(1+.1*n)
    return loss


class Lists(nn.Module):
    "A prediction for each item, in a list"
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return list(self.m(x))


def of_lists(pred, y): return sum(nn.functional.cross_entropy(o[None], t[None]) for o, t in zip(pred, y))/len(pred)


class OfLists(Metric):
    def reset(self): self.all = []
    def accumulate(self, learn): self.all += learn.pred
    @property
    def value(self): return float(sum(o.max() for o in self.all))


SAME = {'a counter in a loss': lambda: learner(loss_func=annealed()),
        'predictions in lists': lambda: learner(model=Lists(), loss_func=of_lists, metrics=OfLists()),
        'a stream that divides itself': lambda: over(torch.utils.data.DataLoader(Stream(False), 4))}


@pytest.mark.parametrize('kind', SAME)
def test_what_was_reported_as_different_is_the_same(two, kind):
    res = SAME[kind]().distrib_check(nprocs=2, launcher=two)
    assert res.same, res


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.drop = mlp(), nn.Dropout(.5)
    def forward(self, x): return self.drop(self.net(x)), x


class OnlyPredicts(Callback):
    "Makes the predictions of a model that returns two"
    def after_pred(self): self.learn.pred = self.pred[0]


def test_callbacks_stay():
    res = learner(model=Both(), cbs=OnlyPredicts()).distrib_check(2)
    assert res.verdict == 'Same, apart from dropout.', res.verdict


def pictures(n, **tfms):
    "Random pictures of one size, each of a class"
    rng = np.random.default_rng(0)
    made = [PILImage.create(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)) for _ in range(n)]
    dsets = Datasets([*range(n)], [lambda i: made[i], lambda i: torch.tensor(i%3)],
                     splits=[[*range(n-8)], [*range(n-8, n)]])
    return dsets.dataloaders(bs=4, after_item=[Resize(8), ToTensor()], num_workers=0,
                             device=torch.device('cpu'), **tfms)


def test_augmentation_is_named(two):
    "A flip keeps the sum of a batch"
    net = nn.Sequential(nn.Flatten(), nn.Linear(3*8*8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    learn = learner(model=net)
    learn.dls = pictures(40, after_batch=[IntToFloatTensor(), Flip(), Normalize.from_stats(*imagenet_stats)])
    res = learn.distrib_check(nprocs=2, launcher=two)
    assert res.verdict == 'Same, apart from batch norm on the CPU, augmentation.', res
    assert all(r.largest < 1e-12 for r in res)      # in float64


class Deep(nn.Module):
    "Rounding becomes larger in each of its layers"
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(12)])
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers: x = torch.sin(4*layer(x))
        return self.last(x)


def with_old_state():
    "A learner whose optimizer has a state in float32, and whose loss has weights"
    learn = learner(model=Deep(), opt_func=Adam, lr=.01, loss_func=nn.CrossEntropyLoss(torch.tensor([1., 2, 3])))
    learn.fit(1)
    return learn


def test_rounding_that_training_makes_larger_is_no_difference(two):
    "A resnet with Adam is such a model"
    res = with_old_state().distrib_check(nprocs=2, launcher=two)
    assert res.verdict == 'Same.' and not res.removed, res


class OnlyFloat32(nn.Module):
    def __init__(self): super().__init__(); self.m, self.drop = mlp(), nn.Dropout(.3)
    def forward(self, x): return self.drop(self.m(x.float()))


def test_a_model_that_takes_float32_alone_is_compared_in_it():
    res = learner(model=OnlyFloat32()).distrib_check(nprocs=2)
    assert res.verdict == 'Same, apart from dropout.', res


def test_a_regression_with_fastais_loss_is_compared_in_float64(two):
    "`MSELossFlat` makes float32 of its targets"
    learn = learner(model=nn.Sequential(Deep(), nn.Linear(3, 1)), opt_func=Adam, loss_func=MSELossFlat())
    learn.dls = DataLoaders(*(DataLoader([(x, x.sum()[None]) for x, _ in items(n)], bs=4) for n in (30, 9)))
    res = learn.distrib_check(nprocs=2, launcher=two)
    assert res.verdict == 'Same.', res


class Full(nn.Module):
    "A GPU that has room for five items"
    def __init__(self): self.layers = super().__init__() or mlp()
    def forward(self, x):
        if len(x) > 5: raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return self.layers(x)


def test_where_one_process_has_no_room_for_all_workers_batches(two):
    res = learner(bs=4, model=Full()).distrib_check(nprocs=2, launcher=two)
    assert res.same and 'batches above 2' in res.verdict
