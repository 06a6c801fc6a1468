"""After a distributed fit the notebook has what a local fit would have left, in every corner; and nothing else."""
import os, signal
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.learner import Learner, Metric
from fastai.metrics import F1Score
from torch import nn
from fastddp.all import *
from traces import PASSING, children, environment, memfds
from learners import make_learner, mlp, seed_all
from parity import learner, warm

pytestmark = pytest.mark.timeout(120)


def test_nothing_else_changes():
    learn = make_learner()
    def others():
        return environment(), signal.getsignal(signal.SIGINT), torch.distributed.is_initialized(), learn.logger
    env, *before = others()
    learn.distrib_fit_one_cycle(1, nprocs=2)
    now, *after = others()
    assert now == {k: v for k, v in env.items() if k not in PASSING} and before == after


class Boom(Callback):
    "Fails in the second epoch, or at once, on one of two workers"
    def __init__(self, epoch): self.at = epoch
    def before_batch(self):
        is_here = os.environ.get('RANK', '1') == '1'
        if is_here and self.epoch == self.at and self.training and self.iter == 1: raise ValueError('boom')


def test_a_failure_keeps_the_last_complete_epoch():
    learn, ref = make_learner(cbs=Boom(1)), make_learner()
    with pytest.raises(RankRaised, match='boom') as e: learn.distrib_fit(3, 0.01, nprocs=2)
    assert isinstance(e.value.__cause__, ValueError) and 'end of epoch 0' in str(e.value)
    ref.distrib_fit(1, 0.01, nprocs=2)
    for a, b in zip(learn.model.parameters(), ref.model.parameters(), strict=True): assert torch.equal(a, b)
    assert len(learn.recorder.values) == 1 and not torch.distributed.is_initialized()


class Heavy(nn.Module):
    "Carries 80 MB of frozen weights along, enough for memory to be reserved for states"
    def __init__(self):
        super().__init__()
        self.small, self.big = mlp(), nn.Parameter(torch.rand(20_000_000), requires_grad=False)
    def forward(self, x): return self.small(x)


class Marks(Callback):
    "Writes the number of the step into the frozen weights, in the notebook's process too"
    order = 100
    def after_batch(self):
        if self.training: self.learn.model.big.data[::1_000_000] = self.learn.train_iter


def test_large_states_come_back_whole():
    learn = make_learner(model=Heavy, cbs=[Marks(), Boom(5)], bs=64)
    start, before = learn.model.big.clone(), memfds()
    steps = len(learn.dls.train)
    def check(n_steps):
        want = start.clone()
        if n_steps: want[::1_000_000] = n_steps
        assert torch.equal(learn.model.big, want)
    with learn.distrib_ctx(nprocs=2, batch='global'):
        for n in (1, 3, 2):
            learn.fit(n, 0.01)
            check(n*steps)
        blocks = {os.stat(o.split()[0]).st_ino for o in memfds()-before}      # a mapping keeps a descriptor of its own
        assert len(blocks) <= 1+2+2, 'data, results of two ranks, the newest state of either kind'
        learn.boom.at = 2
        with pytest.raises(RankRaised, match='end of epoch 1'): learn.fit(4, 0.01)
        check(2*steps)
        learn.boom.at = 0
        with pytest.raises(RankRaised, match='learn is unchanged'): learn.fit(1, 0.01)
        check(2*steps)
        learn.boom.at = None
        learn.fit(1, 0.01)
        check(steps)


def test_a_failure_in_the_first_epoch_changes_nothing():
    learn = make_learner(cbs=Boom(0))
    weights, attrs, cbs = [p.clone() for p in learn.model.parameters()], dict(vars(learn)), list(learn.cbs)
    with pytest.raises(RankRaised, match='learn is unchanged'): learn.distrib_fit(1, 0.01, nprocs=2)
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), weights))
    assert list(learn.cbs) == cbs and learn.opt is None and vars(learn).keys() == attrs.keys()
    learn.remove_cb(learn.boom)
    learn.distrib_fit(1, 0.01, nprocs=2)
    assert not all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), weights))


def test_what_changes_between_two_fits_of_a_block_is_what_trains():
    learn, others = make_learner(), children()
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1, 0.01)
        workers = children()-others
        with torch.no_grad(): learn.model[0].weight.zero_()
        learn.model[0].weight.requires_grad_(False)
        learn.model[0].weight.grad = None       # with zeros, fastai's Adam moves it on
        learn.fit(1, 0.01)
        assert len(workers) == 2 and children()-others == workers, 'the workers stay'
    assert not learn.model[0].weight.any() and not learn.model[0].weight.requires_grad


def test_fits_that_others_patched_in():
    from fastai.learner import Learner
    def fit_twice(self, n, lr): self.fit(n, lr); self.fit(n, lr/2)
    Learner.fit_twice = fit_twice
    try:
        learn = make_learner()
        learn.distrib('fit_twice', 1, 0.01, nprocs=2)
        assert learn.opt.hypers[0]['lr'] == 0.005
    finally: del Learner.fit_twice


