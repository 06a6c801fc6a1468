"Validation and prediction on workers: order, length, dtype and values of one process."
import copy
import numpy as np, pytest, torch
import fastai.callback.hook     # patches summary
from fastai.callback.core import Callback, CancelFitException, CancelValidException, FetchPredsCallback
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.schedule import minimum, slide, steep, valley
from fastai.callback.tracker import SaveModelCallback
from fastai.data.all import Categorize, DataLoaders, Datasets, TfmdDL
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.text.data import SortedDL
from fastcore.foundation import L
from fastai.interpret import ClassificationInterpretation, Interpretation
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, IterableDataset
from fastddp.all import *
from learners import make_learner, points, seed_all
from spread import long_but


def same(a, b, eps=1e-5):
    "Same types, lengths, dtypes, and values up to `eps`"
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, (tuple, list, L)):
        assert len(a) == len(b)
        for i, j in zip(a, b): same(i, j, eps)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a: same(a[k], b[k], eps)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, atol=eps, equal_nan=True), (a, b)
    else: assert a == b or a == pytest.approx(b, abs=eps)


@pytest.fixture
def nothing_started(monkeypatch):
    "Fails when a job is run"
    def run(*args, **kwargs): raise AssertionError('a job was started')
    monkeypatch.setattr(Local, 'run', run)


class Run:
    "Counts the jobs that are run"
    def __init__(self, monkeypatch):
        self.n, run = 0, Local.run
        def counting(*args, **kwargs):
            self.n += 1
            return run(*args, **kwargs)
        monkeypatch.setattr(Local, 'run', counting)


@pytest.fixture
def jobs(monkeypatch): return Run(monkeypatch)


@pytest.mark.parametrize('n_valid', long_but([17, 33, 41, 64], 41))
def test_validate_and_get_preds(n_valid, jobs):
    learn = make_learner(n_valid=n_valid)
    with learn.distrib_ctx(nprocs=2):
        got = learn.validate(), learn.get_preds(), learn.get_preds(with_input=True, with_decoded=True, with_loss=True)
    assert jobs.n == 3
    same(got,
         (learn.validate(), learn.get_preds(), learn.get_preds(with_input=True, with_decoded=True, with_loss=True)))


@pytest.mark.full
def test_options_of_get_preds(tmp_path, jobs):
    learn = make_learner(n=50)
    test = learn.dls.valid.new(points(37, seed=5), bs=7)
    calls = [dict(ds_idx=0), dict(dl=test), dict(act=torch.sigmoid), dict(reorder=False),
             dict(with_preds=False, with_loss=True),
             dict(with_targs=False),
             dict(concat_dim=1, with_targs=False, reorder=False, dl=learn.dls.valid.new(points(32, seed=5)))]
    with learn.distrib_ctx(nprocs=2): got = [learn.get_preds(**o) for o in calls]
    assert jobs.n == len(calls)
    for o, res in zip(calls, got): same(res, learn.get_preds(**o))


def test_signatures():
    import inspect
    for name in ('lr_find', 'validate', 'get_preds', 'tta', 'fine_tune', 'fit_flat_cos', 'fit_sgdr'):
        own, base = (inspect.signature(getattr(Learner, o)).parameters for o in (f'distrib_{name}', name))
        assert [*base] == [o for o in own][:len(base)] and 'nprocs' in own


def test_words_of_their_own():
    learn = make_learner()
    same([learn.distrib_validate(nprocs=2), learn.distrib_get_preds(nprocs=2, with_loss=True)],
         [learn.validate(), learn.get_preds(with_loss=True)])


def test_files_of_predictions(tmp_path):
    "A file per batch, with the name and content that one process gives it"
    learn = make_learner()
    names = [tmp_path/o for o in ('a', 'b', 'c', 'd')]
    for o in names: o.mkdir()
    got = learn.distrib_get_preds(nprocs=2, save_preds=names[0], save_targs=names[1], with_preds=False,
                                  with_targs=False)
    same(got, learn.get_preds(save_preds=names[2], save_targs=names[3], with_preds=False, with_targs=False))
    for a, b in zip(names[:2], names[2:]):
        assert sorted(o.name for o in a.iterdir()) == sorted(o.name for o in b.iterdir()) == ['0', '1', '2']
        for o in a.iterdir(): same(torch.load(o), torch.load(b/o.name))


