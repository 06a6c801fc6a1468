"""GPU memory over many fits, and what a full GPU leads to"""
import threading
import torch
from fastai.callback.core import Callback
from fastddp.base import group
from fastddp.all import *
from . import machine
from .learners import learner


class OutOfMemory(Callback):
    "In the second batch of the last rank there is no memory left"
    run_valid = False
    def before_batch(self):
        if self.iter != 1 or group.rank() != group.world_size()-1: return
        if machine.DRY or machine.SIMULATED:
            raise torch.OutOfMemoryError('CUDA out of memory. (A dry run has none that could end.)')
        self.kept = [torch.empty(2**36, dtype=torch.uint8, device=self.learn.dls.device) for _ in range(100)]


class Sampler(threading.Thread):
    "Bytes in use on the first GPU, every 20 ms"
    def __init__(self): super().__init__(daemon=True); self.seen, self.over = [], threading.Event()
    def run(self):
        while not self.over.wait(.02): self.seen.append(machine.used()[0])


def many_fits(table, fits):
    "Memory after each of `fits` fits, a failing one among them, in a process that has used its GPU before"
    learn = learner(n=machine.size(1024, 32))
    options, after = machine.two(), []
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        for i in range(fits):
            if i == fits//2: fails(learn, options)
            learn.distrib_fit(1, **options)
            after.append(machine.settled()[0])
    grown = (after[-1]-after[min(2, fits-1)])/2**20
    table.add(f'{fits} fits and a failure: GPU memory flat to 1 MiB', abs(grown) <= 1, f'{grown:.2f} MiB more')


def fails(learn, options):
    cb = OutOfMemory()
    learn.add_cb(cb)
    try: learn.distrib_fit(1, **options)
    except RankRaised as e: return e
    finally: learn.remove_cb(cb)


def full(table):
    "A GPU without memory: the right error, and the next fit works"
    learn, options = learner(n=machine.size(2048, 64)), machine.two()
    with learn.no_bar(), learn.no_logging():
        e = fails(learn, options)
        table.add('out of memory on one rank: RankRaised says so', e is not None and 'OutOfMemoryError' in str(e),
                  str(e).split('\n')[0][:200])
        learn.distrib_fit(1, **options)
    table.add('out of memory on one rank: the next fit works', len(learn.recorder.values) == 1)


def over_time(table):
    "GPU memory while a fit runs, the notebook's own copy taken off"
    learn = learner()
    machine.empty_cache()
    own, sampler = machine.used()[0], Sampler()
    sampler.start()
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(2, **machine.ranks(1))
    sampler.over.set()
    sampler.join()
    table.about('GPU memory of one rank at its most, MiB beyond the notebook', round((max(sampler.seen)-own)/2**20))


def check(table):
    over_time(table)
    full(table)
    many_fits(table, machine.size(50, 3))
