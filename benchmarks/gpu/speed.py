"""Steps per second of one rank, against plain `learn.fit` and a hand-written DDP script

`python speed.py --script NAME` is that script, under torchrun; it prints its seconds per step.
"""
import json, os, subprocess, sys, time
from functools import partial
from pathlib import Path
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from torch import nn
from fastddp.all import *

if __name__ == '__main__': sys.path.insert(0, str(Path(__file__).parent.parent))
from gpu import machine
from gpu.learners import convnet, pictures, torch_loaders


class Case:
    "A model, tensors, and how they are trained"
    def __init__(self, model, tensors, bs, epochs=3, bf16=False, goal=.99):
        self.model, self.tensors, self.bs, self.epochs, self.bf16, self.goal = model, tensors, bs, epochs, bf16, goal
    def learner(self):
        torch.manual_seed(0)
        ts = self.tensors()
        learn = Learner(torch_loaders(ts, self.bs, self.bs), self.model().to(machine.device()), opt_func=sgd,
                        loss_func=CrossEntropyLossFlat(), lr=1e-3, cbs=StepClock())
        return learn.to_bf16() if self.bf16 else learn


def sgd(params, lr, **kwargs): return OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=.9)


def resnet50():
    from torchvision.models import resnet18, resnet50
    return machine.size(resnet50, resnet18)(num_classes=10)


def tabular():
    from fastai.tabular.model import TabularModel
    return TabularModel([(1000, 50), (100, 30), (12, 6), (7, 4)], 16, 10, [1000, 500])


def rows(n):
    cats = torch.stack([torch.randint(0, of, (n,)) for of in (1000, 100, 12, 7)], 1)
    return cats, torch.randn(n, 16), torch.randint(0, 10, (n,))


class LanguageModel(nn.Module):
    "AWD-LSTM over rows of tokens, each its own text; the output of the last layer alone"
    def __init__(self, words=2000):
        super().__init__()
        from fastai.text.models import AWD_LSTM, awd_lstm_lm_config, get_language_model
        config = awd_lstm_lm_config | dict(emb_sz=machine.size(400, 16), n_hid=machine.size(1152, 16))
        self.model = get_language_model(AWD_LSTM, words, config=config)
    def forward(self, x):
        self.model.reset()
        return self.model(x)[0]


def texts(n, words=2000): return torch.randint(0, words, (n, 72)), torch.randint(0, words, (n, 72))


CASES = {
    'resnet50, 224, bf16': Case(resnet50, lambda: pictures(machine.size(1536, 4), machine.size(224, 32)),
                                machine.size(64, 2), 2, bf16=machine.size(True, False)),
    'convnet': Case(convnet, lambda: pictures(machine.size(16384, 32)), machine.size(256, 8)),
    'AWD-LSTM': Case(LanguageModel, lambda: texts(machine.size(2048, 16)), machine.size(64, 4)),
    'tabular': Case(tabular, lambda: rows(machine.size(65536, 64)), machine.size(512, 16)),
}


class StepClock(Callback):
    "Seconds per training step on this rank, the first epoch and validation left out"
    order, run_valid = 90, False
    def __init__(self): self.seconds = None
    def before_fit(self): self.total, self.steps = 0., 0
    def before_train(self):
        machine.synchronize()
        self.at = time.perf_counter()
    def after_train(self):
        machine.synchronize()
        if self.epoch: self.total, self.steps = self.total+time.perf_counter()-self.at, self.steps+self.learn.n_iter
    def after_fit(self): self.seconds = self.total/max(self.steps, 1)


def timed(name, options=None):
    learn = CASES[name].learner()
    with learn.no_bar(), learn.no_logging():
        learn.distrib_fit(CASES[name].epochs, **options) if options else learn.fit(CASES[name].epochs)
    return learn.step_clock.seconds


def by_script(name):
    "Seconds per step of the script, as a process of its own under torchrun"
    cmd = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '1', __file__,
           '--script', name]
    done = subprocess.run(cmd, capture_output=True, text=True, env=os.environ | dict(PYTHONWARNINGS='ignore'))
    if done.returncode: raise RuntimeError(f'{cmd} ended with {done.returncode}\n{done.stderr[-3000:]}')
    return json.loads(done.stdout.split('SECONDS')[1])


def script(name):
    "A training loop by hand"
    torch.distributed.init_process_group(machine.backend())
    machine.use_first()
    case, dev = CASES[name], machine.device()
    model = nn.parallel.DistributedDataParallel(case.model().to(dev))
    loss_func, opt = CrossEntropyLossFlat(), torch.optim.SGD(model.parameters(), lr=1e-3, momentum=.9)
    dl, total, steps = torch_loaders(case.tensors(), case.bs, case.bs).train, 0., 0
    for epoch in range(case.epochs):
        machine.synchronize()
        start, n = time.perf_counter(), 0
        for *xs, y in dl:
            xs, y = [x.to(dev, non_blocking=True) for x in xs], y.to(dev, non_blocking=True)
            with torch.autocast(dev.type, dtype=torch.bfloat16, enabled=case.bf16): loss = loss_func(model(*xs), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            loss.item()             # as fastai's recorder does
            n += 1
        machine.synchronize()
        if epoch: total, steps = total+time.perf_counter()-start, steps+n
    print('SECONDS', json.dumps(total/max(steps, 1)), flush=True)
    torch.distributed.destroy_process_group()


def check(table, repeats=None):
    repeats = repeats or machine.size(4, 1)
    for name, case in CASES.items():
        times = dict(plain=[], rank=[], script=[])
        for _ in range(repeats):
            times['plain'].append(timed(name))
            times['rank'].append(timed(name, machine.ranks(1)))
            # each of these is a torchrun with processes that import all anew: in a dry run one is enough
            if not machine.DRY or name == 'convnet': times['script'].append(by_script(name))
        for peer, goal in ('plain', case.goal), ('script', .97):
            if not times[peer]: continue
            ratio = machine.median_ratio(times[peer], times['rank'])
            what = f"{name}: steps per second over those of {'plain learn.fit' if peer == 'plain' else 'a DDP script'}"
            table.add(what, None if machine.DRY or machine.SIMULATED else ratio >= goal, f'{ratio:.3f} (goal {goal})')
        table.about(f'{name}: milliseconds per step', {k: [round(1000*o, 2) for o in v] for k, v in times.items()})


if __name__ == '__main__': script(sys.argv[2])