def nested_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    return [((a := torch.randn(4, generator=g)), torch.randn(2, generator=g), a.sum(), (a > 0).long())
            for _ in range(n)]


class Two(nn.Module):
    "Two inputs; a dict of a tensor and a tuple"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)
    def forward(self, x, z): return dict(y=(self.a(x)+self.b(z)).sum(1), more=(self.a(x), self.b(z)))


def dict_loss(out, y, c, reduction='mean'):
    res = (out['y']-y)**2 + (out['more'][0].sum(1)-c.sum(1))**2
    return res.mean() if reduction == 'mean' else res


def nested_learner():
    seed_all()
    dls = DataLoaders.from_dsets(nested_data(40, 0), nested_data(27, 1), bs=4, device='cpu')
    dls.n_inp = 2
    return Learner(dls, Two(), loss_func=dict_loss)


def test_nested_structures():
    "Tuples and dicts; fastai reorders no dict, so the order of the loader is asked for"
    learn = nested_learner()
    calls = [dict(reorder=False, with_input=True), dict(with_preds=False, with_loss=True, with_input=True)]
    got = [learn.distrib_get_preds(nprocs=2, **o) for o in calls]
    for o, res in zip(calls, got): same(res, learn.get_preds(**o))


class Endless(IterableDataset):
    def __len__(self): return 29
    def __iter__(self): return iter(points(29, seed=3))


LOADERS = {
    'torch': lambda: TorchLoader(points(29, seed=3), batch_size=4),
    'torch with workers': lambda: TorchLoader(points(29, seed=3), batch_size=4, num_workers=2),
    'stream': lambda: TorchLoader(Endless(), batch_size=4),
    'sorted': lambda: SortedDL(points(29, seed=3), bs=4, num_workers=0, sort_func=lambda o: float(o[0][0])),
    'fastai with workers': lambda: TfmdDL(points(29, seed=3), bs=4, num_workers=2),
    'batch sampler': lambda: TorchLoader(points(29, seed=3),
                                         batch_sampler=[list(range(i, min(29, i+5))) for i in range(0, 29, 5)])}


@pytest.mark.parametrize('name', LOADERS)
def test_any_loader(name, jobs):
    "Whole batches are dealt out, also of a stream, which each worker reads"
    learn = make_learner()
    with learn.distrib_ctx(nprocs=2): got = learn.get_preds(dl=LOADERS[name]()), learn.validate(dl=LOADERS[name]())
    assert jobs.n == 2
    same(got, (learn.get_preds(dl=LOADERS[name]()), learn.validate(dl=LOADERS[name]())))


def test_a_loader_that_decides_about_its_batches_is_read_by_each_worker(jobs):
    class Own(TfmdDL):
        def create_batches(self, samps): return super().create_batches(samps)
    learn, dl = make_learner(), Own(points(29), bs=4, num_workers=0)
    with learn.distrib_ctx(nprocs=2): got = learn.get_preds(dl=dl)
    assert jobs.n == 1
    same(got, learn.get_preds(dl=dl))


def class_learner(n=80, n_valid=45, vocab=(0, 1), **kwargs):
    "A learner whose datasets know classes, splits and single items"
    seed_all()
    items = points(n+n_valid)
    tfms = [[lambda i: items[i][0]], [lambda i: int(items[i][1]), Categorize(vocab=list(vocab))]]
    dsets = Datasets(list(range(n+n_valid)), tfms, splits=[list(range(n)), list(range(n, n+n_valid))])
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return Learner(dsets.dataloaders(bs=8, num_workers=0, device='cpu'), model, loss_func=CrossEntropyLossFlat(),
                   **kwargs)


