"""Devices, contexts and memory: what is promised about where things are"""
import torch
from fastai.callback.core import Callback
from fastddp.base import group
from fastddp.all import *
from . import machine
from .learners import learner


def contexts():
    "For each GPU: does this process have a context there?"
    if machine.DRY or machine.device().type != 'cuda': return []
    return [float(torch._C._cuda_hasPrimaryContext(i)) for i in range(machine.n_gpus())]


class Witness(Callback):
    "What each rank saw of the GPUs: its device, and the devices on which its process has a context"
    def __init__(self): self.ranks = None
    def after_fit(self):
        own = next(self.learn.model.parameters()).device.index
        self.ranks = group.all_gather_object([-1. if own is None else float(own), *map(float, contexts())])


def fit_and_look(table, name, expected, **options):
    "Two distributed fits of one learner, and whether each promise held"
    learn = learner(cbs=Witness())
    with learn.no_bar(): learn.fit(1, 1e-3)                 # this process has used the GPU: no restart is needed
    params, types = list(learn.model.parameters()), [type(m) for m in learn.model.modules()]
    home, before = params[0].device, machine.settled()
    for again in range(2):
        with learn.no_bar(): learn.distrib_fit(1, 1e-3, **options)
        seen = learn.witness.ranks
        table.add(f'{name}, fit {again+1}: device of each rank', [r[0] for r in seen] == expected, [r[0] for r in seen])
        table.add(f'{name}, fit {again+1}: one context per worker, on its own GPU',
                  all(r[1:] == [float(i == gpu) for i in range(len(r)-1)] for r, gpu in zip(seen, expected)))
    table.add(f'{name}: the same parameters, back on {home}',
              all(p is q and p.device == home for p, q in zip(params, learn.model.parameters())))
    table.add(f'{name}: the same types of modules (no SyncBatchNorm left)',
              types == [type(m) for m in learn.model.modules()])
    left = [b-a for a, b in zip(before, machine.settled())]
    table.add(f'{name}: GPU memory afterwards as before', all(o < 32*2**20 for o in left),
              f'{[round(o/2**20) for o in left]} MiB more')
    with learn.no_bar(): learn.fit(1, 1e-3)
    table.add(f'{name}: trains on in this process', len(learn.recorder.values) == 1)


def check(table):
    one, n = machine.ranks(1), machine.n_gpus()
    cpu = machine.DRY
    fit_and_look(table, f'1 {machine.backend()} rank', [-1] if cpu else [0], **one)
    fit_and_look(table, '2 gloo ranks on one GPU', [-1, -1] if cpu else machine.shared_gpus(2),
                 **machine.ranks(2, shared=True))
    if n > 1:
        fit_and_look(table, f'{n} ranks', [-1]*n if cpu else list(range(n)), **machine.chosen(n))
        fit_and_look(table, 'the last two GPUs in reverse', [-1, -1] if cpu else [n-1, n-2],
                     **machine.chosen(2, [n-1, n-2]))
    offloaded(table)
    beside_jobs(table)


def beside_jobs(table):
    "Where is the learner while a job trains on its GPU, and afterwards?"
    learn = learner()
    with learn.no_bar(): learn.fit(1, 1e-3)
    home = place(learn)
    options = dict(nprocs=2, gpus=[]) if machine.DRY else dict(gpus=[home.index])
    job = learn.distrib_fit(1, wait=False, **options)
    while_it_runs = place(learn)
    job.result()
    table.add('a job: the learner stays where it is', place(learn) == while_it_runs == home)
    table.add('a job: a line says what the learner keeps', machine.DRY or 'learn keeps' in job.log)


def place(learn): return next(learn.model.parameters()).device


def offloaded(table):
    "Does this process hold the model on its GPU while workers train?"
    learn, seen = learner(), []
    class Spy(Local):
        def run(self, *args, **kwargs):
            seen.append((next(learn.model.parameters()).device.type, machine.allocated()))
            return super().run(*args, **kwargs)
    with learn.no_bar(): learn.distrib_fit(1, nprocs=1, launcher=Spy(gpus=[] if machine.DRY else [0]))
    table.add("the notebook's copy lies on the CPU while workers train", seen[0][0] == 'cpu',
              f'{seen[0][1]/2**20:.1f} MiB still allocated')
