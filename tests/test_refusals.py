"Each refusal: at once, before any process starts, with the remedy, and the learner as it was."
import contextlib, contextvars, importlib.util, multiprocessing, os, pickle, socket, sqlite3, sys, tempfile
from functools import partial
import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch import nn
from fastddp.all import *
from fastddp.base import group
from fastddp.base.errors import NotPicklable
from fastddp.fastai2.loaders import check_dl
from fastddp.launch import background, local as launch
from fastddp.ranch import spawn
from learners import make_learner, mlp, points


@pytest.fixture(autouse=True)
def no_process_starts(monkeypatch):
    "A refusal that comes after a process was started is none"
    def start(*args, **kwargs): raise AssertionError('a process was started')
    monkeypatch.setattr(launch, 'Workers', start)


def refused(learn, match, **options):
    "The refusal's message; `learn` must be as it was"
    attrs, weights, cbs = dict(vars(learn)), [p.clone() for p in learn.model.parameters()], list(learn.cbs)
    with pytest.raises(CantDistribute, match=match) as e: learn.distrib_fit(1, **options)
    assert vars(learn) == attrs and list(learn.cbs) == cbs and learn.opt is None
    assert all(torch.equal(a, b) for a, b in zip(weights, learn.model.parameters()))
    return str(e.value)


def test_no_worker_at_all():
    assert 'Leave nprocs out' in refused(make_learner(), 'nprocs=0', nprocs=0)
    refused(make_learner(), 'nprocs=-1', nprocs=-1)


@pytest.fixture
def two_gpus(monkeypatch): monkeypatch.setattr(group, 'n_gpus', lambda: 2)


def test_more_workers_than_gpus(two_gpus):
    assert 'nprocs=2 or less' in refused(make_learner(), '2 GPUs are visible', nprocs=3)


def test_gpus_that_are_not_there(two_gpus):
    refused(make_learner(), r'gpus=\[0, 2\]: \[2\] not among', gpus=[0, 2])
    refused(make_learner(), 'name each once', gpus=[1, 1])
    refused(make_learner(), 'leave nprocs out', gpus=[0, 1], nprocs=1)


def test_no_gpu_at_all():
    assert 'nprocs=2' in refused(make_learner(), 'no GPU is visible', gpus=[0])
    refused(make_learner(), 'say how many', gpus=[])


def test_an_unknown_way_to_batch(): refused(make_learner(), "'per_worker' or 'global'", nprocs=2, batch='all')


def test_an_unknown_kind_of_loss():
    assert "'gather' (computed over" in refused(make_learner(), "loss='max'", nprocs=2, loss='max')


@pytest.mark.parametrize('name', ['_do_epoch_validate', 'get_preds', 'load'])
def test_a_method_that_is_replaced_in_one_learner(name):
    learn = make_learner()
    setattr(learn, name, lambda *args, **kwargs: None)
    assert f'`del learn.{name}`' in refused(learn, 'in this learner alone', nprocs=2)
    delattr(learn, name)
    assert getattr(learn, name).__func__ is getattr(Learner, name)


class Holder(Callback):
    "A callback that holds something"
    def __init__(self, thing): self.thing = thing


def test_the_line_of_the_workers_comes_when_they_start(capsys):
    "Not before a refusal"
    learn = make_learner()
    with open(os.devnull) as learn.model.fh: refused(learn, "can't be sent", nprocs=2)
    assert 'workers' not in capsys.readouterr().out


def things():
    fh, sock = open(os.devnull), socket.socket()
    return {'file': fh, 'generator': (i for i in range(3)), 'socket': sock, 'database': sqlite3.connect(':memory:')}


@pytest.mark.parametrize('kind', ['file', 'generator', 'socket'])
def test_what_cannot_travel_is_named(kind):
    held = things()
    thing = held[kind]
    learn = make_learner()
    learn.loss_func.thing = thing
    message = refused(learn, r'learn\.loss_func\.thing can.t be sent', nprocs=2)
    assert 'Make it where it is used' in message and 'factory' not in message
    model = mlp()
    model[1].thing = thing
    assert 'with model_factory=' in refused(make_learner(model=lambda: model), r'learn\.model.*thing', nprocs=2)
    for o in held.values(): getattr(o, 'close', lambda: None)()


def test_a_database_can_be_opened_in_each_worker():
    held = things()
    learn = make_learner()
    learn.loss_func.thing = held['database']
    message = refused(learn, r'learn\.loss_func\.thing can.t be sent', nprocs=2)
    assert 'copyreg.pickle(sqlite3.Connection' in message
    for o in held.values(): getattr(o, 'close', lambda: None)()


class Files:
    "A dataset whose items hold an open file"
    class Items: pass
    def __init__(self):
        self.items, self.data = Files.Items(), points(64)
        self.items.fh = open(os.devnull)
    def __len__(self): return len(self.data)
    def __getitem__(self, i): return self.data[i]


