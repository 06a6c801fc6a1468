"Whole fits with data and learners that lessons don't have: one process's answer, or an error that names the reason."
import os, signal, warnings
from types import SimpleNamespace
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.rnn import ModelResetter
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, get_worker_info
from fastddp.all import CantDistribute, RankRaised
from fastddp.base import group
from fastddp.launch.engine import Job
from fastddp.launch.local import Local
from fastddp.launch.options import engine_for
from fastddp.payload.pairs import read_settings, take_settings
from cases.data import Balanced, over, streams, table
from faults import OneFault
from parity import Warm, assert_same, fit_both, items, learner, seed, values, warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture
def brittle():
    "A launcher for fits that fail"
    launcher = Warm()
    yield launcher
    launcher.end()


# ---- what ends a rank's loader early

class Killed:
    "Items of which one kills the loader's process that makes it"
    def __init__(self, data, bad): self.data, self.bad = data, bad
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        if i == self.bad and get_worker_info(): os.kill(os.getpid(), signal.SIGKILL)
        return self.data[i]


def no_pickle(b): return torch.stack([x for x, _ in b]), torch.stack([y for _, y in b]), lambda: 'no pickle'
def fastai_dl(ds, **kw): return DataLoader(ds, bs=4, num_workers=2, **kw)
def fastai_lambdas(ds): return fastai_dl(ds, create_batch=no_pickle)
def torch_dl(ds, **kw): return TorchLoader(ds, batch_size=4, num_workers=2, **kw)
def torch_lambdas(ds): return torch_dl(ds, collate_fn=no_pickle)


@pytest.mark.holds('Batches', "A fit never ends with steps missing: what ends a rank's loader early, or a batch that "
                   "a loader's process can't send, is that rank's error at once")
@pytest.mark.parametrize('make,bad,why', [
    (fastai_dl, 9, 'DataLoader worker'), (torch_dl, 9, 'DataLoader worker'),
    (fastai_lambdas, None, "Can't (pickle|get local)"), (torch_lambdas, None, "Can't (pickle|get local)")])
def test_what_ends_a_loader_is_its_ranks_error(make, bad, why, brittle):
    learn = learner(train=24, valid=8)
    learn.dls = DataLoaders(make(Killed(items(24), bad)), learn.dls.valid)
    with pytest.raises(RankRaised, match=why) as caught: learn.distrib_fit(1, nprocs=2, launcher=brittle, timeout=100)
    if bad is not None: assert caught.value.rank == bad % 2


# ---- batches of a batch sampler, and tables

def test_each_worker_takes_a_batch_of_a_batch_sampler(two):
    learn = over(TorchLoader(items(31), batch_sampler=Balanced(31)))
    learn.distrib_fit(1, nprocs=2, launcher=two)
    assert len(learn.recorder.losses) == 3


def test_tables_of_any_batch_size_with_batch_norm(two):
    for bs in 1, 3, 15:
        learn, one = fit_both(table(bs, True), 2, two, 1, .01)
        assert len(learn.recorder.losses) == len(one.recorder.losses) and np.isfinite(values(learn)[-1][0])


# ---- models that keep state from batch to batch

@pytest.mark.full
@pytest.mark.holds('Batches', "A model with a `reset`, over rows that are streams: `batch='global'` is one process, "
                   "and validation keeps the loader's own rows in any case")
@pytest.mark.parametrize('batch', ['per_worker', 'global'])
def test_validation_keeps_the_rows_of_a_model_with_state(batch, two):
    learn = streams()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.distrib_fit(1, nprocs=2, launcher=two, batch=batch)
    assert learn.recorder.values[-1][1] == pytest.approx(learn.validate()[0], abs=1e-6)
    assert [str(w.message) for w in caught if "batch='global'" in str(w.message)][1:] == []
    assert any("batch='global'" in str(w.message) for w in caught) == (batch == 'per_worker')


