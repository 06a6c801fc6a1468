"""`fastai2.loaders` on real loaders: N sharded ones, built in one process, against one with the batch of all."""
import gc, pickle, random, signal, weakref
import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import (BatchSampler, DataLoader as TorchLoader, Dataset, DistributedSampler, IterableDataset,
                              Sampler, SubsetRandomSampler, WeightedRandomSampler)
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader, SkipItemException
from fastai.tabular.core import TabDataLoader, TabularPandas, TabWeightedDL
from fastai.text.data import LMDataLoader, SortedDL, pad_input
from fastddp.fastai2 import loaders
from fastddp.fastai2.loaders import check_dl, dl_state, set_dl_state, shard_dl, step_sizes
from fastddp.base.rng import CommonRNG, seed_rank
from fastddp.shard import sharded, torch_loader
from fastddp.shard.sharded import CantShard, is_sharded, pad_shard, shard_batch


def seed(i=0): random.seed(i); np.random.seed(i); torch.manual_seed(i)


def train_shard(batch, rank, n):
    "What a rank is given of a training batch, and how many of these count"
    own = shard_batch(batch, rank, n)
    return pad_shard(own, batch, n), len(own)


def ids(b):
    "What a batch of any of these loaders holds, as a list"
    if isinstance(b, (list, tuple)): b = b[0]
    return b.tolist()


def counts(dl):
    "Of each step of the epoch: how many items of this rank count, and how many of all"
    return [o.counts for o in dl._shard.epoch.steps]


def positions(dl):
    "Those of this rank's items in the batches that it has yielded so far"
    epoch = dl._shard.epoch
    return [i for o in epoch.steps[:epoch.n_yielded] for i in o.positions]


def one_process(make, n_epoch=2, read=ids):
    "What one process reads, and the streams it leaves behind"
    seed(); dl = make()
    seed(1); res = [[read(b) for b in dl] for _ in range(n_epoch)]
    return res, CommonRNG.capture().state()


def ranks(make, n, **kw):
    "The sharded loaders of `n` ranks, each with an original and common streams of its own, as in real processes"
    seed(1); state, res = CommonRNG.capture().state(), []
    for r in range(n):
        seed()
        res.append(shard_dl(make(), r, n, common=CommonRNG(state), **kw))
    seed(99 if n > 1 else 1)                   # what ranks draw by themselves must not matter; one alone has one stream
    return res


def same_state(a, b):
    return a['python'] == b['python'] and repr(a['numpy']) == repr(b['numpy']) and torch.equal(a['torch'], b['torch'])


# ---- every kind of loader: name -> function of the batch size
def frame(m): return pd.DataFrame(dict(x=np.arange(m, dtype=np.float32), y=np.arange(m, dtype=np.float32)))
def table(m): return TabularPandas(frame(m), cont_names='x', y_names='y')
def lens(m): return random.Random(m).choices(range(5, 300), k=m)


class Curriculum(DataLoader):
    "Draws from a generator of its own, by a counter of its own"
    def __init__(self, *args, **kw): super().__init__(*args, **kw); self.gen, self.epoch = np.random.default_rng(5), 0
    def get_idxs(self):
        self.epoch += 1
        return np.roll(self.gen.permutation(self.n), self.epoch).tolist()


class EpochSampler(Sampler):
    "Orders by a counter of its own"
    def __init__(self, n): self.n, self.epoch = n, 0
    def __len__(self): return self.n
    def __iter__(self):
        self.epoch += 1
        yield from np.random.default_rng(self.epoch).permutation(self.n).tolist()


class Stream(IterableDataset):
    "Reads in an order that it draws from the global streams"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self):
        for o in torch.randperm(self.n).tolist():
            yield (o + random.randrange(3)) % self.n


class Endless(IterableDataset):
    "Nobody knows how long"
    def __iter__(self): return iter(range(9))


def gen(): return torch.Generator().manual_seed(7)


