"""On simulated GPUs: magics, measuring, memory that is full when the learner comes back, one GPU and eight."""
import contextlib, io, sys
from unittest import mock
import pytest
from simulated_gpu import on_gpus
from simulated_gpu.learners import *
from fastddp.base import device as device_of_ours, group


@contextlib.contextmanager
def a_shell():
    "IPython in this process, with fastddp's magics; yields a function that runs a cell and returns what it prints"
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.io import capture_output
    shell = InteractiveShell.instance()
    shell.run_line_magic('load_ext', 'fastddp')
    def run(cell):
        with capture_output() as said: result = shell.run_cell(cell)
        result.raise_error()
        return said.stdout
    try: yield run
    finally:
        run('%makedip -k')
        InteractiveShell.clear_instance()


@pytest.mark.full
@on_gpus()
def test_cells_on_all_gpus():
    with a_shell() as run:
        said = run('%makedip -g all -a none -v True')
        assert '3 ranks on GPUs 0, 1, 2 (vccl)' in said, repr(said)
        said = run('%%dip --see all\nimport torch\nprint(f"on {torch.vgpu.current_device()}")')
        assert sorted(said.splitlines()[1:]) == ['[rank 1] on 1', '[rank 2] on 2', 'on 0'], repr(said)
        run('import torch\nheld = torch.arange(3., device="vgpu:1")\n%dipush held')
        assert run('%%dip --see all\nprint(held.device.index, float(held.sum()))').count('3.0') == 3
        run('%%dip\nmade = torch.ones(2, device="vgpu")\ntorch.distributed.all_reduce(made)')
        run('%dipull made')
        assert run('print(made.tolist())').strip() == '[3.0, 3.0]'
        run('del held, made')


@pytest.mark.full
@on_gpus()
def test_bench_with_a_row_that_has_no_memory():
    import simulated_gpu.device as device
    learn = learner(n_train=12000)
    before = [p.detach().clone() for p in learn.model.parameters()]
    device.set_limit(3*2**21)
    res = learn.distrib_bench(nprocs=2, bs=[6, 6000], num_workers=[0], steps=2)
    device.set_limit(0)
    assert [o.rate > 0 for o in res][1:] == [True, False], res
    assert 'out of memory' in str(res)
    assert all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters())) and places(learn) == {gpu()}
    learn.distrib_fit(1, gpus=[0, 1])


@on_gpus()
def test_what_the_notebook_holds_on_a_gpu():
    "Those who try two GPUs because one was full: a fit that failed keeps its batch; what stays is named"
    class Fails(Callback):
        def after_loss(self): raise torch.cuda.OutOfMemoryError('CUDA out of memory')
    learn = learner(cbs=Fails())
    learn.logger = print
    main = sys.modules['__main__']
    main.kept_by_a_cell = torch.ones(2**18, device=gpu())
    try: learn.fit(1)
    except torch.cuda.OutOfMemoryError as e: e.__traceback__ = None
    assert learn.xb[0].device == gpu()
    said = io.StringIO()
    try:
        with mock.patch.object(device_of_ours, '_WORTH_TELLING', 2**20), contextlib.redirect_stdout(said):
            try: learn.distrib_fit(1, gpus=[1, 2])
            except RankRaised as e: remedy = e.remedy
            learn.remove_cb(Fails)
            learn.distrib_fit(1, gpus=[1, 2])
    finally: del main.kept_by_a_cell
    assert learn.xb == (None,) and learn.pred is None
    line = 'The notebook holds 0.0 GB on GPU 0, of which 0.0 GB kept_by_a_cell'
    assert said.getvalue().count(line) == 2, said.getvalue()
    assert 'kept_by_a_cell' in remedy
    learn.distrib_fit(1, gpus=[1, 2])


@on_gpus()
def test_a_full_gpu_when_the_learner_comes_back():
    "What other programs have taken there meanwhile: nothing of the fit is lost, and it comes back when there is room"
    import simulated_gpu.device as device
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5000), nn.Linear(5000, 5))
    cb, taken = Counts(), []
    learn = learner(opt_func=Adam, model=model, cbs=cb)
    before = list(model.parameters())
    class Fills(Local):
        def run(self, *args, **kwargs):
            res = super().run(*args, **kwargs)
            device.set_limit(2**21)
            taken.append(torch.empty(2**21-device.used_by_all(0)-2**16, dtype=torch.uint8, device=gpu()))
            return res
    with pytest.warns(UserWarning, match='no room on vgpu:0 any more, so it stays on the CPU'):
        learn.distrib_fit(1, nprocs=2, launcher=Fills(gpus=[1, 2]))
    assert places(learn) == {torch.device('cpu')} and len(learn.recorder.values) == 1 and cb.n.sum() > 0
    taken.clear()
    device.set_limit(0)
    learn.distrib_fit(1, gpus=[1, 2])
    assert places(learn) == {gpu()} and all(a is b for a, b in zip(before, model.parameters()))
    assert {cb.n.device} == {gpu()}
    learn.fit(1)


class Counts(Callback):
    "How many items of each class were trained"
    run_valid = False
    def before_fit(self): self.n = getattr(self, 'n', torch.zeros(5, device=self.dls.device))
    def after_batch(self): self.n += torch.bincount(self.y, minlength=5)


@on_gpus()
def test_a_model_on_the_cpu_goes_where_a_fit_in_one_process_moves_it():
    for fit in 'fit', 'distrib_fit':
        learn = learner()
        learn.model.cpu()
        getattr(learn, fit)(1)
        assert places(learn) == {gpu()}


@pytest.mark.full
@on_gpus(1)
def test_one_gpu(): trains_on(1)


@pytest.mark.full
@on_gpus(8)
def test_eight_gpus(): trains_on(8)


def trains_on(n):
    one, many = learner(6*n), learner(6, cbs=Ranks())
    one.fit(1, .01)
    many.distrib_fit(1, .01)
    assert_alike(one, many)
    assert many.ranks.devices == list(range(n)) and places(many) == {gpu()}


class Ranks(Callback):
    run_valid = False
    def __init__(self): self.devices = None
    def after_fit(self): self.devices = group.all_gather_object(next(self.model.parameters()).device.index)