def test_an_open_file_in_the_dataset():
    ds = Files()
    learn = Learner(DataLoaders.from_dsets(ds, points(8), bs=8, device='cpu'), mlp(), loss_func=nn.CrossEntropyLoss())
    refused(learn, r'learn\.dls\.train\.dataset\.items\.fh', nprocs=2)
    ds.items.fh.close()


def test_nothing_to_train():
    learn = make_learner()
    learn.model.requires_grad_(False)
    refused(learn, 'no trainable parameters', nprocs=2)


def test_other_options_inside_a_block():
    learn = make_learner()
    with learn.distrib_ctx(nprocs=2, starts=False):
        with pytest.raises(CantDistribute, match='nprocs'): learn.distrib_fit(1, nprocs=3)
        with pytest.raises(CantDistribute, match='sync_bn'): learn.distrib_fit(1, sync_bn=False)
    assert 'fit' not in vars(learn) and 'distrib_session' not in vars(learn)


def test_too_little_to_train_on():
    learn = Learner(DataLoaders.from_dsets([], points(8), bs=4, device='cpu', drop_last=False, shuffle=False), mlp(),
                    loss_func=nn.CrossEntropyLoss())
    refused(learn, "learn.dls.train.*empty", nprocs=2)


def test_a_group_of_somebody_elses():
    with tempfile.TemporaryDirectory() as d:
        torch.distributed.init_process_group('gloo', init_method=f'file://{d}/store', rank=0, world_size=1)
        try: assert 'destroy_process_group' in refused(make_learner(), 'already initialized', nprocs=2)
        finally: torch.distributed.destroy_process_group()


def test_no_method_of_that_name():
    with pytest.raises(CantDistribute, match="no method 'fit_thrice'"):
        make_learner().distrib('fit_thrice', 1, nprocs=2)


@contextlib.contextmanager
def loaded_again():
    "Our module of learners is loaded once more, by the function that this yields; afterwards `Learner` is as before"
    was = dict(vars(Learner))
    spec = importlib.util.find_spec('fastddp.fastai2.learner')
    try: yield lambda: spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        for k, v in was.items():
            if getattr(v, '__objclass__', None) is None and k != '__dict__': setattr(Learner, k, v)


def test_a_learner_after_a_reload_of_our_module():
    "As `%autoreload 2` makes one: fastai's own are asked, not ours once more"
    was = dict(vars(Learner))
    with loaded_again() as load:
        load()
        assert Learner.__getstate__ is not was['__getstate__']
        learn = make_learner()
        with pytest.raises(AttributeError, match='nope'): learn.nope
        assert isinstance(pickle.loads(pickle.dumps(learn)), Learner)


def test_a_torch_without_distributed_says_what_runs_instead(monkeypatch, capsys):
    monkeypatch.setattr(group, 'has_distributed', lambda: False)
    learn = make_learner()
    with learn.no_bar(): learn.distrib_fit(1, nprocs=2)
    assert 'running in this process' in capsys.readouterr().out and len(learn.recorder.values) == 1


def test_one_worker_is_this_process(capsys):
    learn = make_learner()
    with learn.no_bar(): learn.distrib_fit(1)
    assert 'No GPU: running in this process. nprocs=2' in capsys.readouterr().out and len(learn.recorder.values) == 1


def test_an_option_that_nobody_has():
    learn = make_learner()
    with pytest.raises(CantDistribute, match="No option btach. Did you mean 'batch'"):
        learn.distrib_fit(1, btach='global')
    said = 'No option xyz. .*nprocs.*DistributedDataParallel: .*bucket_cap_mb'
    with pytest.raises(CantDistribute, match=said), learn.distrib_ctx(xyz='global'): pass
    assert 'fit' not in vars(learn)


WRONG = dict(words=('3',), half=(1.5,), nothing=(None,), twice=(1, 2, dict(lr=3)), no_callback=(1, dict(cbs=5)))


@pytest.mark.parametrize('args', WRONG.values(), ids=WRONG)
def test_arguments_of_the_fit(args):
    named = next((o for o in args if isinstance(o, dict)), {})
    with pytest.raises(CantDistribute, match='n_epoch=|multiple values|cbs='):
        make_learner().distrib_fit(*(o for o in args if o is not named), nprocs=2, **named)


@pytest.mark.parametrize('make,match', [
    (lambda: Local(see=1), 'see=1'),
    (lambda: Hosts(['localhost', 'gpu2']), 'Hosts.* is gone: several machines are a Ray cluster.*launcher=Ray()'),
    (lambda: Ray(per_node=1.5), 'per_node=1.5'), (lambda: Ray(link_timeout='5'), 'link_timeout='),
    (lambda: Ray(nodes='2'), "nodes='2'"), (lambda: Ray(per_node=0), 'per_node=0'),
    (lambda: Ray(gpus='all'), "gpus='all'"), (lambda: Ray(cpus=-1), 'cpus=-1'),
    (lambda: Ray(wait='long'), 'wait='), (lambda: Ray(interface='ib0'), 'ray start --node-ip-address=')])
def test_arguments_of_launchers(make, match):
    with pytest.raises(CantDistribute, match=match): make()