KINDS = {
    'plain': lambda m, bs, **kw: DataLoader(range(m), bs=bs, **kw),
    'TfmdDL': lambda m, bs, **kw: TfmdDL(range(m), bs=bs, num_workers=0, **kw),
    'SortedDL': lambda m, bs, **kw: SortedDL(range(m), bs=bs, sort_func=lens(m).__getitem__, num_workers=0, **kw),
    'PartialDL': lambda m, bs, **kw: PartialDL(range(m), bs=bs, partial_n=max(1, m*2//3), num_workers=0, **kw),
    'WeightedDL': lambda m, bs, **kw: WeightedDL(range(m), bs=bs, wgts=np.arange(1., m+1), num_workers=0, **kw),
    'TabDataLoader': lambda m, bs, **kw: TabDataLoader(table(m), bs=bs, **kw),
    'TabWeightedDL': lambda m, bs, **kw: TabWeightedDL(table(m), bs=bs, wgts=np.arange(1., m+1), **kw),
    'get_idxs=': lambda m, bs, **kw: DataLoader(range(m), bs=bs, **kw,
                                               get_idxs=lambda: [*range(0, m, 2), *range(1, m, 2)]),
    'Curriculum': lambda m, bs, **kw: Curriculum(range(m), bs=bs, **kw),
    'torch': lambda m, bs, **kw: TorchLoader(range(m), batch_size=bs, **kw),
    'torch generator': lambda m, bs, **kw: TorchLoader(range(m), batch_size=bs, generator=gen(), **kw),
    'torch weighted': lambda m, bs, drop_last=False, shuffle=None: TorchLoader(
        range(m), batch_size=bs, drop_last=drop_last, sampler=WeightedRandomSampler(np.arange(1., m+1), m)),
    'torch subset': lambda m, bs, drop_last=False, shuffle=None: TorchLoader(
        range(m), batch_size=bs, drop_last=drop_last, sampler=SubsetRandomSampler(range(0, m, 2), generator=gen())),
    'torch counter': lambda m, bs, drop_last=False, shuffle=None: TorchLoader(
        range(m), batch_size=bs, drop_last=drop_last, sampler=EpochSampler(m)),
    'torch BatchSampler': lambda m, bs, drop_last=False, shuffle=None: TorchLoader(
        range(m), batch_sampler=BatchSampler(EpochSampler(m), bs, drop_last)),
}
sizes = [(1, 2, 2), (2, 1, 3), (7, 2, 2), (10, 1, 3), (21, 4, 2), (24, 3, 4), (31, 5, 3)]     # items, batch, ranks


@pytest.mark.spread
@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('shuffle', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_training_is_one_process_sharded(kind, shuffle, drop_last):
    for m, b, n in sizes:
        epochs, streams = one_process(lambda: KINDS[kind](m, n*b, shuffle=shuffle, drop_last=drop_last))
        dls = ranks(lambda: KINDS[kind](m, b, shuffle=shuffle, drop_last=drop_last), n)
        for batches in epochs:
            assert {len(o) for o in dls} == {len(batches)}
            for r, dl in enumerate(dls):
                expect = [train_shard(o, r, n) for o in batches]
                got = [ids(o) for o in dl]
                assert got == [e for e, _ in expect]
                assert all(len(o) > 1 for o in got) and len(got) == len(batches)
                assert counts(dl) == [(c, len(o)) for (_, c), o in zip(expect, batches)]
        for dl in dls: assert same_state(dl._shard.common.state(), streams)


@pytest.mark.spread
@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_validation_has_nothing_twice_and_its_order_returns(kind, drop_last):
    for m, b, n in sizes:
        (batches,), _ = one_process(lambda: KINDS[kind](m, b, drop_last=drop_last), 1)
        dls = ranks(lambda: KINDS[kind](m, b, drop_last=drop_last), n, train=False)
        parts = [[ids(o) for o in dl] for dl in dls]
        assert parts == [batches[r::n] for r in range(n)]
        flat = [o for part in parts for b_ in part for o in b_]
        where = [p for o in dls for p in positions(o)]
        assert sorted(zip(where, flat)) == [*enumerate(o for b_ in batches for o in b_)]


@pytest.mark.parametrize('kind', KINDS)
def test_a_global_batch_keeps_its_size(kind):
    m, b, n = 23, 6, 4
    epochs, _ = one_process(lambda: KINDS[kind](m, b))
    dls = ranks(lambda: KINDS[kind](m, b), n, batch='global')
    for batches in epochs:
        assert [[ids(o) for o in dl] for dl in dls] == [[train_shard(o, r, n)[0] for o in batches] for r in range(n)]


@pytest.mark.parametrize('shuffle', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_one_rank_is_the_loader_itself_to_the_bit(kind, shuffle):
    epochs, streams = one_process(lambda: KINDS[kind](11, 3, shuffle=shuffle))
    seed(); dl = shard_dl(KINDS[kind](11, 3, shuffle=shuffle), 0, 1)
    seed(1); common = CommonRNG.capture(); seed(5); seed_rank(0, 1, common)
    for batches in epochs:
        assert [ids(o) for o in dl] == batches
        assert counts(dl) == [(len(o), len(o)) for o in batches] and positions(dl) == [*range(sum(map(len, batches)))]
    assert same_state(common.state(), streams)


# attributes of a loader itself come back with all others
@pytest.mark.parametrize('kind', sorted({*KINDS} - {'Curriculum'}))
def test_the_notebooks_loader_goes_on_where_one_process_would_be(kind):
    epochs, _ = one_process(lambda: KINDS[kind](13, 4, shuffle=True), 4)
    dls = ranks(lambda: KINDS[kind](13, 2, shuffle=True), 2)
    for _ in range(2):
        for dl in dls: assert [*dl]
    seed(); notebook = KINDS[kind](13, 4, shuffle=True)
    set_dl_state(notebook, pickle.loads(pickle.dumps(dl_state(dls[1]._shard.orig))))
    dls[1]._shard.common.install()
    assert [[ids(o) for o in notebook] for _ in range(2)] == epochs[2:]


class Counts(DataLoader):
    "Counts the batches that it has made"
    made = 0
    def create_batch(self, b):
        self.made += 1
        return super().create_batch(b)


@pytest.mark.parametrize('n', [3, 1])
def test_what_a_loader_counts_comes_back_also_from_a_loop_that_is_left(n):
    dl, = ranks(lambda: Counts(range(12), bs=2, num_workers=0), 2)[:1]
    it = iter(dl)
    for _ in range(n): next(it)
    it.close()
    assert dl.made >= n and dl._shard.orig.made == dl.made


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*KINDS]), st.integers(3, 60), st.integers(1, 9), st.integers(1, 8), st.booleans(),
       st.booleans(), st.booleans())
def test_any_loader_size_and_rank(kind, m, b, n, shuffle, drop_last, whole):
    bs, mode = (b, 'global') if whole else (n*b, 'per_worker')
    kw = dict(shuffle=shuffle, drop_last=drop_last)
    steps = step_sizes(KINDS[kind](m, b, **kw), n, mode)[1]
    (batches,), _ = one_process(lambda: KINDS[kind](m, bs, **kw), 1)
    dls = ranks(lambda: KINDS[kind](m, b, **kw), n, batch=mode)
    assert {steps} == {len(o) for o in dls} == {len(batches)}
    got = [[ids(o) for o in dl] for dl in dls]
    if n == 1: assert got == [batches]
    else: assert got == [[train_shard(o, r, n)[0] for o in batches] for r in range(n)]
    assert [sum(c for c, _ in o) for o in zip(*(counts(o) for o in dls))] == [*map(len, batches)]


# ---- how long an epoch is
class OwnLength(DataLoader):
    "Its length has nothing to do with its batches"
    def __len__(self): return 5


def lm(m, bs, drop_last=False): return LMDataLoader([torch.arange(i, i+9) for i in range(m+4)], bs=bs, seq_len=4)


LENGTHS = KINDS | {
    'LM': lm, 'own __len__': lambda m, bs, **kw: OwnLength(range(m), bs=bs, **kw),
    'torch own batches': lambda m, bs, **kw: TorchLoader(
        range(m), batch_sampler=[[*range(i, min(i+bs, m))] for i in range(0, m, bs)])}


@pytest.mark.spread
@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('mode', ['per_worker', 'global'])
@pytest.mark.parametrize('kind', LENGTHS)
def test_the_length_is_that_of_the_sharded_loader(kind, mode, drop_last):
    for m, b, n in [*sizes, (5, 8, 2), (12, 4, 1), (16, 4, 4)]:
        def make(): return LENGTHS[kind](m, b, drop_last=drop_last)
        assert {len(shard_dl(make(), r, n, mode)) for r in range(n)} == {step_sizes(make(), n, mode)[1]}


@pytest.mark.parametrize('kind', LENGTHS)
def test_no_loader_is_read_for_its_length(kind, monkeypatch):
    def no(*args, **kwargs): raise AssertionError('a loader was read')
    dl = LENGTHS[kind](24, 4)
    for cls in DataLoader, TorchLoader, type(dl):
        if hasattr(cls, '__iter__'): monkeypatch.setattr(cls, '__iter__', no)
    before = CommonRNG.capture().state()
    # `__iter__` is ours now, which would be a reason to refuse
    monkeypatch.setattr(loaders, '_is_own', lambda dl, k: False)
    monkeypatch.setattr(torch_loader, '_is_plain', lambda cls: True)
    assert step_sizes(dl, 2)[1] > 0
    check_dl(dl, 2)
    assert same_state(CommonRNG.capture().state(), before)


# ---- text
def texts(m=30): return [torch.arange(i*1000, i*1000+k) for i, k in enumerate(lens(m))]


@pytest.mark.parametrize('shuffle', [False, True])
@pytest.mark.parametrize('n', [2, 3, 4])
def test_a_language_models_streams_stay_with_their_rank(n, shuffle):
    def make(bs): return LMDataLoader(texts(), bs=bs, seq_len=11, shuffle=shuffle)
    epochs, _ = one_process(lambda: make(n*2), read=lambda b: [o.tolist() for o in b])
    dls = ranks(lambda: make(2), n)
    for batches in epochs:
        for r, dl in enumerate(dls):
            got = [[o.tolist() for o in b] for b in dl]
            assert len(dl) == len(batches) and got == [[shard_batch(o, r, n) for o in b] for b in batches]
            for (_, y), (x, _) in zip(got, got[1:]):               # the next batch goes on where this one's targets end
                assert [o[-1] for o in y] == [o[0] for o in x]
            assert counts(dl) == [(2, 2*n)]*len(batches)
    assert dls[0]._shard.orig.bs == 2 and dls[0].bs == 2*n
    if shuffle: assert epochs[0] != epochs[1]


@pytest.mark.parametrize('name, v', dict(bs=2, seq_len=5, n=40).items())
def test_a_language_models_loader_that_was_changed_afterwards_is_that_of_one_process(name, v):
    "Its text stays divided as it was: a smaller batch has other rows"
    def make():
        dl = LMDataLoader(texts(), bs=4, seq_len=11, shuffle=True)
        setattr(dl, name, v)
        return dl
    epochs, _ = one_process(make, read=lambda b: [o.tolist() for o in b])
    dls = ranks(make, 2, batch='global')
    for batches in epochs:
        for dl in dls: assert [[o.tolist() for o in b] for b in dl] == batches      # one rank in turn counts


def test_padding_is_of_the_ranks_own_batch():
    data = [(o, 0) for o in texts()]
    def make(bs): return SortedDL(data, bs=bs, before_batch=pad_input, shuffle=True, num_workers=0)
    batches = [*zip(*ranks(lambda: make(4), 2), strict=True)]
    assert len(batches) == 4
    for (x, _), (y, _) in batches:
        for b in x, y: assert (b[:, -1] != 1).any()
        assert abs(x.shape[1]-y.shape[1]) < 60


# ---- items that are skipped, or built with chance
def skipping(gone):
    def f(o):
        if o in gone: raise SkipItemException
        return o
    return f


@pytest.mark.holds('Limits', "A skipped item (`SkipItemException`) ends the fit with an error that names it")
@pytest.mark.parametrize('train', [True, False])
def test_a_skipped_item_is_refused(train):
    def make(): return DataLoader(range(12), bs=2, after_item=skipping({3, 4, 6}))
    for dl in ranks(make, 2, train=train):
        with pytest.raises(CantShard, match='was skipped'): [*dl]


def leave_out(b): return [o for o in b if o % 4]
def double(b): return [o for i in b for o in (i, i+100)]


def test_a_before_batch_may_leave_items_out_or_double_them():
    dls = ranks(lambda: DataLoader(range(16), bs=4, before_batch=leave_out), 2)
    assert [len(b) for b in dls[0]] == [2, 2]       # the losses are weighted by the targets that are left
    dls = ranks(lambda: DataLoader(range(7), bs=2, before_batch=double), 2)
    assert [[ids(o) for o in dl] for dl in dls] == [[[0, 100, 2, 102], [4, 104, 6, 106]],
                                                   [[1, 101, 3, 103], [5, 105, 5, 105]]]
    assert [counts(o) for o in dls] == [[(2, 4), (2, 3)], [(2, 4), (1, 3)]]


@pytest.mark.parametrize('batch,expect', [('per_worker', [2, 4, 8]), ('global', [2, 4, 8])])
def test_a_batch_size_that_is_changed_between_epochs(batch, expect):
    def make(): return DataLoader(range(19), bs=2, shuffle=True)
    n, dls = (2 if batch == 'per_worker' else 1), ranks(make, 2, batch=batch)
    seed(); one = make(); one.bs *= n
    seed(1)
    for bs in expect:
        batches = [ids(o) for o in one]
        assert {len(dl) for dl in dls} == {len(batches)}
        assert [[ids(o) for o in dl] for dl in dls] == [[train_shard(b, r, 2)[0] for b in batches] for r in range(2)]
        for dl in (one, *dls): dl.bs *= 2
        assert {dl._shard.orig.bs for dl in dls} == {bs*2}


def test_ranks_draw_augmentation_of_their_own_and_reproduce():
    def make(): return DataLoader(range(8), bs=4, shuffle=True, after_item=lambda o: (o, torch.rand(1).item()))
    def run(r, s):
        seed(s); common = CommonRNG.capture()
        seed(0); dl = shard_dl(make(), r, 2, common=common)
        seed_rank(r, 2, common)
        return [*next(iter(dl))[1].tolist()]
    assert run(0, 1) == run(0, 1)
    assert len({*run(0, 1), *run(1, 1), *run(0, 2)}) == 12


# ---- DataLoader workers
class Noisy(Dataset):
    "The item, and a number by chance, in whichever process it is built"
    def __len__(self): return 22
    def __getitem__(self, i): return i, torch.rand(1).item()


@pytest.fixture
def workers():
    "torch watches over its workers with a signal handler that stays"
    before = signal.getsignal(signal.SIGCHLD)
    yield
    gc.collect()
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize('kind', ['fastai', 'torch', 'persistent'])
def test_worker_processes_build_what_the_rank_needs(kind, workers, monkeypatch):
    monkeypatch.setattr(sharded, 'visible_cores', lambda: 4)
    def make(bs, k):
        if kind == 'fastai': return DataLoader(Noisy(), bs=bs, shuffle=True, num_workers=k)
        return TorchLoader(Noisy(), batch_size=bs, shuffle=True, num_workers=k, persistent_workers=kind == 'persistent')
    epochs, streams = one_process(lambda: make(8, 2))
    dls, noise = ranks(lambda: make(4, 4), 2), set()
    assert [(o._shard.inner_loader if kind != 'fastai' else o.fake_l).num_workers for o in dls] == [2, 2]
    for epoch, batches in enumerate(epochs):
        for r, dl in enumerate(dls):
            torch.manual_seed(100+10*epoch+r)          # a rank's own streams differ, as after `seed_rank`
            got = [*dl]
            assert [ids(o) for o in got] == [train_shard(o, r, 2)[0] for o in batches]
            assert counts(dl) == [(4, 8), (4, 8), (3, 6)]
            noise |= {o for _, v in got for o in v.tolist()}
    assert len(noise) == 44
    for dl in dls: assert same_state(dl._shard.common.state(), streams)
    del dl, dls                                        # and with them the workers that persist


def test_worker_processes_tell_what_was_skipped(workers):
    with pytest.raises(CantShard, match='was skipped'):
        [*ranks(lambda: DataLoader(range(12), bs=2, after_item=skipping({3}), num_workers=2), 2)[1]]


# ---- nothing of the user's is lost
def test_a_torch_loader_keeps_what_the_user_gave_it(workers):
    class Mine(TorchLoader):
        flavour = 'mine'
    dl = Mine(Noisy(), batch_size=2, collate_fn=lambda items: [i for i, _ in items], timeout=7, num_workers=3,
              prefetch_factor=5, worker_init_fn=seed, multiprocessing_context='fork')
    res = shard_dl(dl, 1, 2)
    assert isinstance(res, Mine) and res.flavour == 'mine' and type(res).__name__ == 'ShardedMine'
    for o in 'dataset', 'collate_fn', 'timeout', 'prefetch_factor', 'multiprocessing_context':
        assert getattr(res, o) == getattr(dl, o) == getattr(res._shard.inner_loader, o)
    assert res._shard.inner_loader.worker_init_fn.args == (seed,)
    assert next(iter(res)) == [1, 3] and dl._iterator is None and not is_sharded(dl)


def test_whole_batches_of_a_batch_sampler():
    own = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    def make(): return TorchLoader(range(11), batch_sampler=own)
    dls = ranks(make, 2)
    assert [[ids(o) for o in dl] for dl in dls] == [[[0, 1, 2], [4, 5], [10, 10]], [[3, 3], [6, 7, 8, 9], [10, 10]]]
    assert [counts(o) for o in dls] == [[(3, 4), (2, 6), (1, 1)], [(1, 4), (4, 6), (0, 1)]]
    assert {len(o) for o in dls} == {3} and step_sizes(make(), 2) == (None, 3)
    valid = ranks(make, 2, train=False)
    assert [[ids(o) for o in dl] for dl in valid] == [[[0, 1, 2], [4, 5], [10]], [[3], [6, 7, 8, 9]]]
    assert [positions(o) for o in valid] == [[0, 1, 2, 4, 5, 10], [3, 6, 7, 8, 9]]
    assert {len(o) for o in ranks(make, 2, batch='global')} == {5}


@pytest.mark.parametrize('make', [
    lambda: DataLoader(range(11), bs=2), lambda: TorchLoader(range(11), batch_size=2),
    lambda: TorchLoader(range(11), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]),
    lambda: [torch.arange(2)]*5])