def interpretations(learn):
    losses = Interpretation.from_learner(learn).top_losses()
    return learn.tta(), losses, ClassificationInterpretation.from_learner(learn)


@pytest.mark.full
def test_interpretation_and_tta(jobs):
    learn = class_learner()
    other = learn.dls.test_dl(list(range(50, 61)), with_labels=True)
    options = [dict(use_max=True, n=2), dict(beta=None, n=1), dict(ds_idx=0, beta=.5, n=1), dict(dl=other, n=1)]
    with learn.distrib_ctx(nprocs=2):
        for o in options: same(learn.tta(**o), type(learn).tta(quietly_here(learn), **o))
    assert jobs.n == 2+2+2+2+1
    jobs.n = 0
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        there = interpretations(learn)
        confusion = there[2].confusion_matrix()
    assert jobs.n == 1+5+1+1+1
    here = interpretations(learn)
    for a, b in zip(there[:2], here[:2]): same(tuple(a), tuple(b))
    assert (confusion == here[2].confusion_matrix()).all() and confusion.sum() == 45


def quietly_here(learn):
    "A copy of `learn` outside of its block"
    learn = copy.deepcopy(learn)
    for k in ('fit', '_do_epoch_validate', 'distrib_session'): learn.__dict__.pop(k, None)
    return learn


@pytest.mark.full
@pytest.mark.parametrize('n_valid', [1, 2, 3])
def test_fewer_items_than_ranks_or_batches(n_valid):
    "One item per batch, on three ranks"
    learn = make_learner(n_valid=n_valid)
    calls = [dict(), dict(with_input=True, with_decoded=True, with_loss=True), dict(reorder=False, act=torch.sigmoid),
             dict(with_targs=False)]
    dl = learn.dls.valid.new(bs=1)
    with learn.distrib_ctx(nprocs=3):
        got = [learn.get_preds(dl=dl, **o) for o in calls], learn.validate(dl=dl), learn.validate()
    same(got, ([learn.get_preds(dl=dl, **o) for o in calls], learn.validate(dl=dl), learn.validate()))


def test_single_items_never_launch(nothing_started, tmp_path, monkeypatch):
    learn = class_learner(path=tmp_path)
    shown = []
    monkeypatch.setattr(type(learn.dls.valid), 'show_results', lambda self, b, out, **kwargs: shown.append(out))
    with learn.distrib_ctx(nprocs=2):
        there = learn.predict(3)
        one = learn.get_preds(dl=learn.dls.test_dl([1, 2]))
        batches = learn.get_preds(dl=[learn.dls.valid.one_batch()], reorder=False)
        learn.summary()
        learn.show_results()
        learn.save('here')
        learn.load('here')
    same(there, learn.predict(3))
    assert len(shown) == 1 and len(shown[0]) == 8
    same(one, learn.get_preds(dl=learn.dls.test_dl([1, 2])))
    same(batches, learn.get_preds(dl=[learn.dls.valid.one_batch()], reorder=False))


def first(o): return o['x']


def second(o): return int(o['y'])


def named(items): return [dict(x=x, y=y) for x, y in items]


def learner_to_export(path, **kwargs):
    dsets = Datasets(named(points(60)), [[first], [second, Categorize(vocab=[0, 1])]],
                     splits=[list(range(40)), list(range(40, 60))])
    return Learner(dsets.dataloaders(bs=8, num_workers=0, device='cpu'), nn.Linear(8, 2),
                   loss_func=CrossEntropyLossFlat(), path=path, **kwargs)


def test_export_in_a_block(tmp_path):
    seed_all()
    learn = learner_to_export(tmp_path)
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        learn.export()
        assert callable(learn.__dict__['fit'])
    again = load_learner(tmp_path/'export.pkl')
    assert not {'fit', '_do_epoch_validate', 'distrib_session'} & set(vars(again))
    test = named(points(21, seed=4))
    there = again.distrib_get_preds(nprocs=2, dl=again.dls.test_dl(test, bs=4))
    same(there, learn.get_preds(dl=learn.dls.test_dl(test, bs=4)))


