"""How long from the call to the first training step, and what a second fit in a block costs?

Cases: a first fit with the helper process ready; a second fit in a `distrib_ctx` block, and the end of the block;
the same fit with workers that start by spawn (no helper); and the peers (peers.py), each up to its first
all-reduce.

    python benchmarks/launch.py [--repeats 5] [--machine NAME]
"""
import os, time
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


def first_fit():
    learn = quiet()
    with learn.no_bar(), learn.no_logging():
        called = time.time()
        learn.distrib_fit(1, nprocs=2)
    return learn.clock.first-called


def without_helper():
    os.environ['FASTDDP_PRELOAD'] = '0'
    try: return first_fit()
    finally: del os.environ['FASTDDP_PRELOAD']


def block():
    "Seconds of a block's second call that aren't rank 0's training, and those that leaving the block takes"
    learn = quiet()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        called = time.time()
        learn.fit(1)
        over = time.time()
    return (over-called) - (learn.clock.ended-learn.clock.began), time.time()-over


def second_fit(): return block()[0]
def leaving(): return block()[1]


def main():
    args = arguments(__doc__)
    helper.warm()
    first_fit()     # the helper is ready after this
    times = take_turns({'first fit': first_fit, 'second fit in a block': second_fit, 'leaving the block': leaving,
                        'without the helper': without_helper, **installed()}, args.repeats)
    rows = summary(times, 'torch spawn')
    show('Seconds from the call to the first training step (second fit: all that is not training), 2 CPU workers', rows)
    if not args.small: save('launch', args.machine, unit='seconds', rows=rows, times=times)


if __name__ == '__main__': main()
