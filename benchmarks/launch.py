"""How long from the call to the first training step, and what a second fit in a block costs?

Cases: a first fit with the helper process ready; a second fit in a `distrib_ctx` block, and the end of the block;
the same fit with workers that start by spawn (no helper); and the peers (peers.py), each up to its first
all-reduce.

    python benchmarks/launch.py [--repeats 5] [--machine NAME] [--library transformers.models.bert.modeling_bert]

With a library, of which the learner has a class: a first fit whose workers import it, and one after the helper has.
"""
import importlib, time
from fastai.callback.core import Callback
from fastddp.process import helper
from fastddp.all import *
from common import arguments, learner, mlp, save, show, summary, take_turns
from peers import installed


class Clock(Callback):
    "When rank 0 took its first step, and when its fit began and ended (seconds since 1970, one clock for all)"
    def __init__(self): self.first = self.began = self.ended = None
    def before_fit(self): self.began, self.first = time.time(), None
    def after_step(self): self.first = self.first or time.time()
    def after_fit(self): self.ended = time.time()


def quiet(): return learner(mlp, (64,), n=512, bs=32, cbs=Clock())


def wait_for_helper():
    "A worker that has imported something has the next helper start, beside what is measured"
    while helper.ensure_helper() and helper._next: time.sleep(.1)


def first_fit():
    wait_for_helper()
    return fit()


def fit():
    learn = quiet()
    with learn.no_bar(), learn.no_logging():
        called = time.time()
        learn.distrib_fit(1, nprocs=2)
    return learn.clock.first-called


def without_helper():
    helper._is_helper_off = True
    try: return fit()
    finally: helper._is_helper_off = False


def block():
    "Seconds of a block's second call that aren't rank 0's training, and those that leaving the block takes"
    wait_for_helper()
    learn = quiet()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        called = time.time()
        learn.fit(1)
        over = time.time()
    return (over-called) - (learn.clock.ended-learn.clock.began), time.time()-over


def second_fit(): return block()[0]
def leaving(): return block()[1]


def with_library(name):
    "Seconds to the first step with a helper that hasn't imported the library, and with the next one that has"
    cls = next(o for o in vars(importlib.import_module(name)).values() if isinstance(o, type) and o.__module__ == name)
    def fit_with_library():
        learn = quiet()
        learn.clock.cls = cls
        with learn.no_bar(), learn.no_logging():
            called = time.time()
            learn.distrib_fit(1, nprocs=2)
        return learn.clock.first-called
    def imported_by_workers():
        with helper._lock:      # a new helper, without libraries
            if helper._helper: helper._helper.sock.close()
            helper._helper = None
        first_fit()
        return fit_with_library()
    def imported_by_helper():
        wait_for_helper()
        return fit_with_library()
    return {'workers import the library': imported_by_workers, 'the helper has': imported_by_helper}


def main():
    args = arguments(__doc__, library='')
    helper.warm()
    first_fit()     # the helper is ready after this
    if args.library:
        rows = summary(take_turns(with_library(args.library), args.repeats), 'the helper has')
        return show('Seconds from the call to the first training step, 2 CPU workers', rows)
    times = take_turns({'first fit': first_fit, 'second fit in a block': second_fit, 'leaving the block': leaving,
                        'without the helper': without_helper, **installed()}, args.repeats)
    rows = summary(times, 'torch spawn')
    show('Seconds from the call to the first training step (second fit: all that is not training), 2 CPU workers', rows)
    if not args.small: save('launch', args.machine, unit='seconds', rows=rows, times=times)


if __name__ == '__main__': main()