def test_in_a_validation_the_length_is_that_of_one_process(make):
    "A rank's batches have the numbers that they have there, and a progress bar counts them up to the length"
    for r in range(2): assert len(shard_dl(make(), r, 2, train=False)) == len(make())


@pytest.mark.parametrize('make', [lambda: TorchLoader(range(11), batch_size=2), lambda: [torch.arange(2)]*5])
def test_in_a_validation_of_fastai_1_the_length_is_that_of_the_rank(make):
    "There a progress bar counts its own batches"
    for r in range(2):
        dl = shard_dl(make(), r, 2, train=False)
        dl._shard.has_all_numbers = False
        assert len(dl) == len([*dl])


def test_a_class_of_the_users_is_freed():
    "A worker that stays for many fits gets a new class from each run of a cell"
    class Mine(DataLoader): pass
    dls = ranks(lambda: Mine(range(6), bs=2), 2)
    assert type(dls[0]) is type(dls[1])
    kept = weakref.ref(Mine)
    del Mine, dls
    gc.collect()
    assert kept() is None


def test_the_original_is_left_as_one_epoch_leaves_it():
    dl = LMDataLoader(texts(), bs=3, seq_len=11, shuffle=True)
    before = {k: v for k, v in vars(dl).items() if k not in ('rng', 'chunks')}
    res = shard_dl(dl, 0, 2)
    [*res]
    assert {k: vars(dl)[k] for k in before} == before and set(vars(dl)) == {*before, 'rng', 'chunks'}
    assert type(dl) is LMDataLoader
    assert dl.rng is res.rng and dl.chunks is res.chunks and dl.fake_l.d is dl