def test_an_array_of_gpus(two_gpus):
    "As good as a list: here both are there, and workers would start"
    with pytest.raises(AssertionError, match='a process was started'):
        make_learner().distrib_fit(1, gpus=np.array([0, 1]))


def test_a_way_out_without_a_change_of_a_library():
    "What a library has made can't be made elsewhere: the message of a learner's object says how to train with it"
    assert 'launcher=InProcess() nothing is sent' in str(NotPicklable('learn.cbs[1].lock', 'cannot pickle'))
    assert 'InProcess' not in str(NotPicklable('f.lock', 'cannot pickle'))


def test_an_option_of_a_call_in_a_block():
    learn = make_learner()
    with learn.distrib_ctx(nprocs=2, launcher=InProcess()):
        with pytest.raises(CantDistribute, match='wait= is an option of'): learn.fit(1, wait=False)


def test_data_parallel():
    "As in many notebooks on Kaggle: by torch, and by fastai's `to_parallel`, `parallel_ctx`"
    pytest.importorskip('accelerate')
    import fastai.distributed
    learn = make_learner(model=lambda: nn.DataParallel(mlp()))
    refused(learn, r'learn.model = learn.model.module', nprocs=2)
    learn = make_learner().to_parallel()
    refused(learn, r'learn.detach_parallel\(\)', nprocs=2)
    with pytest.raises(CantDistribute, match='DataParallel'): learn.distrib_get_preds(nprocs=2)


@pytest.mark.parametrize('dls', [None, DataLoaders()])
def test_a_learner_without_data(dls):
    refused(Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss(), path='.'), 'This learner has no data', nprocs=2)


@pytest.mark.parametrize('file', ['', '.', '/', 5])
def test_what_is_no_name_of_a_checkpoint(file):
    learn = make_learner()
    for call in learn.distrib_resume, learn.distrib_load:
        with pytest.raises(CantDistribute, match="is no checkpoint's name"): call(file)


def test_a_refused_job_takes_no_number():
    learn = make_learner()
    with pytest.raises(CantDistribute): learn.distrib_fit(1, nprocs=2, wait=False, gpus='none')
    before = background._n_started
    for options in dict(nprocs=0), dict(nprocs=2, batch='half'):
        with pytest.raises(CantDistribute): learn.distrib_fit(1, wait=False, **options)
    assert background._n_started == before


CONTEXT = multiprocessing.get_context('fork')     # its semaphores have no file


@pytest.mark.parametrize('make', [CONTEXT.Queue, CONTEXT.SimpleQueue, CONTEXT.Lock, CONTEXT.Event, CONTEXT.Condition,
                                  partial(CONTEXT.Value, 'i', 0), partial(CONTEXT.Array, 'i', 3)])
def test_what_multiprocessing_shares_with_its_own_processes(make):
    "As in the examples of `torch.multiprocessing.spawn`; those of a manager arrive"
    with pytest.raises(NotPicklable, match='return results from the function, or take multiprocessing.Manager'):
        spawn(print, args=(make(),), nprocs=2)


def test_a_loss_with_a_context_variable():
    scale = contextvars.ContextVar('scale', default=1.)
    learn = make_learner(loss_func=lambda p, y: nn.functional.cross_entropy(p, y)*scale.get())
    with pytest.raises(NotPicklable, match='scale.*Take a plain variable'): learn.distrib_fit(1, nprocs=2)


def test_an_operator_of_a_cell():
    @torch.library.custom_op('of_a_cell::twice', mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor: return 2*x
    with pytest.raises(NotPicklable, match='Define the operator in a file'): ranch(2, lambda: twice(torch.ones(2)))


class Stream(torch.utils.data.IterableDataset):
    "As a library's: it doesn't say how long it is"
    def __iter__(self): return iter([(torch.ones(4), torch.tensor(0))]*40)


def test_a_stream_of_unknown_length():
    "What `n` is in one process it is on workers"
    learn = make_learner()
    learn.dls.train = DataLoader(Stream(), bs=8)
    learn.dls.train.to(learn.dls.device)
    refused(learn, 'learn.dls.train.* has no length.* or set its `n` to the number of items', nprocs=2)
    learn.dls.train.n = 40
    check_dl(learn.dls.train, 2)


def test_a_network_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'eth99')
    message = refused(make_learner(), 'GLOO_SOCKET_IFNAME=eth99: this machine has no network interface eth99', nprocs=2)
    assert "del os.environ['GLOO_SOCKET_IFNAME']" in message


def test_a_variable_of_torchrun_alone(monkeypatch):
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    message = refused(make_learner(), 'TORCHELASTIC_RUN_ID is set.* but not RANK, WORLD_SIZE', nprocs=2)
    assert "del os.environ['TORCHELASTIC_RUN_ID']" in message


def test_a_layer_without_a_size():
    learn = make_learner(model=lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    with pytest.raises(CantDistribute, match=r'parameter 0.weight has no size .*learn.dls.one_batch'):
        learn.distrib_fit(1, nprocs=2)
    assert learn.opt is None
