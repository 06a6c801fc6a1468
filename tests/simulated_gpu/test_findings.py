"""What fails on the first GPU: each of these was found by reading the code for GPUs."""
import contextlib, io
from functools import partial
import pytest
from simulated_gpu import on_gpus
from simulated_gpu.learners import *
from fastai.callback.training import BnFreeze
from fastai.optimizer import OptimWrapper
from fastddp.base import group
from fastddp.launch import local
from spread import long_but


# Batch norm

class SeesModules(Callback):
    "What a callback finds of the model in a fit: classes, and calls of a hook"
    run_valid = False
    def __init__(self): self.classes, self.calls = [], 0
    def hook(self, *_): self.calls += 1
    def after_batch(self): self.classes = [type(m).__name__ for m in self.model]


@pytest.mark.parametrize('gpus', long_but([[0, 1], [1]], [0, 1]))
@on_gpus()
def test_batch_norms_keep_their_class_and_hooks(gpus):
    learn = learner(model=convnet(nn.BatchNorm2d), cbs=SeesModules())
    bn, calls = learn.model[1], learn.sees_modules
    bn.register_forward_hook(calls.hook)
    learn.distrib_fit(1, gpus=gpus)
    assert 'BatchNorm2d' in calls.classes and 'SyncBatchNorm' not in calls.classes
    assert calls.calls > 0 and learn.model[1] is bn and type(bn) is nn.BatchNorm2d


@pytest.mark.parametrize('gpus', long_but([[0, 1, 2], [1]], [0, 1, 2]))
@on_gpus()
def test_frozen_batch_norms_stay_frozen(gpus):
    learn = learner(model=convnet(nn.BatchNorm2d), cbs=BnFreeze())
    bn = learn.model[1]
    bn.weight.requires_grad_(False)
    with torch.no_grad(): bn.running_mean += .3
    before = bn.running_mean.clone(), bn.running_var.clone()
    learn.distrib_fit(2, gpus=gpus)
    assert torch.equal(before[0], bn.running_mean) and torch.equal(before[1], bn.running_var)


class OwnNorm(nn.BatchNorm2d):
    "As timm's: it calls the function itself, and does more"
    def forward(self, x):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum,
                         self.eps)
        return y.clamp(-1.5, 1.5)


@pytest.mark.parametrize('norm', long_but([nn.BatchNorm2d, OwnNorm, partial(nn.BatchNorm2d, affine=False),
                                           partial(nn.BatchNorm2d, affine=False, track_running_stats=False)],
                                          nn.BatchNorm2d), ids=str)
@pytest.mark.parametrize('n', long_but([2, 3], 3))
@on_gpus()
def test_batch_norm_is_that_of_one_process(n, norm):
    "Also where the last batch gives ranks different numbers of items"
    one, many = learner(6*n, model=convnet(norm)), learner(6, model=convnet(norm))
    one.fit(2, .05)
    many.distrib_fit(2, .05, nprocs=n)
    # without running statistics, a validation depends on how items are batched
    assert_alike(one, many, metrics_tol=1e-4 if one.model[1].track_running_stats else .1)


def normalized(x, sizes):
    "What a batch norm makes of this rank's rows of `x`, their gradient, and the running statistics; of all ranks"
    from fastddp.shard.same_model import synced_bn
    bn = nn.BatchNorm1d(x.shape[1]).to(x.device)
    x = x.split(sizes)[group.rank()].clone().requires_grad_()
    with synced_bn(bn): y = bn(x)
    y.pow(3).sum().backward()
    grad = x*0 if x.grad is None else x.grad        # torch gives no rows no gradient
    of_ranks = group.all_gather_object([y.detach(), grad.detach(), bn.running_mean, bn.running_var])
    return [*(torch.cat(o) for o in zip(*(o[:2] for o in of_ranks))), *of_ranks[-1][2:]]


@pytest.mark.parametrize('sizes', long_but([[0, 4, 5], [4, 0, 5], [4, 5, 0], [3, 3, 3]], [0, 4, 5]), ids=str)
@on_gpus()
def test_a_rank_without_rows_leaves_a_batch_norm_as_it_is(sizes):
    "As where a model finds something in some of the pictures"
    torch.manual_seed(0)
    x = torch.randn(9, 4)*3+1
    found = in_torchddp(3, normalized, x.to(gpu()), sizes)
    bn, x = nn.BatchNorm1d(4), x.requires_grad_()
    y = bn(x)
    y.pow(3).sum().backward()
    assert largest([y.detach(), x.grad, bn.running_mean, bn.running_var], found) < 1e-4


# State of optimizers

def torch_opt(cls, **kwargs): return partial(OptimWrapper, opt=partial(cls, **kwargs))


OPTIMIZERS = dict(adamw=torch_opt(torch.optim.AdamW), capturable=torch_opt(torch.optim.AdamW, capturable=True),
                  adafactor=torch_opt(torch.optim.Adafactor), nadam=torch_opt(torch.optim.NAdam), fastai=Adam)


def devices_of_state(opt):
    inner = getattr(opt, 'opt', opt)
    return [sorted((k, str(v.device)) for k, v in st.items() if isinstance(v, torch.Tensor))
            for st in inner.state.values()]


