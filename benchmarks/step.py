"""Where the time of one training step goes, ours and the hand-written script's side by side.

Both are profiled on rank 0 of 2 over the second epoch, by Python's own profiler: time spent in a function itself,
summed by the package it belongs to. A profiler makes Python code look slower than it is (by half or more) and C++
code not, so this says *where* the time goes; *how much* it is, throughput.py says. `backward` is the backward pass
with the communication inside it.

    python benchmarks/step.py [--cases convnet,mlp] [--machine NAME]
"""
import cProfile, json, os, pstats, statistics, sys, time
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.shard.same_model import _hash
from cases import CASES
from common import arguments, save, show
from throughput import PLAIN, by_hand, one_epoch, run_self, torchrun

PLACES = {'/fastddp/': 'fastddp', '/fastai/': 'fastai and fastcore', '/fastcore/': 'fastai and fastcore',
          '/torch/utils/data/': "torch's DataLoader",
          '/torch/nn/parallel/': 'DDP', '/torch/optim/': 'optimizer', '/torch/': "torch's other Python"}


def place(func):
    "The package that a function of a profile belongs to"
    file, _, name = func
    if 'run_backward' in name: return 'backward'
    if file == '~': return 'operations in C and C++'
    return next((to for part, to in PLACES.items() if part in file), 'other Python')


def by_place(profile, steps):
    "Microseconds per step"
    res = {}
    for func, (_, _, own, *_) in pstats.Stats(profile).stats.items():
        res[place(func)] = res.get(place(func), 0.) + own/steps*1e6
    return res


class Profiler(Callback):
    "Profiles the second epoch of rank 0"
    order, rank0_only = -3_000_000, True
    def before_train(self):
        if self.epoch == 1:
            self.profile = cProfile.Profile()
            self.profile.enable()
    def after_train(self):
        if self.epoch != 1: return
        self.profile.disable()
        self.found = by_place(self.__dict__.pop('profile'), self.learn.iter+1)


def ours(name):
    learn = CASES[name].learner(2).add_cb(Profiler())
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(2, nprocs=2, launcher=Local(gpus=[], threads=1))
    return learn.profiler.found


def digest_row(name):
    "Microseconds of the comparison of weights at the end of an epoch, spread over the epoch's steps"
    learn = CASES[name].learner(2)
    params, times = list(learn.model.parameters()), []
    for _ in range(20):
        at = time.perf_counter()
        for p in params: _hash(p)
        times.append(time.perf_counter()-at)
    ours = round(statistics.median(times)*1e6/len(learn.dls.train))
    return dict(where='digest of the weights, once an epoch', ours=ours, script=0)


class MeetClock(Callback):
    "Notes how long this rank is at a meeting of a training batch, waiting for the others included"
    def before_fit(self):
        from fastddp.base import board
        self.seconds, meet = [], board.Board.meet
        def timed(*args, **kwargs):
            at = time.perf_counter()
            try: return meet(*args, **kwargs)
            finally: self.seconds.append(time.perf_counter()-at)
        self.real, board.Board.meet = meet, timed
    def after_fit(self):
        from fastddp.base import board
        board.Board.meet = self.__dict__.pop('real')


def meet_row(name):
    "Microseconds of a meeting at the board, the median"
    learn = CASES[name].learner(2).add_cb(MeetClock())
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(2, nprocs=2, launcher=Local(gpus=[], threads=1))
    ours = round(statistics.median(learn.meet_clock.seconds)*1e6)
    return dict(where='the meeting, with waiting (in the rows above)', ours=ours, script=0)


class ClockCost(Callback):
    "Notes what the clock of `learn.distrib_report` costs in a step: how often it is called, times what a call takes"
    CALLS = dict(enter=lambda cb: ('after_batch', cb.learn), lap=lambda cb: ('other',),
                 leave=lambda cb: ('after_batch',), spent_now=lambda cb: (), end_meeting=lambda cb: ([(0., 0.)]*2,))
    def before_fit(self):
        self.calls, clock = dict.fromkeys(self.CALLS, 0), self.learn._call_one.together.clock
        def counted(name, real):
            def call(*args):
                self.calls[name] += 1
                return real(*args)
            return call
        for name in self.CALLS: setattr(clock, name, counted(name, getattr(clock, name)))
    def after_fit(self):
        clock, steps, self.seconds = self.learn._call_one.together.clock, 2*len(self.dls.train), 0.
        for name in self.CALLS: vars(clock).pop(name)
        depth = clock.depth
        for name, args in self.CALLS.items():
            call, given, begun = getattr(clock, name), args(self), int(name == 'leave')
            # a lap within these two is counted already
            if name in ('enter', 'leave'): clock.lap = lambda kind: 0.
            at = time.perf_counter()
            for _ in range(10_000):
                clock.depth = begun
                call(*given)
            self.seconds += (time.perf_counter()-at)/10_000*self.calls[name]/steps
            vars(clock).pop('lap', None)
        clock.depth = depth


def clock_row(name):
    learn = CASES[name].learner(2).add_cb(ClockCost())
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(2, nprocs=2, launcher=Local(gpus=[], threads=1))
    return dict(where='the clock of the report', ours=round(learn.clock_cost.seconds*1e6), script=0)


def raw(name):
    with by_hand(name) as (_, s, model, opt, rank):
        one_epoch(s, model, opt, 0)
        profile = cProfile.Profile()
        profile.enable()
        steps = one_epoch(s, model, opt, 1)
        profile.disable()
        if rank == 0: print('SECONDS', json.dumps(by_place(profile, steps)), flush=True)


def main():
    args, results = arguments(__doc__, cases='convnet,mlp'), {}
    for name in args.cases.split(','):
        sides = dict(ours=ours(name), script=run_self([*torchrun(2), __file__, '--raw', name], PLAIN))
        places = sorted({p for s in sides.values() for p in s}, key=lambda p: -sides['ours'].get(p, 0))
        rows = [dict(where=p, **{k: round(v.get(p, 0)) for k, v in sides.items()}) for p in places]
        rows.append(dict(where='together', **{k: round(sum(v.values())) for k, v in sides.items()}))
        rows += [digest_row(name), meet_row(name), clock_row(name)]
        show(f'{name}: microseconds per step on rank 0, under the profiler', rows)
        results[name] = dict(rows=rows)
    save('step', args.machine, unit='microseconds per step, profiled', **results)


if __name__ == '__main__': raw(sys.argv[2]) if sys.argv[1:2] == ['--raw'] else main()
