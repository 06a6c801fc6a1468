"""Streams that are as late as can be, in place of a GPU's: what is copied on a side stream is copied when somebody
waits for that"""
import contextlib
from types import SimpleNamespace
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from fastddp.launch.training import EpochStates
from fastddp.payload.host_copy import HostCopies


class Queued(TorchDispatchMode):
    "Inside, copies that don't block are put off"
    def __init__(self, todo):
        super().__init__()
        self.todo = todo
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket is torch.ops.aten.copy_ and args[2], f'{func} on the side stream'
        self.todo.append(lambda: args[0].copy_(args[1]))
        return args[0]


class LateModule:
    "As `torch.cuda`, with a side stream alone; notes who waits"
    def __init__(self, free): self.free, self.todo, self.waits = free, [], []
    def mem_get_info(self): return self.free, self.free
    def current_device(self): return 0
    def set_device(self, i): self.waits.append('host')
    def Stream(self):
        return SimpleNamespace(wait_stream=lambda o: self.waits.append('side'), record_event=lambda: self)
    def current_stream(self): return SimpleNamespace(wait_event=self.training_waits)
    def training_waits(self, event):
        self.waits.append('training')
        event.synchronize()
    def stream(self, s): return Queued(self.todo)
    def synchronize(self):
        while self.todo: self.todo.pop()()


class LateCopies(HostCopies):
    def __init__(self, free): super().__init__(LateModule(free), pin=False)
    def takes(self, s): return True


class LateStates(EpochStates):
    "Sends an epoch's state no earlier than at the next one, or when the fit is over; `made` has the streams of each"
    free, made = 0, []
    def __init__(self, ctx, capture): super().__init__(ctx, capture, lambda: LateCopies(self.free))
    def on_gpu(self): return True
    def start(self, copies, payload):
        self.made.append(copies.module.waits)
        self.waiting = copies, payload
    def finish(self):
        waiting, self.waiting = getattr(self, 'waiting', None), None
        if waiting: super().start(*waiting)
        super().finish()