class Exports(Callback):
    "Saves the learner as it is in the fit"
    def after_epoch(self): self.learn.export('in_the_fit.pkl')


def test_export_in_a_fit(tmp_path):
    learner_to_export(tmp_path, cbs=Exports()).distrib_fit(1, nprocs=2)
    saved = load_learner(tmp_path/'in_the_fit.pkl')
    assert not {'load', 'get_preds', '_do_epoch_validate', 'fit'} & set(vars(saved))


def test_learner_afterwards():
    "Counters, modes, random streams and callbacks as after a local validation"
    a, b = make_learner(), make_learner()
    seed_all(3)
    a.distrib_validate(nprocs=2)
    after_a = torch.rand(1), np.random.rand()
    seed_all(3)
    b.validate()
    assert (torch.rand(1), np.random.rand()) == after_a
    assert a.training is b.training is False and a.model.training is b.model.training is False
    assert a.dl is a.dls.valid and a.n_iter == b.n_iter and [*map(type, a.cbs)] == [*map(type, b.cbs)]
    assert [*a.final_record] == pytest.approx([*b.final_record])
    assert not {'fit', '_do_epoch_validate', 'all_batches'} & set(vars(a))
    assert a.opt is None


def test_loggers_stay_in_the_notebook(tmp_path):
    "`validate` opens the log above the door; no handle travels and no rank writes"
    for o in ('a', 'b'): (tmp_path/o).mkdir()
    there, here = [make_learner(path=tmp_path/o, cbs=CSVLogger()) for o in ('a', 'b')]
    with there.distrib_ctx(nprocs=2): there.validate()
    here.validate()
    a, b = [(tmp_path/o/'history.csv').read_text().split() for o in ('a', 'b')]
    assert a[0] == b[0] and [float(o)
                             for o in a[1].split(',')[:-1]] == pytest.approx([float(o) for o in b[1].split(',')[:-1]])
    assert hasattr(there, 'csv_logger') and there.csv_logger in there.cbs and there.logger is print


class Leave(Callback):
    "Leaves the validation in one way, in its second batch"
    def __init__(self, how): self.how, self.seen = how, 0
    def after_batch(self):
        self.seen += 1
        if self.iter >= 1: raise self.how()


@pytest.mark.parametrize('how', [CancelValidException, CancelFitException])
def test_cancelled(how):
    "After two of four batches"
    learn = make_learner(n_valid=120, cbs=Leave(how))
    if how is CancelFitException:
        with pytest.raises(CancelFitException): learn.distrib_validate(nprocs=2)
    else: learn.distrib_validate(nprocs=2)
    assert learn.leave.seen == 2
    learn.remove_cb(Leave)
    same(learn.distrib_validate(nprocs=2), learn.validate())


def test_failure_says_so():
    def bad(pred, y): raise RuntimeError('no such thing')
    learn = make_learner()
    learn.metrics = bad
    before = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(RankRaised, match='no such thing') as e: learn.distrib_validate(nprocs=2)
    assert 'learn is unchanged.' in str(e.value)
    same(before, list(map(lambda p: p.detach(), learn.model.parameters())))


def test_predictions_fetched_in_a_fit():
    "`FetchPredsCallback` predicts on the workers, for all of the data"
    cb = FetchPredsCallback()
    learn = make_learner()
    learn.distrib_fit(2, nprocs=2, cbs=cb)
    same(tuple(cb.preds), learn.get_preds())
    train = FetchPredsCallback(ds_idx=0, with_input=True)
    learn.distrib_fit(1, nprocs=2, cbs=train)
    same(tuple(train.preds), learn.get_preds(ds_idx=0, with_input=True))


def frozen(learn):
    "A copy of weights, buffers and optimizer"
    import copy
    return copy.deepcopy([learn.model.state_dict(), learn.opt.state_dict()])