@pytest.mark.parametrize('kind', long_but(OPTIMIZERS, 'adafactor'))
@on_gpus()
def test_optimizer_state_is_where_a_local_fit_has_it(kind):
    one, many = (learner(device=gpu(1), opt_func=OPTIMIZERS[kind]) for _ in range(2))
    one.fit(1, 1e-3)
    for fit in many.distrib_fit, many.distrib_fit, many.fit, many.distrib_fit:
        fit(1, 1e-3)
        assert devices_of_state(many.opt) == devices_of_state(one.opt)
    assert places(many) == {gpu(1)}


@on_gpus()
def test_gradients_come_back_beside_their_parameters():
    class KeepsGrads(Callback):
        "The last batches are accumulated"
        order = -4
        def before_step(self):
            if self.iter > 0: raise CancelBatchException
    learn = learner(cbs=KeepsGrads())
    learn.distrib_fit(1, gpus=[0, 1])
    grads = [p.grad for p in learn.model.parameters()]
    assert all(g is not None and g.device == gpu(0) for g in grads) and any(g.any() for g in grads)


# Memory of workers

def sends_to_all(n):
    "The most bytes that a rank has used while all get an object of `n` bytes"
    import simulated_gpu.device as device
    here = torch.vgpu.current_device()
    before = device.most(here)
    sent = group.from_rank0(torch.arange(n//8) if group.rank() == 0 else None)
    assert torch.equal(sent, torch.arange(n//8))
    return max(group.all_gather_object(float(device.most(here)-before)))


@pytest.mark.full
@on_gpus()
def test_an_object_of_rank_0_is_on_each_gpu_once():
    assert in_torchddp(3, sends_to_all, 2**22) < 1.5*2**22


@on_gpus()
def test_workers_of_a_block_keep_nothing_on_their_gpus():
    import simulated_gpu.device as device
    learn = learner(n_train=12)
    learn.fit(1)
    own = [device.used(i) for i in range(3)]
    with learn.distrib_ctx():
        for call in partial(learn.fit, 1), learn.get_preds, learn.validate:
            call()
            assert [device.used_by_all(i) for i in range(3)] == own


# GPUs that can't exchange data directly

WRONG = dict(zeros='wrong sums', fails='an error of NCCL', hangs='no answer')


@pytest.mark.full
@pytest.mark.parametrize('wrong', WRONG)
@on_gpus()
def test_p2p_that_does_not_work(wrong):
    learn = learner(n_train=12)
    learn.logger = print
    said = io.StringIO()
    attrs = [(local, '_P2P_TIMEOUT', 3.), (local, '_p2p_checked', set()), (local, 'extra_env', {})]
    with contextlib.ExitStack() as stack:
        from fastddp.base.scoped import environment, with_attrs
        for o, k, v in attrs: stack.enter_context(with_attrs(o, **{k: v}))
        stack.enter_context(environment(VGPU_P2P=wrong))
        stack.enter_context(contextlib.redirect_stdout(said))
        learn.distrib_fit(1, gpus=[0, 1])
        assert local.extra_env == {'NCCL_P2P_DISABLE': '1'}
        learn.distrib_fit(1, gpus=[0, 1])
    out = said.getvalue()
    assert out.count("can't exchange data directly") == 1 and WRONG[wrong] in out, out


# The notebook's own device

@pytest.mark.full
@on_gpus()
def test_a_fit_in_this_process_leaves_the_current_device():
    torch.vgpu.set_device(1)
    learn = learner(device=gpu(1), n_train=12)
    learn.distrib_fit(1, launcher=InProcess(gpu=2))
    assert torch.vgpu.current_device() == 1 and places(learn) == {gpu(1)}


# A leaf that is no Parameter

class WithLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net, self.leaf = nn.Linear(36, 5), torch.ones(36, device=gpu(), requires_grad=True)
    def forward(self, x): return self.net(x.flatten(1)*self.leaf)


def all_leaves(model): return [[*model.net.parameters(), model.leaf]]


@pytest.mark.full
@on_gpus()
def test_a_leaf_that_a_splitter_adds_is_trained():
    one, many = (learner(bs, model=WithLeaf(), splitter=all_leaves) for bs in (12, 6))
    one.fit(2, .05)
    many.distrib_fit(2, .05, gpus=[0, 1])
    assert bool((one.model.leaf != 1).all())
    assert_alike(one, many)
    assert largest([one.model.leaf.detach()], [many.model.leaf.detach()]) < 1e-5


class Noise(Callback):
    "As torch's tutorials begin: `device = torch.device('cuda:0')`"
    run_valid = False
    def __init__(self, device): self.device = device
    def before_batch(self): self.learn.xb = (self.x+torch.zeros(1, device=self.device),)


@on_gpus()
def test_the_device_of_the_notebook_is_the_workers_own():
    "An attribute and a variable of a cell; the notebook's stay as they are"
    device = gpu(0)
    cb = Noise(device)
    loss = lambda p, y: nn.functional.cross_entropy(p, y, weight=torch.ones(p.shape[1], device=device))
    learner(cbs=cb, loss=loss).distrib_fit(1)
    assert cb.device == device == gpu(0)