def test_new_makes_a_plain_loader():
    dl = shard_dl(WeightedDL(range(9), bs=2, num_workers=0), 0, 2)
    assert type(dl.new(bs=3)) is WeightedDL and dl.new(bs=3).bs == 3


def test_a_sharded_loader_is_sharded_from_its_original():
    dl = TfmdDL(range(9), bs=2, num_workers=0)
    again = shard_dl(shard_dl(dl, 0, 2), 1, 2, train=False)
    assert again._shard.orig is dl and [ids(o) for o in again] == [[2, 3], [6, 7]]
    assert shard_dl(shard_dl(dl, 0, 1), 0, 1)._shard.orig is dl


def test_a_sharded_loader_can_be_pickled():
    dl = pickle.loads(pickle.dumps(shard_dl(TfmdDL([*range(9)], bs=2, num_workers=0), 1, 2, train=False)))
    assert is_sharded(dl) and isinstance(dl, TfmdDL) and [ids(o) for o in dl] == [[2, 3], [6, 7]]


def test_an_epoch_left_early():
    dls = ranks(lambda: DataLoader(range(20), bs=2, shuffle=True), 2)
    epochs, _ = one_process(lambda: DataLoader(range(20), bs=4, shuffle=True))
    for r, dl in enumerate(dls):
        for i, b in enumerate(dl):
            if i == 1: break
        assert len(positions(dl)) == 4 and dl._shard.orig.rng is dl.rng
        assert [ids(o) for o in dl] == [shard_batch(o, r, 2) for o in epochs[1]]


