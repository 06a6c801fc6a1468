"""What people reported of several GPUs: orders from generators of one's own, streams that shard themselves,
recorders of libraries."""
import os, random, time
import numpy as np, pytest, torch, torch.distributed as dist
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Recorder
from torch.utils.data import DataLoader as TorchLoader, IterableDataset, Sampler, get_worker_info
from fastddp.base import group
from fastddp.base.errors import RankRaised
from cases.data import Reduces
from parity import Collect, items, learner, values, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


# Orders

class Seen(Callback):
    "Which items all ranks together were trained on"
    def before_epoch(self): self.mine = []
    def after_batch(self):
        if self.training: self.mine += self.y.tolist()
    def after_epoch(self): self.all = sum(group.all_gather_object(self.mine), [])


ORDERS = {'numpy': lambda: np.random.default_rng().permutation(32).tolist(),
          'python': lambda: random.Random().sample(range(32), 32),
          'time': lambda: random.Random(os.getpid()+time.time()).sample(range(32), 32)}


class Own(Sampler):
    def __init__(self, how): self.how = how
    def __len__(self): return 32
    def __iter__(self): return iter(ORDERS[self.how]())


def numbered(n=32): return [(x, torch.tensor(i)) for i, (x, _) in enumerate(items(n))]


class OwnStream(IterableDataset):
    "Begins with so many items in order; the others come in an order of its own"
    def __init__(self, how, first=0): self.how, self.first = how, first
    def __len__(self): return 32
    def __iter__(self):
        data = numbered()
        order = ORDERS[self.how]()
        return (data[i] for i in [*range(self.first), *(i for i in order if i >= self.first)])


class OwnIdxs(DataLoader):
    def get_idxs(self): return ORDERS['numpy']()


def modulo(p, y): return torch.nn.functional.cross_entropy(p, y % 3)


def over(train, valid=None):
    learn = learner(loss_func=modulo)
    learn.dls = DataLoaders(train, valid or TorchLoader(numbered(8), batch_size=4))
    return learn


@pytest.mark.holds('Batches', "An order that is drawn from a generator of your own, or from the time, is worker 0's "
                   "on all workers")
@pytest.mark.parametrize('how', ORDERS)
def test_an_order_from_a_generator_of_ones_own_is_worker_0s_on_all(two, how, capfd):
    learn, seen = over(TorchLoader(numbered(), batch_size=4, sampler=Own(how))), Seen()
    learn.distrib_fit(2, nprocs=2, launcher=two, cbs=[seen])
    assert sorted(seen.all) == [*range(32)]
    assert capfd.readouterr().out.count("all take worker 0's order") == 1


def test_the_same_of_a_loader_that_draws_its_indices(two):
    seen = Seen()
    over(OwnIdxs(numbered(), bs=4)).distrib_fit(1, nprocs=2, launcher=two, cbs=[seen])
    assert sorted(seen.all) == [*range(32)]


@pytest.mark.holds('Limits', "A stream that every worker reads, and that draws its order from a generator of its own, "
                   "is refused")
@pytest.mark.parametrize('batch, first', [('per_worker', 0), ('per_worker', 16), ('global', 24)])
def test_a_stream_with_an_order_of_its_own_is_refused(batch, first):
    "From the first step on, or later"
    with pytest.raises(RankRaised, match='training loader.* read different batches: its order comes from a generator'):
        over(TorchLoader(OwnStream('numpy', first), batch_size=4)).distrib_fit(1, nprocs=2, batch=batch)


@pytest.mark.parametrize('call', ['fit', 'validate'])
def test_a_stream_of_a_validation_with_an_order_of_its_own_is_refused(call):
    learn = over(TorchLoader(numbered(), batch_size=4), TorchLoader(OwnStream('numpy', 16), batch_size=4))
    with learn.distrib_ctx(nprocs=2), pytest.raises(RankRaised, match='validation loader'):
        getattr(learn, call)(*[1]*(call == 'fit'))


class SplitsItself(IterableDataset):
    "Takes the part of its rank, as streams do that were written for torchrun"
    def __len__(self): return 32
    def __iter__(self):
        n = dist.get_world_size() if dist.is_initialized() else int(os.environ.get('WORLD_SIZE', 1))
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get('RANK', 0))
        info = get_worker_info()
        return iter(numbered()[rank::n][info.id::info.num_workers] if info else numbered()[rank::n])


@pytest.mark.parametrize('num_workers', [0, 2])
def test_a_stream_that_shards_itself_is_read_whole(two, num_workers):
    learn, seen = over(TorchLoader(SplitsItself(), batch_size=4, num_workers=num_workers)), Seen()
    learn.distrib_fit(1, nprocs=2, launcher=two, cbs=[seen])
    assert sorted(seen.all) == [*range(32)]


class Noisy:
    "Draws from a generator that it keeps"
    def __init__(self): self.rng = np.random.default_rng(3)
    def __len__(self): return 32
    def __getitem__(self, i): return torch.tensor(self.rng.random(4), dtype=torch.float32), torch.tensor(i % 3)


class Draws(Collect):
    def before_fit(self): self.rows = []
    def after_batch(self):
        if self.training: self.note(*self.x[:, 0])


def test_a_generator_of_a_data_set_differs_between_ranks(two):
    draws = Draws()
    over(DataLoader(Noisy(), bs=4)).distrib_fit(1, nprocs=2, launcher=two, cbs=[draws])
    drawn = [v for rank in draws.ranks for row in rank for v in row]
    assert len(drawn) == len({*drawn}) == 32


class PlainRecorder(Recorder):
    "Of a library: keeps its metrics under names of its own"
    def before_fit(self):
        super().before_fit()
        self.of_valid = [self.loss, *self.metrics]
    def before_train(self): pass
    def before_validate(self):
        for m in self.of_valid: m.reset()
    def after_batch(self):
        if self.training:
            self.smooth_loss.accumulate(self.learn)
            self.losses.append(self.smooth_loss.value)
        else:
            for m in self.of_valid: m.accumulate(self.learn)
    def after_train(self): self.log += [self.smooth_loss.value]
    def after_validate(self): self.log += [m.value for m in self.of_valid]


def test_a_recorder_of_a_librarys_own(two):
    learn = learner(valid=21, metrics=Reduces())
    learn.remove_cb(Recorder)
    learn.add_cb(PlainRecorder())
    learn.recorder = learn.plain_recorder
    learn.distrib_fit(1, nprocs=2, launcher=two)
    row = values(learn)[-1]
    assert row[-1] == 21. and row[1] == pytest.approx(float(learn.validate()[0]), abs=1e-6)
