"""What trains in one process of fastai v1 trains on workers, whatever loss, outputs and loaders are; and each row of
the table is what a plain validation of these weights gives."""
from collections import namedtuple
from dataclasses import dataclass
import random, pytest
import torch.nn.functional as F
from fastddp.all import RankRaised
from learners_v1 import *
from torch.utils.data import BatchSampler, DataLoader, IterableDataset


def net(): return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


Named = namedtuple('Named', 'logits hidden')


@dataclass
class Data:
    logits: torch.Tensor
    name: str = 'head'


class Returns(nn.Module):
    "What `make` makes of the predictions"
    def __init__(self, make): super().__init__(); self.m, self.make = net(), make
    def forward(self, x): return self.make(self.m(x))


def named(o): return Named(o, o*2)
def time_first(o): return torch.stack([o, o*2, o*.5]).log_softmax(2)
def two_views(o): return torch.stack([o, o*.5])


class KeepsInput(LearnerCallback):
    "The loss reads the inputs that this keeps, as distillation and weights of items do"
    def on_batch_begin(self, last_input, **kwargs): self.learn.x = last_input


def of_logits(o, y): return F.cross_entropy(o.logits, y)
def ctc(o, y):
    n = len(y)
    return F.ctc_loss(o, torch.ones(n, 1).long(), torch.full((n,), 3), torch.full((n,), 1))
def agree(o, y): return -(o[0].softmax(-1)*o[1].log_softmax(-1)).sum(-1).mean()


class Weighted:
    "Weights from the inputs"
    def __init__(self, learn): self.learn = learn
    def __call__(self, o, y): return (F.cross_entropy(o, y, reduction='none')*self.learn.x[:, 0].abs()).mean()


# how the model's output is made, and the loss, a mean over items
CASES = dict(named=(named, of_logits), data=(Data, of_logits), time_first=(time_first, ctc),
             two_views=(two_views, agree), inputs=(noop, Weighted))


