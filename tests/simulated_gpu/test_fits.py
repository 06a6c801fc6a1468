"""What docs/gpus.md promises of fits, on simulated GPUs: the same answer, devices, memory, failures, waits."""
import os, signal, sys, warnings
from functools import partial
import pytest
from simulated_gpu import on_gpus
from simulated_gpu.learners import *
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import OptimWrapper
from fastddp.base import group
from parity import seed
from spread import long_but


class Rooted(nn.Module):
    "A loss that is no mean over items, so it is computed over those of all ranks"
    def forward(self, p, y): return F.cross_entropy(p, y, reduction='none').pow(2).mean().sqrt()


KINDS = dict(
    sgd={}, adam=dict(opt_func=Adam), adamw=dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    gathered=dict(loss=Rooted()), clip=dict(cbs=lambda: GradientClip(.1)),
    accumulation=dict(cbs=lambda: GradientAccumulation(36)),
    weights=dict(loss=lambda d: CrossEntropyLossFlat(weight=torch.tensor([1., 2., .5, 1., 3.], device=d))),
    ignored=dict(loss=lambda d: CrossEntropyLossFlat(ignore_index=2)))


def made(kind, bs, device):
    kwargs = dict(KINDS[kind])
    if 'cbs' in kwargs: kwargs['cbs'] = kwargs['cbs']()
    if kind in ('weights', 'ignored'): kwargs['loss'] = kwargs['loss'](device)
    return learner(bs, device=device, **kwargs)


@pytest.mark.parametrize('kind', long_but(KINDS, 'weights'))
@pytest.mark.parametrize('home', long_but(['gpu', 'cpu'], 'gpu'))
@pytest.mark.parametrize('n', long_but([2, 3], 3))
@on_gpus()
def test_the_answer_of_one_process(kind, home, n):
    device = gpu() if home == 'gpu' else torch.device('cpu')
    one, many = made(kind, 6*n, device), made(kind, 6, device)
    before = list(many.model.parameters())
    one.fit(2, .01)
    many.distrib_fit(2, .01, nprocs=n)
    # the loss of a validation is an average over batches where the loss is none over items
    assert_alike(one, many, metrics_tol=.1 if kind in ('gathered', 'weights', 'ignored') else 1e-4)
    assert places(many) == {device} and all(a is b for a, b in zip(before, many.model.parameters()))


@pytest.mark.parametrize('mode', long_but(['fp16', 'bf16'], 'fp16'))
@on_gpus()
def test_mixed_precision(mode):
    one, many = (learner(bs, cbs=MixedPrecision(amp_mode=mode)) for bs in (12, 6))
    one.fit(1, .01)
    many.distrib_fit(1, .01, gpus=[0, 1])
    assert_alike(one, many, tol=5e-3, metrics_tol=5e-2)


class Overflows(Callback):
    "The loss of the last rank overflows in the second batch; `ranks`: steps that each skipped, and its weights"
    order, run_valid = 9, False
    def __init__(self): self.skipped, self.ranks = 0, None
    def after_loss(self):
        is_it = self.iter == 1 and group.rank() == group.world_size()-1
        if is_it: self.learn.loss_grad = self.loss_grad*1e38*1e38
    def after_cancel_step(self): self.skipped += 1
    def after_fit(self):
        weights = [p.detach().double().sum() for p in self.model.parameters()]
        self.ranks = group.all_gather_object([float(self.skipped), *map(float, weights)])


@on_gpus()
def test_where_the_loss_scale_overflows_on_one_rank_all_skip_the_step():
    cb = Overflows()
    learn = learner(cbs=[MixedPrecision(), cb])
    learn.distrib_fit(1, .01, gpus=[0, 1])
    assert cb.ranks[0] == cb.ranks[1] and cb.ranks[0][0] >= 1, cb.ranks
    assert all(p.isfinite().all() for p in learn.model.parameters())


class NotesScale(Callback):
    "The loss scale after each batch"
    run_valid = False
    def __init__(self): self.scales = []
    def after_batch(self): self.scales.append(self.learn.scaler.get_scale())


class FailsAt(Callback):
    run_valid = False
    def after_batch(self):
        if (self.epoch, self.iter) == (2, 1): raise ValueError('once')


@pytest.mark.full
@pytest.mark.parametrize('where', ['new', 'same'])
@on_gpus()
def test_the_loss_scale_goes_on_after_a_resume(where, tmp_path):
    def made(*cbs):
        learn = learner(cbs=[MixedPrecision(init_scale=8., growth_interval=4), NotesScale(), *cbs])
        learn.path = tmp_path
        return learn
    whole, cut = made(), made(FailsAt())
    whole.distrib_fit(4, .01, gpus=[0, 1])
    with pytest.raises(RankRaised): cut.distrib_fit(4, .01, gpus=[0, 1], checkpoint='epoch')
    if where == 'new':
        cut = made()
        cut.distrib_resume('distrib', gpus=[0, 1])
    else:
        cut.remove_cb(FailsAt)
        cut.distrib_resume(gpus=[0, 1])
    assert cut.notes_scale.scales == whole.notes_scale.scales and max(whole.notes_scale.scales) > 8
    assert_alike(whole, cut, tol=0)


