"""Seconds per training step of a distributed fit, over those of a hand-written DDP script under torchrun.

Same model, batch, data in memory, loss, optimizer and threads on both sides (cases.py); timed on rank 0, from the
end of the first epoch to the end of the last. Where computing dominates, ours is held against the script. In `mlp`
fastai's own Python per step dominates, so there ours is held against a `Learner`'s step in one process plus the
communication that the script adds to its own.

glibc gives freed memory of the host back in each step, unless its variables say otherwise, so the script is measured
both ways: plain, as everybody starts it, and `kept` with MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ set. Set
for the notebook's process, they are its workers', too.

    python benchmarks/throughput.py [--repeats 5] [--machine NAME] [--cases convnet,text]
"""
import contextlib, json, os, statistics, subprocess, sys, time
import torch
from fastai.callback.core import Callback
from fastddp.all import *
from cases import CASES
from common import arguments, save, show, take_turns

KEPT = dict(MALLOC_TRIM_THRESHOLD_=str(2**31-1), MALLOC_MMAP_THRESHOLD_=str(32*2**20), MALLOC_TOP_PAD_=str(16*2**20))
PLAIN = {'PATH': os.environ['PATH'], **{k: v for k, v in os.environ.items() if k not in KEPT},
         'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore',
         'GLOO_SOCKET_IFNAME': 'lo'}


class StepClock(Callback):
    "Seconds per training step on this rank, validation and the first epoch left out"
    order, run_valid = 90, False
    def __init__(self): self.seconds = None
    def before_fit(self): self.total, self.steps = 0., 0
    def before_train(self): self.at = time.perf_counter()
    def after_train(self):
        if self.epoch: self.total, self.steps = self.total+time.perf_counter()-self.at, self.steps+self.learn.iter+1
    def after_fit(self): self.seconds = self.total/max(self.steps, 1)


def ours(name, nprocs, launcher=None):
    """By fastddp on `nprocs` workers, of this machine unless a `launcher` has others; with 1 a plain fastai fit in a
    process of its own: what a user has without us"""
    if nprocs == 1: return run_self([sys.executable, __file__, '--one', name], PLAIN)[name]
    case = CASES[name]
    learn = case.learner(nprocs).add_cb(StepClock())
    with learn.no_bar(), learn.no_logging():
        learn.distrib_fit(case.epochs, nprocs=nprocs, launcher=launcher or Local(gpus=[], threads=1))
    return learn.step_clock.seconds


def one(name):
    torch.set_num_threads(1)
    learn = CASES[name].learner(1).add_cb(StepClock())
    with learn.no_bar(), learn.no_logging(): learn.fit(CASES[name].epochs)
    print('SECONDS', json.dumps({name: learn.step_clock.seconds}), flush=True)


def script(name, nprocs, env=PLAIN):
    "The same by hand; see `raw`"
    return run_self([*torchrun(nprocs), __file__, '--raw', name], env)[name]


def torchrun(nprocs):
    return [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(nprocs)]


def run_self(cmd, env):
    "What this script says when it is called so"
    r = subprocess.run(cmd, env=env, capture_output=True, text=True)
    return said(cmd, r.returncode, r.stdout, r.stderr)


def said(cmd, status, out, errors):
    "What a script measured, as it printed it; a RuntimeError with its errors if it failed"
    if status: raise RuntimeError(f'{cmd} ended with {status}\n{errors[-3000:]}')
    return json.loads(out.split('SECONDS')[1])


@contextlib.contextmanager
def by_hand(name):
    "What a script has before its loop: `(case, its parts, model, optimizer, rank)`"
    import torch.distributed as dist
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    case, rank, n = CASES[name], dist.get_rank(), dist.get_world_size()
    s = case.script(rank, n)
    model = torch.nn.parallel.DistributedDataParallel(s.model) if n > 1 else s.model
    yield case, s, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), rank
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)     # gloo sometimes aborts while a group is taken down, and only the steps are of interest


def one_epoch(s, model, opt, epoch):
    "A training loop as one writes it without fastai; the number of steps"
    for i, (xs, y) in enumerate(s.epoch(epoch)):
        opt.zero_grad()
        loss = s.loss(model(*xs), y)
        loss.backward()
        opt.step()
        loss.item()     # a loop shows its loss
    return i+1


def raw(name):
    "Seconds per step of the script, the first epoch left out"
    with by_hand(name) as (case, s, model, opt, rank):
        one_epoch(s, model, opt, 0)
        at = time.perf_counter()
        steps = sum(one_epoch(s, model, opt, i) for i in range(1, case.epochs))
        if rank == 0: print('SECONDS', json.dumps({name: (time.perf_counter()-at)/steps}), flush=True)


def ratios(med):
    "What the budgets of the design speak of"
    communication = med['script, 2 ranks']-med['script, 1 rank']
    res = dict(steps_per_second_over_script=med['script, 2 ranks']/med['ours, 2 ranks'],
               steps_per_second_over_script_kept=med['script kept, 2 ranks']/med['ours, 2 ranks'],
               speed_up=2*med['ours, 1 rank']/med['ours, 2 ranks'],
               speed_up_of_script=2*med['script, 1 rank']/med['script, 2 ranks'],
               over_learner_step_plus_communication=med['ours, 2 ranks']/(med['ours, 1 rank']+communication))
    return {k: round(v, 3) for k, v in res.items()}


def main():
    args, results = arguments(__doc__, cases=','.join(CASES)), {}
    for name in args.cases.split(','):
        sides = {'ours, 2 ranks': lambda: ours(name, 2), 'script, 2 ranks': lambda: script(name, 2),
                 'script kept, 2 ranks': lambda: script(name, 2, PLAIN | KEPT),
                 'ours, 1 rank': lambda: ours(name, 1), 'script, 1 rank': lambda: script(name, 1)}
        times = take_turns(sides, args.repeats)
        med = {k: statistics.median(v) for k, v in times.items()}
        rows = [dict(case=k, ms_per_step=round(m*1e3, 3), least=round(min(times[k])*1e3, 3),
                     most=round(max(times[k])*1e3, 3)) for k, m in med.items()]
        show(f'{name}: ms per step, 1 thread per rank', rows)
        results[name] = dict(rows=rows, ratios=ratios(med), times=times)
        print(results[name]['ratios'])
    save('throughput', args.machine, unit='milliseconds per step', **results)


if __name__ == '__main__':
    if sys.argv[1:2] in (['--raw'], ['--one']): (raw if sys.argv[1] == '--raw' else one)(sys.argv[2])
    else: main()