class FixedRows(nn.Module):
    "The course's: its state has the batch size built in"
    def __init__(self, bs=4):
        super().__init__()
        self.rnn, self.out, self.h = nn.RNN(2, 3, batch_first=True), nn.Linear(3, 3), torch.zeros(1, bs, 3)
    def reset(self): self.h.zero_()
    def forward(self, x):
        res, h = self.rnn(x.view(-1, 2, 2), self.h)
        self.h = h.detach()
        return self.out(res[:, -1])


LOADERS = {'fastai': lambda ds: DataLoader(ds, bs=4, drop_last=True), 'full': lambda ds: DataLoader(ds, bs=4),
           'torch': lambda ds: TorchLoader(ds, batch_size=4, drop_last=True)}


@pytest.mark.holds('Batches', "Such a model whose state has its batch size built in: each worker trains with the "
                   "loader's batch and validates all of the loader's batches")
@pytest.mark.parametrize('kind', LOADERS)
def test_a_state_with_the_batch_size_built_in(kind, two, capsys, monkeypatch):
    "Each worker trains with the loader's batch, and validates the loader's batches"
    monkeypatch.setattr('fastddp.output.replay._printed', set())
    n_valid = 24 if kind == 'full' else 23
    learn = learner(train=48, valid=n_valid, model=FixedRows(), cbs=ModelResetter(), metrics=accuracy)
    learn.dls = DataLoaders(*(LOADERS[kind](dl.dataset) for dl in learn.dls.loaders))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.distrib_fit(2, nprocs=2, launcher=two)
    assert any("batch='global'" in str(w.message) for w in caught)
    assert 'each worker validates all of it' in capsys.readouterr().out
    told = list(learn.recorder.values[-1][1:])
    here = list(learn.validate())
    assert told == pytest.approx(here, abs=1e-6)
    with learn.distrib_ctx(nprocs=2, launcher=two): assert list(learn.validate()) == pytest.approx(here, abs=1e-6)


def test_fastais_loaders_with_persistent_workers(two):
    "They don't persist in fastai, where each epoch has new ones, and in one process the old ones may stay: see torch's"
    def make(persistent):
        learn = learner(train=17)
        train = DataLoader(items(17), bs=4, shuffle=True, num_workers=2, persistent_workers=persistent)
        learn.dls = DataLoaders(train, learn.dls.valid)
        return learn
    learn, one = make(True), make(False)
    seed(1)
    learn.distrib_fit(2, nprocs=2, launcher=two, batch='global')
    seed(1)
    one.fit(2)
    assert_same(learn, one)


class Named(Learner):
    def fit_mine(self, n, timeout=3): self.fit(n+timeout)


def test_a_name_that_a_method_and_the_block_have_is_refused():
    learn = learner(kind=Named)
    with pytest.raises(CantDistribute, match=r'timeout.*with learn.distrib_ctx\(') as e:
        learn.distrib('fit_mine', 1, timeout=7, nprocs=2)
    assert 'fit_mine' in str(e.value)


# ---- an engine of the user's own

def test_an_engine_of_ones_own_runs_with_the_blocks_options():
    defaults = dict(nprocs=None, gpus=None, launcher=None, see=(0,), timeout=1800)
    def found(local, **given):
        with engine_for(defaults | dict(launcher=local) | given, given) as (engine, n, gpus):
            return engine is local, n, gpus, engine.see, engine.timeout
    assert found(Local(idle=600), nprocs=2, gpus=[], see='all', timeout=7) == (True, 2, [], 'all', 7)
    assert found(Local(idle=600, see='all', timeout=9, gpus=[]), nprocs=2) == (True, 2, [], 'all', 9)
    assert found(Local(timeout=9, gpus=[]), nprocs=3, timeout=8)[1:] == (3, [], (0,), 8)
    local = Local(timeout=9)
    found(local, nprocs=2, gpus=[], see='all', timeout=5)
    assert (local.gpus, local.see, local.timeout) == (None, (0,), 9)
    with pytest.raises(CantDistribute, match='gpus'): found(Local(gpus=[]), gpus=[1])