class FailsInStep(Callback):
    "Fails on all ranks between the check of the gradients and the step"
    order, run_valid = MixedPrecision.order-1, False
    def before_step(self):
        self.learn.scaler.unscale_(self.learn.mixed_precision)
        if self.epoch: raise ValueError('here')


@on_gpus()
def test_a_fit_that_fails_within_a_step_of_mixed_precision():
    learn = learner(cbs=[MixedPrecision(init_scale=8.), FailsInStep()])
    with warnings.catch_warnings(record=True) as caught, pytest.raises(RankRaised, match='here'):
        warnings.simplefilter('always')
        learn.distrib_fit(2, .01, gpus=[0, 1])
    assert not [o for o in caught if 'fastddp' in str(o.message)]
    assert learn.scaler.get_scale() == 8.
    learn.remove_cb(FailsInStep)
    learn.distrib_fit(1, .01, gpus=[0, 1])


class NotesPeak(Callback):
    "The most bytes in use on this rank's GPU in each batch"
    run_valid = False
    def __init__(self): self.peaks = []
    def before_batch(self): torch.get_device_module('vgpu').reset_peak_memory_stats(self.learn.xb[0].device)
    def after_batch(self):
        peak = torch.get_device_module('vgpu').max_memory_allocated(self.learn.xb[0].device)
        self.peaks.append(peak)


@on_gpus()
def test_the_second_batch_takes_no_more_memory_than_the_third():
    wide = [nn.Sequential(nn.Linear(200, 200), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 200), *wide, nn.Linear(200, 5))
    learn = learner(model=model, cbs=NotesPeak(), n_train=60, drop_last=True)
    learn.distrib_fit(1, .01, gpus=[0, 1])
    _, second, *later = learn.notes_peak.peaks
    # a second copy of the gradients has a million bytes; sums of metrics and losses come and go
    assert len(later) > 1 and second < max(later)+10_000, learn.notes_peak.peaks


# Devices

class Sees(Callback):
    "The device of each rank, and bytes that it has used on each one; the notebook's bytes in the fit"
    run_valid = False
    def __init__(self): self.ranks = None
    def after_fit(self):
        import simulated_gpu.device as device
        own = next(self.model.parameters()).device.index
        used = [float(device.most(i)) for i in range(3)]
        self.ranks = group.all_gather_object([float(-1 if own is None else own), *used])


@pytest.mark.parametrize('gpus', long_but([[1, 0], [2], None, []], [1, 0]))
@on_gpus()
def test_each_rank_uses_its_gpu_only(gpus):
    for home in gpu(0), gpu(1):
        learn = learner(device=home, cbs=Sees())
        learn.distrib_fit(1, gpus=gpus, nprocs=2 if gpus == [] else None)
        expected = [-1, -1] if gpus == [] else [0, 1, 2] if gpus is None else gpus
        assert [r[0] for r in learn.sees.ranks] == expected
        for own, *used in learn.sees.ranks: assert [i for i, o in enumerate(used) if o] == ([own] if own >= 0 else [])
        assert places(learn) == {home}


@on_gpus()
def test_while_workers_train_the_notebook_holds_nothing_on_its_gpu():
    import simulated_gpu.device as device
    learn, seen = learner(opt_func=Adam), []
    class Spy(Local):
        def run(self, *args, **kwargs):
            seen.append((places(learn), device.used(0)))
            return super().run(*args, **kwargs)
    learn.fit(1)
    learn.distrib_fit(1, nprocs=2, launcher=Spy(gpus=[0, 1]))
    (there, used), = seen
    # the Recorder's loss, a number, is there
    assert there == {torch.device('cpu')} and used < 64 and places(learn) == {gpu(0)}


class Tied(nn.Module):
    "Two layers have one weight, and a buffer shows a part of it"
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 5)
        self.b.weight = self.a.weight
        self.to(gpu()).register_buffer('shown', self.a.weight.detach()[:2])
    def forward(self, x): return self.c(self.b(F.relu(self.a(x.flatten(1)))))


def state_of(learn):
    "Weights, gradients and the optimizer's state"
    ps = [*learn.model.parameters()]
    of_params = getattr(learn.opt, 'opt', learn.opt).state
    state = [t for p in ps for t in of_params[p].values() if isinstance(t, torch.Tensor) and t.dim()]
    return [*ps, *(p.grad for p in ps if p.grad is not None), *state]


