"""Does a step wait for the GPU more often than fastai's own? Counted by torch, and seen in a trace"""
import warnings
from functools import partial
import torch
from fastai.callback.core import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from fastddp.all import *
from . import machine
from .learners import convnet, learner
from .parity import plain_norm

aten = torch.ops.aten


class HostReads(TorchDispatchMode):
    "Notes every operation that brings a value from a device to the host, or takes one there and waits"
    def __init__(self, device_type='cuda'):
        super().__init__()
        self.device_type, self.found = device_type, []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._waits(func, args, kwargs, out): self.found.append(str(func.overloadpacket))
        return out

    def _here(self, o): return isinstance(o, torch.Tensor) and o.device.type == self.device_type
    def _waits(self, func, args, kwargs, out):
        name = func.overloadpacket
        if name in (aten._local_scalar_dense, aten.equal, aten.nonzero): return self._here(args[0])
        if name is aten._to_copy: return self._here(args[0]) != self._here(out) and not kwargs.get('non_blocking')
        if name is aten.copy_: return self._here(args[0]) != self._here(args[1]) and not (len(args) > 2 and args[2])
        return False


class CountWaits(Callback):
    """Waits in the training steps of the second epoch, by rank 0, from the third to the last but one: what an epoch
    begins and ends with is left out"""
    order, run_valid = -100, False
    def __init__(self): self.per_step = self.kinds = None
    def before_batch(self):
        if self.epoch != 1: return
        if self.iter == 2: self._begin()
        elif self.iter == self.n_iter-1: self._end()
    def _begin(self):
        self.seen = _ByDispatch() if machine.DRY else _BySimulation() if machine.SIMULATED else _BySyncDebug()
        self.seen.__enter__()
    def _end(self):
        self.seen.__exit__(None, None, None)
        kinds = self.seen.kinds()
        self.per_step, self.kinds, self.seen = len(kinds)/(self.n_iter-3), sorted(set(kinds)), None


class _ByDispatch(HostReads):
    def __init__(self): super().__init__('cpu')
    def _waits(self, func, args, kwargs, out): return func.overloadpacket is aten._local_scalar_dense
    def kinds(self): return self.found


class _BySimulation:
    "The simulated device counts"
    def _now(self):
        from simulated_gpu import device
        return device.waits()
    def __enter__(self): self.start = self._now()
    def __exit__(self, *args): self.n = self._now()-self.start
    def kinds(self): return ['wait']*self.n


class _BySyncDebug(warnings.catch_warnings):
    "torch warns of each call that synchronises"
    def __init__(self): super().__init__(record=True)
    def __enter__(self):
        self.said = super().__enter__()
        warnings.simplefilter('always')
        torch.cuda.set_sync_debug_mode('warn')
    def __exit__(self, *args):
        torch.cuda.set_sync_debug_mode('default')
        return super().__exit__(*args)
    def kinds(self): return [f'{o.filename}:{o.lineno}' for o in self.said if 'synchroniz' in str(o.message)]


class Trace(Callback):
    "Some steps under torch's profiler: microseconds per step, and how long of them no kernel ran"
    order, run_valid, steps = -99, False, machine.size(20, 2)
    def __init__(self): self.step_us = self.idle_us = None
    def before_batch(self):
        if (self.epoch, self.iter) != (1, 2) or machine.SIMULATED: return
        acts = [torch.profiler.ProfilerActivity.CPU, *([] if machine.DRY else [torch.profiler.ProfilerActivity.CUDA])]
        self.prof = torch.profiler.profile(activities=acts)
        self.prof.start()
    def after_train(self): self._end()
    def after_batch(self):
        if (self.epoch, self.iter) == (1, 1+self.steps): self._end()
    def _end(self):
        if getattr(self, 'prof', None) is None: return
        machine.synchronize()
        self.prof.stop()
        on_gpu = [o.time_range for o in self.prof.events() if o.device_type != torch.autograd.DeviceType.CPU]
        self.prof = None
        on_gpu.sort(key=lambda o: o.start)
        if not on_gpu: return
        end, idle = on_gpu[0].start, 0
        for o in on_gpu:
            idle, end = idle+max(0, o.start-end), max(end, o.end)
        self.step_us, self.idle_us = (end-on_gpu[0].start)/self.steps, idle/self.steps


def counted(name, fit):
    # gloo has the host wait when statistics of a batch norm are exchanged
    make = partial(convnet, plain_norm) if 'gloo' in name else convnet
    learn = learner(make, n=machine.size(8192, 128), cbs=[CountWaits(), Trace()])
    with learn.no_bar(), learn.no_logging(): fit(learn)
    return learn


def check(table):
    kinds = {'plain learn.fit': lambda learn: learn.fit(2, 1e-3),
             '1 rank': lambda learn: learn.distrib_fit(2, 1e-3, **machine.ranks(1)),
             '2 gloo ranks on one GPU': lambda learn: learn.distrib_fit(2, 1e-3, **machine.ranks(2, shared=True))}
    if machine.n_gpus() > 1:
        n = machine.n_gpus()
        kinds[f'{n} ranks'] = lambda learn: learn.distrib_fit(2, 1e-3, **machine.ranks(n))
    found = {name: counted(name, fit) for name, fit in kinds.items()}
    plain = found['plain learn.fit'].count_waits
    for name, learn in found.items():
        waits, trace = learn.count_waits, learn.trace
        promised = None if machine.DRY or 'gloo' in name or learn is found['plain learn.fit'] else True
        if promised: promised = waits.per_step <= plain.per_step
        table.add(f'{name}: waits per step', promised, f'{waits.per_step:.2f}: {", ".join(waits.kinds)}')
        if trace.step_us: table.about(f'{name}: microseconds per step, and without a kernel of them',
                                      f'{trace.step_us:.0f}, {trace.idle_us:.0f}')
