"""What a first GPU shows in two minutes: a GPU that is full, an error on it, each collective and kernel once"""
import warnings
import torch
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.base import group
from fastddp.ranch import TorchDDPCtx, ranch
from torch.nn import functional as F
from . import machine
from .learners import learner, torch_loaders, pictures, convnet


def check(table):
    full(table)
    assertion(table)
    found = ranch(1, collectives, caller_rank=None, ctx=TorchDDPCtx(world_size=1))[0]
    for what, ok, detail in found: table.add(f'one {machine.backend()} rank: {what}', ok, detail)
    with_loader_processes(table)


# A full GPU: those who try two because one was too small

class Exhausts(Callback):
    def before_batch(self):
        if machine.DRY or machine.SIMULATED: raise torch.OutOfMemoryError('CUDA out of memory. (A dry run.)')
        self.kept = [torch.empty(2**32, dtype=torch.uint8, device=self.dls.device) for _ in range(1000)]


def full(table):
    learn, on_cpu = learner(), learner(device='cpu')
    on_cpu.model.cpu()
    with learn.no_bar(), learn.no_logging(), on_cpu.no_bar(), on_cpu.no_logging():
        try: learn.fit(1, cbs=Exhausts())
        except torch.OutOfMemoryError: pass
        learn.remove_cbs([o for o in learn.cbs if isinstance(o, Exhausts)])
        learn.distrib_fit(1, **machine.ranks(1))
        table.add('after a local fit that ran out of memory: a fit on one rank', len(learn.recorder.values) == 1)
        preds = on_cpu.distrib_get_preds(**machine.ranks(1))[0]
        table.add('after it: predictions of a learner on the CPU', bool(preds.isfinite().all()))
    said = ranch(1, lambda: float(torch.ones(2**20, device=machine.device()).sum()), caller_rank=None)
    table.add('after it: a function', said == [2.**20], said)


# An assertion on the GPU

def assertion(table):
    learn = learner()
    learn.model[-1] = torch.nn.Linear(learn.model[-1].in_features, 5).to(machine.device())      # labels go to 9
    with learn.no_bar(), learn.no_logging():
        try: learn.distrib_fit(1, **machine.ranks(1))
        except RankRaised as e: error = e
        else: error = None
        told = error is not None and ('device-side assert' in str(error) or machine.DRY or machine.SIMULATED)
        table.add('a label out of range: RankRaised with what happened', told, error and error.failure.message[:200])
        learn = learner()
        learn.distrib_fit(1, **machine.ranks(1))
    table.add('after it: the next fit works', len(learn.recorder.values) == 1)


# Collectives and kernels, in a group of one

def collectives():
    "Rows `(what, ok, detail)`, with warnings as errors: a user would see them in the progress bar"
    group._is_alone = lambda: False         # else a group of one calls none of them
    t = lambda: torch.arange(4., device=group.comm_device())
    kinds = dict(
        all_sum=lambda: group.all_sum([1, 2]) == [1, 2], barrier=lambda: group.barrier() is None,
        all_gather_stacked=lambda: torch.equal(group.all_gather_stacked(t()), t()[None]),
        all_gather_object=lambda: group.all_gather_object(dict(t=t()))[0]['t'].tolist() == [0, 1, 2, 3],
        from_rank0=lambda: group.from_rank0([1]) == [1],
        all_gather_tensors=lambda: torch.equal(group.all_gather_tensors([t()], [[(4,)]])[0][0], t()),
        sum_=lambda: unchanged(group.sum_, t()), broadcast_=lambda: unchanged(lambda x: group.broadcast_([x]), t()),
        average_=lambda: unchanged(lambda x: group.average_([x]), t()))
    if not machine.DRY:
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            for layout in torch.contiguous_format, torch.channels_last:
                name = f'{dtype}, {layout}'.replace('torch.', '')
                kinds[f'synchronized batch norm, {name}'] = lambda d=dtype, l=layout: batch_norm(d, l)
    rows = []
    for name, call in kinds.items():
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            try: rows.append((name, call(), ''))
            except Exception as e: rows.append((name, False, f'{type(e).__name__}: {e}'[:500]))
    return rows


def unchanged(change, t):
    before = t.clone()
    change(t)
    return torch.equal(t, before)


def batch_norm(dtype, layout):
    "Forward and backward of ours and of torch's batch norm, which are the same for one rank"
    from fastddp.shard.same_model import SyncBatchNorm
    torch.manual_seed(0)
    x = torch.randn(8, 16, 6, 6).to(machine.device(), dtype).to(memory_format=layout)
    found = []
    for ours in True, False:
        own = x.clone().requires_grad_()
        w, b = (torch.linspace(.5, 1.5, 16, device=x.device).requires_grad_() for _ in 'wb')
        mean, var = torch.zeros(16, device=x.device), torch.ones(16, device=x.device)
        y = (SyncBatchNorm.apply(own, w, b, mean, var, 1e-5, .1, group.key(), 1) if ours else
             F.batch_norm(own, mean, var, w, b, True, .1, 1e-5))
        (y.float()**3).sum().backward()
        found.append([o.float() for o in (y, own.grad, w.grad, b.grad, mean, var)])
    tol = 1e-4 if dtype == torch.float32 else 3e-2
    return all(torch.allclose(a, b, rtol=tol, atol=tol*float(b.detach().abs().max())) for a, b in zip(*found))


def with_loader_processes(table):
    x, y = pictures(machine.size(1024, 64))
    learn = learner()
    learn.dls = torch_loaders((x, y), 16, machine.size(128, 16), workers=2)
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, **machine.ranks(1))
    table.add('loader processes and pinned memory: trains', len(learn.recorder.values) == 1)