class ReadsBefore(Local):
    "How many bytes were copied to the host before the workers get the learner, and what it holds then"
    def run(self, *args, **kwargs):
        import simulated_gpu.device as device
        self.read, self.there = device.bytes_read(), [t.detach().clone() for t in state_of(self.learn)]
        return super().run(*args, **kwargs)


@pytest.mark.parametrize('opt', ['adam', 'adamw'])
@on_gpus()
def test_before_a_fit_the_state_is_copied_to_the_host_once(opt):
    import simulated_gpu.device as device
    one, many = (learner(model=Tied(), **KINDS[opt]) for _ in range(2))
    for learn in one, many:
        learn.fit(1, .01)
        learn.model(pictures()[0].to(gpu())).sum().backward()       # gradients that workers get
    had, launcher, m = [t.detach().clone() for t in state_of(many)], ReadsBefore(gpus=[0, 1]), many.model
    before, launcher.learn = [*m.parameters()], many
    one.dls.train.bs = 12
    one.fit(1, .01)
    start = device.bytes_read()
    many.distrib_fit(1, .01, launcher=launcher)
    nbytes = sum(t.nbytes for t in had)
    assert all(t.device.type == 'cpu' and torch.equal(t, h.cpu()) for t, h in zip(launcher.there, had))
    assert nbytes <= launcher.read-start < 1.1*nbytes, (launcher.read-start, nbytes)
    # afterwards all is where it was, and has what one process has
    assert places(many) == {gpu()} and all(a is b for a, b in zip(before, m.parameters()))
    assert m.a.weight is m.b.weight and torch.equal(m.shown, m.a.weight[:2])
    assert_alike(one, many)
    assert largest([t.detach().cpu() for t in state_of(one)], [t.detach().cpu() for t in state_of(many)]) < 2e-5


# Memory and failures

class Ends(Callback):
    "Ends the last rank's second batch: `how` is an exception, a signal or a number of bytes"
    run_valid = False
    def __init__(self, how): self.how, self.notebook = how, os.getpid()
    def before_batch(self):
        if self.iter != 1 or group.rank() != group.world_size()-1: return
        if self.how == 'stop': return os.kill(self.notebook, signal.SIGINT)
        if self.how == 'kill': os.kill(os.getpid(), signal.SIGKILL)
        if self.how == 'full': self.kept = torch.empty(2**31, dtype=torch.uint8, device=self.dls.device)
        raise RuntimeError('on purpose')


ENDS = dict(error=RankRaised, full=RankRaised, kill=RankDied, stop=KeyboardInterrupt)


@pytest.mark.parametrize('how', long_but(ENDS, 'full'))
@on_gpus()
def test_a_fit_that_ends_early_leaves_no_memory_and_the_next_one_works(how):
    import simulated_gpu.device as device
    device.set_limit(2**30)
    learn = learner()
    learn.fit(1)
    own = [device.used(i) for i in range(3)]
    cb = Ends(how)
    learn.add_cb(cb)
    with pytest.raises(ENDS[how]) as e: learn.distrib_fit(1, gpus=[0, 1])
    if how == 'full':
        said = str(e.value)
        assert 'OutOfMemoryError' in said and 'rank 1' in said
        if sys.version_info >= (3, 11):     # exceptions have notes
            assert said.count("What takes the GPU's memory: weights 0 MB, gradients 0 MB") == 1
            assert 'Less takes: learn.dls.train.bs = 3 with cbs=GradientAccumulation(12), the same steps' in said
    learn.remove_cb(cb)
    assert places(learn) == {gpu(0)}
    learn.distrib_fit(1, gpus=[0, 1])
    assert [device.used(i) for i in range(3)] == own and device.used_by_all(1) == 0


@pytest.mark.full
@on_gpus()
def test_twenty_fits_leave_memory_flat():
    import simulated_gpu.device as device
    learn = learner(n_train=12)
    learn.fit(1)
    own = device.used(0)
    for _ in range(20): learn.distrib_fit(1, gpus=[0, 1])
    assert device.used(0) == device.used_by_all(0) == own


# Waits for the device

class Waits(Callback):
    "How often the host waits for the device in a training step, from the third on"
    order, run_valid = -3_000_000, False
    def __init__(self): self.steps = []
    def before_batch(self):
        import simulated_gpu.device as device
        now = device.waits()
        if self.iter > 2: self.steps.append(now-self.at)
        self.at = now


@pytest.mark.parametrize('norm', [nn.Identity, nn.BatchNorm2d], ids=str)
@pytest.mark.parametrize('loss', ['cross entropy', 'squares'])
@on_gpus()
def test_a_step_waits_for_the_gpu_no_more_often_than_fastais(norm, loss):
    "The host knows what squares are a mean over, and only the GPU knows it of a cross entropy"
    one, many = (learner(n_train=96, cbs=Waits(), model=convnet(norm)) for _ in range(2))
    if loss == 'squares':
        for o in one, many:
            o.model.append(nn.Linear(5, 1).to(gpu()))
            o.loss_func, o.metrics = MSELossFlat(), []
    one.fit(1)
    many.distrib_fit(1, gpus=[0, 1])
    plain, ours = one.waits.steps, many.waits.steps
    assert plain and ours and max(ours) <= max(plain), (plain, ours)