@pytest.mark.parametrize('kind', ['TfmdDL', 'torch'])
def test_another_iteration_in_the_middle_of_one(kind):
    "As a callback's `one_batch` during an epoch"
    (batches, _), _ = one_process(lambda: KINDS[kind](21, 6))
    dl, got = ranks(lambda: KINDS[kind](21, 3), 2)[1], []
    for i, b in enumerate(dl):
        got.append(ids(b))
        if i in (1, 3): next(iter(dl))
        assert counts(dl)[i] == ((3, 6) if i < 3 else (1, 3)) and len(positions(dl)) == min(10, 3*i+3)
    assert got == [train_shard(o, 1, 2)[0] for o in batches]
    assert counts(dl) == [(3, 6)]*3+[(1, 3)] and positions(dl) == [*range(1, 21, 2)]


def test_sharded_for_training_or_for_validation():
    dl = DataLoader(range(9), bs=2)
    train, valid, one = shard_dl(dl, 0, 2), shard_dl(dl, 0, 2, train=False), shard_dl(dl, 0, 1)
    for res in train, valid, one: assert is_sharded(res)


def test_what_a_callback_changes_reaches_the_original_and_the_next_epoch():
    dl = WeightedDL(range(9), bs=2, num_workers=0, shuffle=True)
    res = shard_dl(dl, 0, 2)
    [*res]
    res.wgts = np.eye(9)[4]
    assert {i for b in res for i in ids(b)} == {4} and dl.wgts is res.wgts


