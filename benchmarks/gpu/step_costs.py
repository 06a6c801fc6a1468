"""What one training step costs beyond a hand-written DDP script, counted on two simulated GPUs (needs g++).

    python benchmarks/gpu/step_costs.py

writes the table into docs/gpus.md. The script is fastai's own Learner with `DistributedDataParallel(model)`, and
`SyncBatchNorm.convert_sync_batchnorm` where there are batch norms, on each rank of a group. Both make the same steps.
"""
import os, sys, time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT/'docs'/'gpus.md'
BEGIN, END = '<!-- step costs: rendered by benchmarks/gpu/step_costs.py -->', '<!-- end of step costs -->'
if __name__ == '__main__':
    sys.path[:0] = [str(ROOT/'tests'), str(ROOT)]
    # also for the helper
    os.environ |= dict(VGPU_COUNT='2', PYTHONPATH=os.pathsep.join([*sys.path[:2], os.environ.get('PYTHONPATH', '')]))

import simulated_gpu.device
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import fastddp.process.helper as helper
helper.preload('simulated_gpu.device')
from simulated_gpu.learners import *
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientClip
from fastddp.base import board, group

# Operations that start no kernel: they make another view of the same memory, or only allocate
NO_KERNEL = set('''alias as_strided detach empty empty_like empty_strided expand is_pinned lift_fresh new_empty permute
    reshape _reshape_alias select set_ slice split split_with_sizes squeeze t transpose unbind unsqueeze
    unsafe_split view view_as _unsafe_view _has_compatible_shallow_copy_type _local_scalar_dense'''.split())
COUNTED, TIMED = 4, range(6, 96)       # steps


class Operations(TorchDispatchMode):
    "Counts kernels and collectives by name, where a kernel has a tensor on a GPU"
    def __init__(self):
        super().__init__()
        self.kernels, self.collectives = Counter(), Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split('::')
        tensors = [t for o in (args, out) for t in tensors_of(o)]
        if name[0] == 'c10d': self.collectives[name[1].strip('_')] += 1
        elif name[1] not in NO_KERNEL and any(t.device.type == 'vgpu' for t in tensors): self.kernels[name[1]] += 1
        return out


def tensors_of(o):
    if isinstance(o, torch.Tensor): yield o
    elif isinstance(o, (tuple, list)):
        for x in o: yield from tensors_of(x)


class Begin(Callback):
    "Before all other callbacks of a batch"
    order, run_valid = -3_000_000, False
    def before_batch(self):
        self.learn.counts.begin(self.iter)


class Counts(Callback):
    "After all others: what a step has cost"
    order, run_valid = 3_000_000, False
    def __init__(self): self.seconds, self.found = [], None
    def begin(self, i):
        if i == COUNTED:
            self.waits, self.met = simulated_gpu.device.waits(), meetings()
            self.mode = Operations()
            self.mode.__enter__()
        self.at = time.thread_time()
    def after_batch(self):
        if self.iter in TIMED: self.seconds.append(time.thread_time()-self.at)
        if self.iter != COUNTED: return
        self.mode.__exit__(None, None, None)
        self.found = dict(kernels=dict(self.mode.kernels), collectives=dict(self.mode.collectives),
                          # without the vote at the end of before_batch, which `Begin` adds
                          meetings=meetings()-self.met-1, waits=simulated_gpu.device.waits()-self.waits)
        self.mode = None


def meetings(): return sum(b.meeting for b in board._boards.values())

KINDS = {'a convnet': {}, 'the same with a batch norm': dict(norm=nn.BatchNorm2d),
         'with `to_fp16`': dict(cbs=MixedPrecision), 'with `GradientClip`': dict(cbs=GradientClip)}


CPU = torch.device('cpu')


def made(device, norm=nn.Identity, cbs=None):
    cbs = [cbs()] if cbs else []
    learn = learner(6, device=device, n_train=1200, model=convnet(norm), cbs=[Begin(), Counts(), *cbs])
    learn.metrics = []
    return learn


def of_ours(device, kwargs):
    learn = made(device, **kwargs)
    learn.distrib_fit(1, gpus=[] if device is CPU else [0, 1], nprocs=2)
    return learn.counts.found, min(learn.counts.seconds)


def of_script(device, kwargs):
    "On one rank of a group: a fit of fastai's with torch's DDP"
    device = CPU if device.type == 'cpu' else gpu(group.rank())
    learn = made(device, **kwargs)
    syncs = 'norm' in kwargs and device is not CPU
    model = nn.SyncBatchNorm.convert_sync_batchnorm(learn.model) if syncs else learn.model
    learn.model = nn.parallel.DistributedDataParallel(model)
    for k in 'WORLD_SIZE', 'RANK': os.environ.pop(k, None)      # fastai would gather by itself
    learn.fit(1)
    return learn.counts.found, min(learn.counts.seconds)


def row(name, kwargs):
    ours, _ = of_ours(gpu(), kwargs)
    script, _ = in_torchddp(2, of_script, gpu(), kwargs)
    print(name, ours, script, sep='\n  ', flush=True)
    more = [sum(ours[k].values())-sum(script[k].values()) for k in ('kernels', 'collectives')]
    more += [ours['meetings'], ours['waits']-script['waits']]
    return f"| {name} | {' | '.join(f'{o:+d}' for o in more)} |"


def host_ms(turns=4):
    "Milliseconds of the main thread's in the shortest step beyond the script's, of two workers on the CPU"
    ours, script = zip(*[(of_ours(CPU, {})[1], in_torchddp(2, of_script, CPU, {}, use_gpu=False)[1])
                         for _ in range(turns)])
    print('host', ours, script, flush=True)
    return (min(ours)-min(script))*1e3


def main():
    rows = [row(*o) for o in KINDS.items()]
    table = '\n'.join(['| a step of | kernels | collectives | meetings on the host | waits for the GPU |',
                       '|---|---|---|---|---|', *rows, '',
                       f'The host is busy for {host_ms():.1f} ms more, an estimate on two busy cores: what '
                       'the main thread of a worker '
                       'on the CPU needs for the shortest of its steps beyond that of the script. To start the kernels '
                       'comes on top, some 5 µs each.'])
    print(table)
    if '--dry' in sys.argv: return
    before, _, rest = PAGE.read_text(encoding='utf-8').partition(BEGIN)
    PAGE.write_text(before+BEGIN+'\n\n'+table+'\n\n'+END+rest.partition(END)[2], encoding='utf-8')


if __name__ == '__main__': main()
