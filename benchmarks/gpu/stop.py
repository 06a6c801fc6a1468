"""Stopping in the middle of a step"""
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


def check(table):
    if threading.current_thread() is not threading.main_thread(): raise RuntimeError('signals need the main thread')
    learn, before = learner(cbs=Stopper()), machine.settled()
    stopped = False
    try:
        with learn.no_bar(), learn.no_logging(): learn.distrib_fit(50, **machine.ranks(2, shared=True))
    except KeyboardInterrupt: stopped = True
    table.add('interrupt within a step: KeyboardInterrupt', stopped)
    learn.remove_cb(Stopper)
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, **machine.ranks(2, shared=True))
    table.add('interrupt within a step: the next fit works', len(learn.recorder.values) == 1)
    left = [b-a for a, b in zip(before, machine.settled())]
    table.add('interrupt within a step: no memory left', all(o < 32*2**20 for o in left), f'{left} bytes')
