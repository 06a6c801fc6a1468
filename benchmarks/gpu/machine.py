"""The machine at hand: its GPUs, or, in a dry run, the CPU in their place, so that every line runs without one.

Whatever differs between the two stands here. A dry run proves that the checks work, and nothing about GPUs. Simulated
GPUs (tests/simulated_gpu) show where tensors are and what is computed, and nothing about speed, NCCL and drivers.
"""
import os, statistics, time
import torch
from fastddp.all import Local

KIND = os.environ.get('FASTDDP_GPU_CHECK')      # set by `gpu_check.py`, so that workers know it, too
DRY, SIMULATED = KIND == 'dry', KIND == 'simulated'


def n_gpus(): return 2 if DRY else torch.accelerator.device_count()
def device(i=0): return torch.device('cpu') if DRY else torch.device(torch.accelerator.current_accelerator().type, i)
def name(): return 'dry run on the CPU' if DRY else torch.get_device_module().get_device_name(0)
def backend(): return 'gloo' if DRY else 'vccl' if SIMULATED else 'nccl'
def size(real, dry): return dry if DRY or SIMULATED else real


def ranks(n, shared=False, **options):
    "Options of a distributed word: `n` ranks on a GPU each, or by gloo on the first, where `shared`"
    gpus = [] if DRY else shared_gpus(n) if shared else list(range(n))
    backend = 'gloo' if DRY or shared and not SIMULATED else None
    return dict(nprocs=n, launcher=Local(gpus=gpus, backend=backend, **options))


def two():
    "Those of two ranks: by NCCL where there are two GPUs"
    return ranks(2, shared=not DRY and n_gpus() < 2)


def two_are(): return 'gloo on the CPU' if DRY else f'{backend()} on two GPUs' if n_gpus() > 1 else 'gloo on one GPU'


def shared_gpus(n):
    "Those of `n` ranks that share one; gloo takes no tensors of simulated GPUs, so there each has its own"
    return list(range(n)) if SIMULATED else [0]*n


def use_first():
    if not DRY: torch.get_device_module().set_device(0)


def chosen(n, gpus=None):
    "The same as a user gives them: all GPUs, or `gpus`"
    return dict(nprocs=n, gpus=[]) if DRY else {} if gpus is None else dict(gpus=gpus)


def synchronize():
    if not DRY: torch.accelerator.synchronize()


def empty_cache():
    if not DRY: torch.get_device_module().empty_cache()


def used():
    "Bytes in use on each GPU, by everyone"
    if DRY: return [0]*n_gpus()
    free = [torch.get_device_module().mem_get_info(i) for i in range(n_gpus())]
    return [total-left for left, total in free]


def settled():
    "Bytes in use on each GPU once they stop becoming less: a process that ends gives its memory back a little later"
    empty_cache()
    before, now = None, used()
    while before is None or now < before:
        time.sleep(.5)
        before, now = now, used()
    return now


def allocated(): return 0 if DRY else torch.get_device_module().memory_allocated()


def median_ratio(a, b):
    "Median of `a` over that of `b`, each without its first, which warms up, where there are more"
    return statistics.median(a[1:] or a)/statistics.median(b[1:] or b)