# ---- refusals
class OwnBatches(DataLoader):
    def create_batches(self, samps): yield from ()


class Wrapper:
    "Goes over a loader in an attribute"
    def __init__(self, dl): self.dl = dl
    def __iter__(self): return iter(self.dl)


@pytest.mark.parametrize('make', [
    lambda: TorchLoader(range(9), sampler=DistributedSampler(range(9), 2, 0)),
    lambda: TorchLoader(range(9), batch_sampler=BatchSampler(DistributedSampler(range(9), 2, 0), 2, False))])
def test_refusals_say_what_to_do(make):
    with pytest.raises(CantShard, match='Leave it out'): check_dl(make(), 2, name='learn.dls.train')
    with pytest.raises(ValueError, match='Leave it out'): shard_dl(make(), 0, 2)
    check_dl(make(), 1)


# ---- loaders that every rank reads
class Pairs(DataLoader):
    def create_batches(self, samps):
        for a in self.get_idxs()[::2]: yield torch.tensor([a, a+1])


class SideBySide:
    "Two loaders, for a model with two kinds of inputs"
    def __init__(self, *dls): self.dls = dls
    def __iter__(self): return zip(*self.dls)
    def __len__(self): return len(self.dls[0])


class Sized(Stream):
    def __len__(self): return 9