@pytest.mark.parametrize('name', CASES)
def test_losses_and_outputs_as_people_write_them(name, capfd):
    output, loss = CASES[name]
    def make(bs):
        learn = plain(bs, n=49, metrics=[], callback_fns=[KeepsInput])
        learn.model = Returns(output)
        learn.layer_groups = [learn.model]
        learn.loss_func = loss(learn) if loss is Weighted else loss
        return learn
    two, one = pair(make, lambda l: l.fit(2, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    assert capfd.readouterr().out.count('averaged over workers') == 1


def no_targets(bs):
    "A loader without targets, as for self-supervised losses"
    learn = plain(bs, n=48, n_valid=0)      # v1 can't validate without targets
    learn.data.train_dl.add_tfm(without_targets)
    return learn
def without_targets(b): return b[0], []
def energy(o): return o.pow(2).mean()


def test_without_targets():
    two, one = pair(no_targets, lambda l: setattr(l, 'loss_func', energy) or l.fit(2, 1e-2))
    same_weights(two, one)
    assert [float(o) for o in two.recorder.losses] == pytest.approx([float(o) for o in one.recorder.losses], abs=1e-6)


class Anneals:
    "A loss that counts its calls, and has an attribute that a callback sets"
    def __init__(self): self.calls, self.gamma, self.seen = 0, 0., []
    def __call__(self, o, y):
        self.calls += 1
        self.seen.append(len(y))
        return F.cross_entropy(o, y)*(1+self.gamma+.1*self.calls)


class Sets(LearnerCallback):
    "In each event of a batch the learner has the user's own loss function"
    def _set(self, train):
        assert type(self.learn.loss_func) is Anneals
        if train: self.learn.loss_func.gamma += .1
    def on_batch_begin(self, train, **kwargs): self._set(train)
    def on_loss_begin(self, train, **kwargs): self._set(train)
    def on_backward_begin(self, train, **kwargs): self._set(train)
    def on_batch_end(self, train, **kwargs): self._set(train)


def test_a_loss_with_a_state():
    def make(bs): return plain(bs, n=49, loss_func=Anneals(), callback_fns=[Sets])
    two, one = pair(make, lambda l: l.fit(2, 1e-3))
    same_weights(two, one)
    same_recorder(two, one, 1e-4)
    assert two.loss_func.calls == one.loss_func.calls and two.loss_func.gamma == pytest.approx(one.loss_func.gamma)
    assert len(two.loss_func.seen) == len(one.loss_func.seen)


class LargestInput(Callback):
    "A metric that reads the inputs, and depends on how the set is cut into batches"
    def on_epoch_begin(self, **kwargs): self.values = []
    def on_batch_end(self, last_input, last_loss, **kwargs): self.values.append(float(last_input.max()+last_loss))
    def on_epoch_end(self, last_metrics, **kwargs):
        value = sum(v*(i+1) for i, v in enumerate(self.values))
        return {'last_metrics': last_metrics+[torch.tensor(value)]}


def root(o, y): return F.cross_entropy(o, y).sqrt()


@pytest.mark.parametrize('n,n_valid,options', [(2, 13, {}), (3, 9, {}), (3, 3, {}), (2, 13, dict(batch='global'))])
def test_each_row_is_that_of_a_plain_validation(n, n_valid, options):
    "Also with fewer batches than workers"
    learn = plain(4, n_valid=n_valid, loss_func=root, metrics=[accuracy, squared, LargestInput()])
    learn.distrib_fit(2, 1e-2, nprocs=n, **options)
    row = [learn.recorder.val_losses[-1], *learn.recorder.metrics[-1]]
    with learn.distrib_ctx(nprocs=n): again = learn.validate()
    here = learn.validate()
    assert [float(o) for o in row] == pytest.approx([float(o) for o in here], abs=1e-6)
    assert [float(o) for o in again] == pytest.approx([float(o) for o in here], abs=1e-6)


class Halves(DataLoader):
    "A loader with its own `__iter__`"
    def __iter__(self):
        for x, y in super().__iter__(): yield x*.5, y


class Stream(IterableDataset):
    def __init__(self, n): self.ds = Numbers(n)
    def __len__(self): return len(self.ds)
    def __iter__(self): return iter([self.ds[i] for i in range(len(self.ds))])


def own_loop(data, bs): return data.train_dl.new(drop_last=False), Halves
def own_batches(data, bs):
    return data.train_dl.new(batch_size=1, shuffle=False, drop_last=False,
                             batch_sampler=BatchSampler(range(50), bs, False)), None
def stream(data, bs):
    dl = data.train_dl.new(shuffle=False, drop_last=False, num_workers=1)
    dl.dl = type(dl.dl)(Stream(50), **{**dl.dl.init_kwargs, 'sampler': None})
    return dl, None


@pytest.mark.parametrize('loader', [own_loop, own_batches, stream])
@pytest.mark.parametrize('batch', ['per_worker', 'global'])
def test_loaders_that_are_read_whole(loader, batch, capfd):
    def make(bs):
        learn = plain(bs)
        learn.data.train_dl, cls = loader(learn.data, bs)
        if cls: learn.data.train_dl.dl.__class__ = learn.data.valid_dl.dl.__class__ = cls
        return learn
    two, one = make(4 if batch == 'per_worker' else 8), make(8)
    seed(5)
    two.distrib_fit(2, 1e-2, nprocs=2, batch=batch)
    seed(5)
    one.fit(2, 1e-2)
    same_weights(two, one)
    same_recorder(two, one)
    assert capfd.readouterr().out.count('every worker reads all of this') == (loader is not own_batches)


class OwnOrder(Stream):
    "Of the second half"
    def __iter__(self):
        n = len(self.ds)
        return iter([self.ds[i] for i in [*range(n//2), *random.Random().sample(range(n//2, n), n-n//2)]])


@pytest.mark.parametrize('batch', ['per_worker', 'global'])
def test_a_stream_with_an_order_of_its_own_is_refused(batch):
    learn = plain(4)
    dl = learn.data.train_dl = learn.data.train_dl.new(shuffle=False, drop_last=False)
    dl.dl = type(dl.dl)(OwnOrder(50), **{**dl.dl.init_kwargs, 'sampler': None})
    with pytest.raises(RankRaised, match='read different batches'): learn.distrib_fit(1, 1e-2, nprocs=2, batch=batch)
