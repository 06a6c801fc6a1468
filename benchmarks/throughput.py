"""Steps per second of a distributed fit, over those of a hand-written DDP script under torchrun.

Same model, batch, data in memory, optimizer, threads and torch DataLoader on both sides; each side is timed on rank 0, from the end
of the first epoch to the end of the last. `convnet`: computing dominates. `mlp`: fastai's own Python per step dominates, so it is
held against a `Learner`'s step in one process plus the communication that the script adds to its own step.

    python benchmarks/throughput.py [--repeats 5] [--machine NAME]
"""
import os, statistics, subprocess, sys, time
import torch
from fastai.callback.core import Callback
from fastddp.all import *
from common import arguments, convnet, data, learner, mlp, save, seed_all, show, take_turns

CASES = {'convnet': dict(model=convnet, shape=(3, 32, 32), n=2048, bs=32, epochs=3), 'mlp': dict(model=mlp, shape=(64,), n=8192, bs=32, epochs=4)}


class StepClock(Callback):
    "Seconds per training step on this rank, validation and the first epoch left out"
    order, run_valid = 90, False
    def __init__(self): self.seconds = None
    def before_fit(self): self.total, self.steps = 0., 0
    def before_train(self): self.at = time.perf_counter()
    def after_train(self):
        if self.epoch: self.total, self.steps = self.total+time.perf_counter()-self.at, self.steps+self.learn.iter+1
    def after_fit(self): self.seconds = self.total/max(self.steps, 1)


def ours(case, nprocs):
    c = CASES[case]
    learn = learner(c['model'], c['shape'], c['n'], c['bs'], cbs=StepClock())
    with learn.no_bar(), learn.no_logging():
        if nprocs == 1:
            torch.set_num_threads(1)
            learn.fit(c['epochs'])
        else: learn.distrib_fit(c['epochs'], nprocs=nprocs, launcher=Local(gpus=[], threads=1))
    return learn.step_clock.seconds


def script(case, nprocs):
    "The same by hand; see `raw`"
    run = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(nprocs)]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    out = subprocess.run([sys.executable, *run, __file__, '--raw', case], env=env, capture_output=True, text=True, check=True).stdout
    return float(out.split('SECONDS')[1].split()[0])


def raw(case):
    "A training loop as one writes it without fastai"
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    c = CASES[case]
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    seed_all()
    ds = TensorDataset(*data(c['shape'], c['n']))
    sampler = DistributedSampler(ds, shuffle=True)
    dl = DataLoader(ds, batch_size=c['bs'], sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(c['model']())
    opt, loss_func, spent, steps = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.nn.CrossEntropyLoss(), 0., 0
    for epoch in range(c['epochs']):
        sampler.set_epoch(epoch)
        at = time.perf_counter()
        for x, y in dl:
            opt.zero_grad()
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            loss.item()     # a loop shows its loss
        if epoch: spent, steps = spent+time.perf_counter()-at, steps+len(dl)
    if dist.get_rank() == 0: print('SECONDS', spent/steps, flush=True)
    dist.destroy_process_group()


def main():
    args, results = arguments(__doc__), {}
    for case in CASES:
        times = take_turns({f'{side.__name__}, {n} rank{"s"*(n>1)}': lambda side=side, n=n: side(case, n) for n in (2, 1) for side in (ours, script)}, args.repeats)
        med = {k: statistics.median(v) for k, v in times.items()}
        rows = [dict(case=k, ms_per_step=round(m*1e3, 3), least=round(min(times[k])*1e3, 3), most=round(max(times[k])*1e3, 3)) for k, m in med.items()]
        show(f'{case}: ms per step, 1 thread per rank', rows)
        ratios = dict(steps_per_second_over_script=med['script, 2 ranks']/med['ours, 2 ranks'],
                      speed_up=2*med['ours, 1 rank']/med['ours, 2 ranks'], speed_up_of_script=2*med['script, 1 rank']/med['script, 2 ranks'],
                      over_learner_step_plus_communication=med['ours, 2 ranks']/(med['ours, 1 rank']+med['script, 2 ranks']-med['script, 1 rank']))
        ratios = {k: round(v, 3) for k, v in ratios.items()}
        print(ratios)
        results[case] = dict(rows=rows, ratios=ratios, times=times)
    save('throughput', args.machine, unit='seconds per step', **results)


if __name__ == '__main__': raw(sys.argv[2]) if sys.argv[1:2] == ['--raw'] else main()