class Split(IterableDataset):
    "Each of its loader's processes yields a part, and takes that of its rank where it finds one"
    def __len__(self): return 8
    def __iter__(self):
        import os
        rank, n = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1)))
        dist = torch.distributed
        if dist.is_initialized(): rank, n = dist.get_rank(), dist.get_world_size()
        info = torch.utils.data.get_worker_info()
        w, nw = (info.id, info.num_workers) if info else (0, 1)
        yield from range(w+nw*rank, 8, nw*n)


WHOLE = {
    'own create_batches': lambda: Pairs(range(8), bs=2, num_workers=0),
    'own iterable': lambda: Wrapper(DataLoader(range(9), bs=2, shuffle=True)),
    'side by side': lambda: SideBySide(*(DataLoader(range(a, a+9), bs=2, shuffle=True) for a in (0, 10))),
    'list of batches': lambda: [torch.tensor([i, i+10]) for i in range(5)],
    'no indices': lambda: DataLoader(Sized(9), bs=2),
    'stream': lambda: TorchLoader(Sized(9), batch_size=2),
    'stream in processes': lambda: TorchLoader(Sized(9), batch_size=2, num_workers=2),
    'shards itself': lambda: TorchLoader(Split(), batch_size=2, num_workers=2),
    'skips items': lambda: reads_whole(DataLoader(range(12), bs=2, after_item=skipping({3, 4, 6}), shuffle=True))}


def reads_whole(dl):
    dl.reads_whole = True
    return dl


def flat(b): return [int(o) for t in (b if isinstance(b, (tuple, list)) else [b]) for o in torch.as_tensor(t).flatten()]


@pytest.mark.holds('Batches', "A loader that can't be divided by items (several loaders side by side, its own "
                   "`__iter__` or `create_batches`, a list of batches, a stream with processes, a stream that shards "
                   "itself): every worker reads all of it, and they take whole batches in turn")