@pytest.mark.parametrize('name,args', [('fit_flat_cos', (1,)), ('fit_sgdr', (1, 1)), ('fine_tune', (1,))])
def test_the_other_words(name, args):
    learn = make_learner(splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    start = [p.clone() for p in learn.model.parameters()]
    getattr(learn, f'distrib_{name}')(*args, nprocs=2)
    now = list(learn.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(start, now)) and all(p.requires_grad for p in now)


def test_signatures_show_both_the_methods_and_our_options():
    import inspect
    from fastai.learner import Learner
    names = list(inspect.signature(Learner.distrib_fit_one_cycle).parameters)
    assert names[:4] == ['self', 'n_epoch', 'lr_max', 'div'] and {'nprocs', 'gpus', 'sync_bn', 'see'} <= set(names)


def test_one_rank_in_this_process_is_plain_fastai_to_the_bit():
    def net(): return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    a, b = make_learner(model=net), make_learner(model=net)
    seed_all(3)
    a.distrib_fit_one_cycle(2, launcher=InProcess())
    after_a = torch.rand(1)
    seed_all(3)
    b.fit_one_cycle(2)
    after_b = torch.rand(1)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert a.recorder.losses == b.recorder.losses and a.recorder.values == b.recorder.values and after_a == after_b


def test_factories_make_what_cannot_travel():
    def net():
        m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        m.handle = open(os.devnull)
        return m
    learn, plain = make_learner(model=net), make_learner()
    learn.distrib_fit(1, 0.01, nprocs=2, model_factory=net)
    plain.distrib_fit(1, 0.01, nprocs=2)
    for a, b in zip(learn.model.parameters(), plain.model.parameters(), strict=True): assert torch.equal(a, b)
    learn.model.handle.close()


def test_save_model_callback_writes_one_file(tmp_path):
    learn = make_learner(path=tmp_path, cbs=SaveModelCallback(fname='best'))
    learn.distrib_fit(2, 0.01, nprocs=2)
    saved = torch.load(tmp_path/'models'/'best.pth')
    assert [f.name for f in (tmp_path/'models').iterdir()] == ['best.pth']
    assert all(torch.equal(saved[k], v) for k, v in learn.model.state_dict().items())


class Says(Callback):
    def after_epoch(self): print(f'epoch {self.epoch} is over')


def test_see_all_ranks(capsys):
    "Rank 0 as it is, the others with a prefix; without `see`, rank 0 alone"
    for see, said in (('all', 1), ((0,), 0)):
        make_learner(n=64, cbs=[Says()]).distrib_fit(1, nprocs=2, see=see)
        out = capsys.readouterr().out
        assert out.count('[rank 1] epoch 0 is over\n') == said and out.count('epoch 0 is over') == said+1


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


class Holds(nn.Module):
    "A layer that can't travel"
    def __init__(self):
        super().__init__()
        self.layer, self.file = nn.Linear(3, 3), open('/dev/null')
    def forward(self, x): return self.layer(x)


class GrowsBadly(Callback):
    def before_fit(self):
        self.model[0].told = 'something'
        self.model.append(Holds())
        self.learn.create_opt()


def test_a_model_that_grows_by_what_cannot_travel_does_not_cost_the_training(two, tmp_path):
    learn = learner()
    learn.path = tmp_path
    learn.fit(1)
    before, model = [p.clone() for p in learn.model.parameters()], learn.model
    with pytest.warns(UserWarning, match="can't be sent"), pytest.raises(CantDistribute, match='All weights of'):
        learn.distrib_fit(2, nprocs=2, launcher=two, cbs=GrowsBadly())
    assert learn.model is model and len(model) == 3 and model[0].told == 'something' and len(learn.recorder.values) == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    saved = torch.load(tmp_path/'models'/'distrib-weights.pth')
    assert {'3.layer.weight', '3.layer.bias'} < {*saved} and torch.equal(saved['0.weight'], model[0].weight)
    learn.opt = None
    learn.fit(1)


class Matrix(Metric):
    "Counts by class, and collects more than a megabyte"
    name = 'matrix'
    def reset(self): self.counts, self.all = torch.zeros(3, 3), []
    def accumulate(self, learn):
        for y, out in zip(learn.y, learn.pred): self.counts[y, out.argmax()] += 1
        self.all.append(torch.zeros(2**18+1))
    @property
    def value(self): return self.counts.trace()/self.counts.sum()


def test_what_a_metric_has_counted_comes_back(two):
    learn = learner(metrics=[Matrix(), F1Score(average='macro')])
    learn.distrib_fit(2, nprocs=2, launcher=two)
    matrix, f1 = learn.metrics
    assert matrix.counts.sum() == 21 and [float(m.value) for m in (matrix, f1)] == learn.recorder.values[-1][2:]
    assert len(matrix.all) == len(learn.dls.valid)
    matrix.counts = None
    learn.distrib_validate(nprocs=2, launcher=two)
    assert matrix.counts.sum() == 21
    assert float(learn.recorder.loss.value) == pytest.approx(learn.recorder.values[-1][0])


@pytest.mark.parametrize('names_self', [True, False])
def test_a_fit_that_a_cell_wraps(monkeypatch, names_self):
    "It takes `*args`, from which fastai's own names can't be read"
    plain, called = Learner.fit, []
    def fit(*args, **kwargs):
        called.append(args)
        return plain(*args, **kwargs)
    def method(self, *args, **kwargs): return fit(self, *args, **kwargs)
    monkeypatch.setattr(Learner, 'fit', method if names_self else fit)
    learn = make_learner()
    learn.distrib_fit(2, .1, launcher=InProcess())
    assert len(learn.recorder.values) == 2 and learn.recorder.lrs[-1] == .1