def bits(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(bits(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, L)): return len(a) == len(b) and all(map(bits, a, b))
    return a == b


def test_lr_find(tmp_path, monkeypatch):
    "Same iterations, type and figure; not a bit of the learner changed; no file left, one at a time"
    learn = class_learner(path=tmp_path)
    learn.fit(1)
    before, seen = frozen(learn), []
    class Monitor(Callback):
        def after_batch(self): seen.append(len([*tmp_path.rglob('*.pth')]))
    learn.add_cb(watch := Monitor())
    watch.files = seen
    import matplotlib.pyplot as plt
    plt.close('all')
    there = learn.distrib_lr_find(nprocs=2, stop_div=False, suggest_funcs=(minimum, steep, valley, slide))
    assert len(learn.recorder.lrs) == 100 and len(plt.get_fignums()) == 1
    plt.close('all')
    assert bits(before, frozen(learn))
    assert set(watch.files) == {1} and not [*tmp_path.rglob('*')][1:]
    learn.remove_cb(watch)
    here = learn.lr_find(stop_div=False, show_plot=False, suggest_funcs=(minimum, steep, valley, slide))
    assert type(there).__name__ == type(here).__name__ and there._fields == here._fields
    assert all(isinstance(a, float) for a in there)
    assert bits(before, frozen(learn))


def test_lr_find_stops_with_all_ranks(tmp_path):
    "It diverges long before the last iteration"
    learn = make_learner(path=tmp_path)
    learn.distrib_lr_find(nprocs=2, end_lr=1e6, show_plot=False)
    assert len(learn.recorder.lrs) < 100
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1


@pytest.mark.parametrize('times', [5, pytest.param(50, marks=pytest.mark.full)])
def test_lr_find_again_and_again(times, tmp_path):
    learn = make_learner(path=tmp_path)
    learn.create_opt()
    before = frozen(learn)
    with learn.distrib_ctx(nprocs=2):
        for _ in range(times): learn.lr_find(num_it=12, show_plot=False)
    assert bits(before, frozen(learn)) and not [*tmp_path.rglob('*.pth')]


def test_local_lr_find_before_a_distributed_fit(tmp_path):
    "It leaves a half-used iterator in the loader"
    learn = class_learner(path=tmp_path)
    learn.lr_find(show_plot=False)
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1


@pytest.mark.parametrize('calls', [['get_preds'], pytest.param(['fit', 'get_preds'], marks=pytest.mark.full)])
def test_a_stopped_prediction_before_a_distributed_fit(calls, tmp_path):
    "fastai's bar keeps the loader of the prediction, with its half-used iterator"
    class Stops(Callback):
        def after_batch(self): raise KeyboardInterrupt
    learn, stops = class_learner(path=tmp_path), []
    learn.add_cb(ProgressCallback())
    for o in calls:
        with pytest.raises(KeyboardInterrupt) as stop:
            if o == 'fit': learn.fit(1, cbs=Stops())
            else: learn.get_preds(cbs=Stops())
        stops.append(stop)      # as IPython keeps it
    learn.distrib_lr_find(num_it=4, show_plot=False, nprocs=2)      # learn.dl is another loader
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1


@pytest.mark.parametrize('with_opt', [False, True])
def test_best_model_is_loaded_at_the_end(with_opt, tmp_path):
    "By all ranks, from one file"
    learn = make_learner(path=tmp_path, lr=1.)
    learn.distrib_fit(4, nprocs=2, cbs=SaveModelCallback(monitor='accuracy', with_opt=with_opt))
    values = [o[2] for o in learn.recorder.values]
    assert [o.name for o in tmp_path.rglob('*.pth')] == ['model.pth']
    saved = torch.load(tmp_path/'models'/'model.pth', weights_only=False)
    assert bits(dict(saved['model'] if with_opt else saved), dict(learn.model.state_dict()))
    if with_opt: assert bits(saved['opt']['state'], learn.opt.state_dict()['state'])
    assert learn.validate()[1] == pytest.approx(max(values))