def test_an_open_engine_keeps_its_workers_from_fit_to_fit():
    pids = []
    with Local(idle=600) as local:
        for _ in range(2):
            learner(train=8).distrib_fit(1, nprocs=2, launcher=local)
            pids.append([p.pid for p in local.workers.procs.values()] if local.workers else [])
        assert len(pids[0]) == 2 and pids[0] == pids[1]
    assert local.workers is None


# ---- what the notebook set for its process

class Notes(Callback):
    "What each rank's process has set, and rank 0's numbers"
    def before_fit(self): self.numbers = str(np.full(1, 1/3))
    def after_fit(self):
        own = [torch.get_float32_matmul_precision() == 'high', torch.are_deterministic_algorithms_enabled(),
               torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled(),
               torch.get_default_dtype() == torch.float64]
        self.ranks = [t.tolist() for t in group.all_gather_object(torch.tensor([own], dtype=torch.float64))]


@pytest.mark.holds('Batches', "What the notebook set for its process (precision, determinism, default dtype, number "
                   "formats) holds in the workers")
def test_what_the_notebook_set(two):
    before = read_settings()
    def fit():
        learn = learner(train=8, cbs=Notes())
        learn.distrib_fit(1, nprocs=2, launcher=two)
        return learn
    try:
        np.set_printoptions(precision=2)
        torch.set_float32_matmul_precision('high')
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_cudnn_sdp(False)
        learn = fit()
        assert learn.notes.ranks == [[[1, 1, 1, 0, 0]]]*2
        assert learn.notes.numbers == '[0.33]'
    finally: take_settings(before)
    assert fit().notes.ranks == [[[0, 0, 0, 1, 0]]]*2


def dtype_there(ctx, _): return str(torch.get_default_dtype())


def test_the_default_dtype_of_the_notebook(two):
    "fastai's recorder doesn't train with it, but functions on the workers do"
    def run(): return two.run(Job.of(dtype_there, None), 2).results
    torch.set_default_dtype(torch.float64)
    try: assert run() == ['torch.float64']*2
    finally: torch.set_default_dtype(torch.float32)
    assert run() == ['torch.float32']*2


def torch_loaders(train, valid):
    return DataLoaders(TorchLoader(train.dataset, batch_size=4, shuffle=True),
                       TorchLoader(valid.dataset, batch_size=4), device='cpu')


@pytest.mark.parametrize('file', [None, 'distrib'])
def test_a_fit_with_torch_loaders_continues(file, two, tmp_path):
    def make(epoch):
        fault = OneFault('interrupt', 'before_batch/train', 0, epoch, 1, marker=str(tmp_path/'fired'))
        res = learner(path=tmp_path, cbs=fault)
        res.dls = torch_loaders(*res.dls.loaders)
        return res
    options = dict(nprocs=2, launcher=two, checkpoint='epoch')
    whole, learn = make(9), make(1)
    seed(1)
    whole.distrib_fit(3, **options)
    seed(1)
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(3, **options)
    if file:    # in another kernel
        seed(99)
        learn = make(1)
    dls = learn.dls
    learn.distrib_resume(file)
    assert_same(learn, whole)
    assert learn.dls is dls and len(learn.recorder.values) == 3


def test_loaders_that_are_not_fastais_are_refused():
    learn = learner()
    learn.dls = SimpleNamespace(train=learn.dls.train, valid=learn.dls.valid)
    for wait in True, False:
        with pytest.raises(CantDistribute, match=r'learn.dls = DataLoaders\(learn.dls.train, learn.dls.valid\)'):
            learn.distrib_fit(1, nprocs=2, wait=wait)
    with pytest.raises(CantDistribute, match='has no `loaders`'): learn.distrib_resume()
    with pytest.raises(CantDistribute, match='has no `loaders`'): learn.distrib_check()