@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('name', WHOLE)
def test_what_cant_be_divided_by_items_is_read_by_every_rank(name, n, monkeypatch):
    "Its batches are those of one process, dealt out in turn; in training the last round may lack some"
    monkeypatch.setenv('RANK', '1')
    batches = [[0, 2], [1, 3], [4, 6], [5, 7]]
    if name != 'shards itself': (batches,), _ = one_process(WHOLE[name], 1, flat)
    for train in True, False:
        dls = ranks(WHOLE[name], n, train=train)
        got = [[flat(b) for b in dl] for dl in dls]
        own = [[count for count, _ in counts(dl)] for dl in dls]
        if train: assert len({*map(len, got)}) == 1
        # of a batch of one item, which is fed twice, one counts
        kept = [[b[::2] if train and count == 1 else b for b, count in zip(bs, cs) if count]
                for bs, cs in zip(got, own)]
        assert [kept[i % n][i//n] for i in range(len(batches))] == batches
        assert sum(map(sum, own)) == sum(len(positions(dl)) for dl in dls)


@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('own', ['create_batches', 'create_batch'])
def test_whole_batches_drop_the_last_round_as_their_loader_does(n, own):
    "In one process with the global batch size, these items wouldn't fill a batch"
    class Own(DataLoader): pass
    setattr(Own, own, lambda self, *args: getattr(DataLoader, own)(self, *args))
    def make(bs, drop_last=True): return Own(range(10), bs=bs, num_workers=0, drop_last=drop_last)
    steps = len([*make(2*n)])
    for dl in ranks(lambda: make(2), n): assert len(dl) == len([*dl]) == steps
    for dl in ranks(lambda: make(2, False), n): assert len(dl) == len([*dl]) == -(-5//n)


class Graphs:
    "A batch whose tensors have a row for each node"
    def __init__(self, sizes): self.x, self.of = torch.rand(sum(sizes), 2), torch.arange(len(sizes)).repeat_interleave(
        torch.tensor(sizes))


class GraphLoader:
    "Five batches of graphs, the last one of one graph"
    dataset = range(9)
    def __len__(self): return 5
    def __iter__(self):
        for i in range(5): yield Graphs([3, 4][:2-i//4]), torch.arange(2-i//4)


def test_a_batch_that_cannot_be_cut_stays_whole():
    "A rank without a batch in the last round is fed that of another one, as one without enough items"
    dls = ranks(GraphLoader, 2)
    got = [[*dl] for dl in dls]
    assert [[count for count, _ in counts(dl)] for dl in dls] == [[2, 2, 1], [2, 2, 0]]
    for b, y in got[0]+got[1]: assert len(b.of) == len(b.x) == (7 if len(y) == 2 else 3) and b.of.max() == len(y)-1


@pytest.mark.parametrize('name', ['own iterable', 'side by side', 'skips items'])
def test_the_rows_of_a_batch_are_dealt_out_where_it_is_the_global_one(name):
    (batches,), _ = one_process(WHOLE[name], 1, flat)
    dls = ranks(WHOLE[name], 2, batch='global')
    got = [[flat(b) for b in dl] for dl in dls]
    for k, b in enumerate(batches):
        (n0, total), (n1, _) = counts(dls[0])[k], counts(dls[1])[k]
        assert n0+n1 == total and {*got[0][k]} | {*got[1][k]} == {*b}


def test_a_distributed_sampler_for_one_is_harmless():
    sampler = DistributedSampler(range(6), 1, 0, shuffle=False)
    dls = ranks(lambda: TorchLoader(range(6), batch_size=1, sampler=sampler), 2)
    assert [[ids(o) for o in dl] for dl in dls] == [[[0, 0], [2, 2], [4, 4]], [[1, 1], [3, 3], [5, 5]]]


@pytest.mark.parametrize('make, why', [
    (lambda: DataLoader([], bs=2), 'no full batch of 6'),
    (lambda: DataLoader(range(5), bs=2, drop_last=True), 'no full batch of 6'),
    (lambda: TorchLoader(Endless(), batch_size=2), 'no length')])
def test_training_data_that_leaves_workers_idle(make, why):
    with pytest.raises(CantShard, match=why): check_dl(make(), 3)
    if why != 'no length': check_dl(make(), 3, train=False)


def test_fewer_items_than_workers():
    dls = ranks(lambda: DataLoader(range(2), bs=2), 3)
    assert [[ids(o) for o in dl] for dl in dls] == [[[0, 0]], [[1, 1]], [[0, 1]]]
    assert counts(dls[2]) == [(0, 2)]
    check_dl(DataLoader(range(2), bs=2), 3)


def test_a_batch_smaller_than_the_ranks_leaves_some_without_items():
    check_dl(DataLoader(range(9), bs=2), 3, 'global')
    dls = ranks(lambda: DataLoader(range(4), bs=2), 3, batch='global')
    assert [[o for o, _ in counts(dl)] for dl in dls if [*dl]] == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(ValueError, match="use 'per_worker' or"): check_dl(DataLoader(range(9), bs=2), 3, 'local')
