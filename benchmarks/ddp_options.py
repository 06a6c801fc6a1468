"""What DDP's own options do to a step of ours: the defaults are chosen by this, and by nothing else.

    python benchmarks/ddp_options.py [--cases convnet,mlp] [--repeats 5] [--machine NAME]
"""
import statistics
from fastddp.all import *
from cases import CASES
from common import arguments, save, show, take_turns
from throughput import StepClock

OPTIONS = {'defaults': {}, 'gradient_as_bucket_view': dict(gradient_as_bucket_view=True),
           'static_graph': dict(static_graph=True),
           'buckets of 1 MB': dict(bucket_cap_mb=1), 'buckets of 100 MB': dict(bucket_cap_mb=100)}


def step(name, options):
    "Seconds per step of 2 ranks"
    case = CASES[name]
    learn = case.learner(2).add_cb(StepClock())
    with learn.no_bar(), learn.no_logging():
        learn.distrib_fit(case.epochs, nprocs=2, launcher=Local(gpus=[], threads=1), **options)
    return learn.step_clock.seconds


def main():
    args, results = arguments(__doc__, cases='convnet,mlp'), {}
    for name in args.cases.split(','):
        times = take_turns({k: lambda o=o: step(name, o) for k, o in OPTIONS.items()}, args.repeats)
        base = statistics.median(times['defaults'])
        rows = [dict(options=k, ms_per_step=round(statistics.median(v)*1e3, 3), least=round(min(v)*1e3, 3),
                     most=round(max(v)*1e3, 3),
                     over_defaults=round(statistics.median(v)/base, 3)) for k, v in times.items()]
        show(f'{name}: ms per step, 2 ranks of 1 thread', rows)
        results[name] = dict(rows=rows, times=times)
    save('ddp_options', args.machine, unit='milliseconds per step', **results)


if __name__ == '__main__': main()