class Stream:
    "Without indices; in later batches it has noise of its own, if asked for"
    def __init__(self, items, noise=0): self.all, self.noise = items, noise
    def __iter__(self):
        g = torch.Generator()
        g.seed()
        for i, (x, y) in enumerate(self.all): yield x+self.noise*(i > 18)*torch.randn(1, generator=g), y


def over_a_stream(noise, *cbs):
    learn = learner(n_train=96, cbs=cbs)
    items = [*learn.dls.train_ds]
    learn.dls.loaders[0] = DataLoader(Stream(items, noise), bs=6, n=len(items), indexed=False, device=gpu())
    return learn


@on_gpus()
def test_what_a_loader_on_the_gpu_has_read_is_compared_without_a_wait():
    one, many = (over_a_stream(0, Waits()) for _ in range(2))
    one.fit(1)
    many.distrib_fit(1, gpus=[0, 1])
    # each rank copies the two tensors of both batches to its GPU
    plain, ours = one.waits.steps, many.waits.steps
    assert ours and max(ours) <= max(plain)+2, (plain, ours)
    with pytest.raises(RankRaised, match='training loader, and they have read different batches'):
        over_a_stream(1).distrib_fit(1, gpus=[0, 1])


class WaitsAtTheEnd(Callback):
    "How often the host waits for the device from the last step of an epoch on, until the validation"
    order, run_valid = 3_000_000, False
    def after_batch(self):
        import simulated_gpu.device as device
        self.at = device.waits()
    def after_train(self):
        import simulated_gpu.device as device
        self.n = device.waits()-self.at


@on_gpus()
def test_at_the_end_of_an_epoch_the_host_waits_no_more_often_for_a_larger_model():
    found = []
    for n in 1, 6:
        model = nn.Sequential(nn.Flatten(), *[nn.Linear(36, 36) for _ in range(n)], nn.Linear(36, 5))
        learn = learner(n_train=24, model=model, cbs=WaitsAtTheEnd())
        learn.distrib_fit(1, gpus=[0, 1])
        found.append(learn.waits_at_the_end.n)
    assert found[0] == found[1], found


# What isn't a fit

@pytest.mark.full
@on_gpus()
def test_predictions_validations_and_lr_find(tmp_path):
    learn = learner(device=gpu(1), path=tmp_path)
    learn.fit(1)
    assert largest([o.float() for o in learn.get_preds()], [o.float() for o in learn.distrib_get_preds()]) < 1e-5
    assert largest(list(learn.validate()), list(learn.distrib_validate())) < 1e-5
    before = [p.detach().clone() for p in learn.model.parameters()]
    assert learn.distrib_lr_find(show_plot=False, num_it=12).valley > 0
    assert all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters())) and places(learn) == {gpu(1)}


@pytest.mark.full
@on_gpus()
def test_two_jobs_on_different_gpus():
    learners = [learner(device=gpu(i)) for i in range(2)]
    jobs = [learn.distrib_fit(1, wait=False, gpus=[i]) for i, learn in enumerate(learners)]
    for i, job in enumerate(jobs):
        job.result()
        assert places(learners[i]) == {gpu(i)} and len(learners[i].recorder.values) == 1


def of_a_rank(x):
    group.sum_(x)
    return str(x.device), float(x[0]), group.backend()


@on_gpus()
def test_a_function_has_a_gpu_in_each_process():
    def device_of_rank(): return torch.vgpu.current_device(), float(torch.ones(2, device='vgpu').sum())
    assert ranch(3, device_of_rank) == [(0, 2.), (1, 2.), (2, 2.)]
    assert in_torchddp(3, of_a_rank, torch.ones(2, device=gpu(0))) == ('vgpu:0', 3., 'vccl')


class Draws(Callback):
    "The first predictions of each rank, under dropout"
    run_valid = False
    def __init__(self): self.ranks = None
    def after_pred(self):
        if self.iter == 0: self.ranks = group.all_gather_object(self.pred.detach().float().cpu())


@pytest.mark.full
@on_gpus()
def test_dropout_differs_between_ranks_and_repeats_with_a_seed():
    found = []
    for _ in range(2):
        model = nn.Sequential(convnet(), nn.Dropout(.5))
        learn = learner(model=model, cbs=Draws())
        seed(5)
        learn.distrib_fit(1, gpus=[0, 1])
        found.append(learn.draws.ranks)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0] == 0, found[0][1] == 0)
