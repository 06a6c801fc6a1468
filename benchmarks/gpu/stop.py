"""Stopping in the middle of a step, and failing there"""
import os, signal, threading
from fastai.callback.core import Callback
from fastddp.all import *
from . import machine
from .learners import learner


class Stopper(Callback):
    "Presses the notebook's stop button from rank 0, in its second step of the second epoch"
    run_valid = False
    def __init__(self): self.notebook, self.batches = os.getpid(), 0
    def after_pred(self):
        self.batches += 1
        if self.iter == 1 and self.epoch == 1 and os.environ.get('RANK') == '0': os.kill(self.notebook, signal.SIGINT)


class Fails(Callback):
    "On rank 1, in the second batch of the second epoch: where all ranks raise an error, the learner is as at that"
    run_valid = False
    def before_batch(self):
        if (self.epoch, self.iter, os.environ.get('RANK')) == (1, 1, '1'): raise RuntimeError('on purpose')


def trained(epochs, cbs=()):
    learn = learner(cbs=cbs)
    learn.dls.train.rng.seed(1)
    with learn.no_bar(), learn.no_logging():
        try: learn.distrib_fit(epochs, 1e-3, **machine.two())
        except RankRaised: pass
    return learn.model


def complete(table):
    "An epoch's state is copied while the next one runs, and still is that of the end of its epoch"
    expected, found = trained(1).state_dict(), trained(3, Fails()).state_dict()
    apart = max((found[k].float()-v.float()).abs().max().item() for k, v in expected.items())
    table.add('a fit that fails leaves the last complete epoch', apart < 1e-4, f'{apart:.1e} apart')


def check(table):
    complete(table)
    if threading.current_thread() is not threading.main_thread(): raise RuntimeError('signals need the main thread')
    learn, before = learner(cbs=Stopper()), machine.settled()
    stopped = False
    try:
        with learn.no_bar(), learn.no_logging(): learn.distrib_fit(50, **machine.two())
    except KeyboardInterrupt: stopped = True
    table.add('interrupt within a step: KeyboardInterrupt', stopped)
    learn.remove_cb(Stopper)
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, **machine.two())
    table.add('interrupt within a step: the next fit works', len(learn.recorder.values) == 1)
    left = [b-a for a, b in zip(before, machine.settled())]
    table.add('interrupt within a step: no memory left', all(o < 32*2**20 for o in left), f'{left} bytes')
