"""What fastddp promises about GPUs, checked on the machine at hand: `python benchmarks/gpu_check.py [results.json]`.

Needs at least one GPU. With one: a single NCCL rank, and two gloo ranks that share it. With more: all of them by
NCCL, the last two in reverse order, and two ranks against one. Prints a table, writes JSON, and exits with 1 if a
promise is broken.
"""
import json, os, platform, statistics, sys, time
from pathlib import Path
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from torch import nn
from fastddp.base import group
from fastddp.all import *

rows = []


def check(what, ok, detail=''):
    rows.append(dict(what=what, ok=bool(ok), detail=str(detail)))
    print(f"{'PASS' if ok else 'FAIL'}  {what}  {detail}", flush=True)


class Witness(Callback):
    "What each rank saw of the GPUs: its device, and the devices on which its process has a context"
    def __init__(self): self.ranks = None
    def after_fit(self):
        dev = next(self.learn.model.parameters()).device
        contexts = [float(torch._C._cuda_hasPrimaryContext(i)) for i in range(torch.cuda.device_count())]
        mine = torch.tensor([dev.index if dev.type == 'cuda' else -1, self.learn.model[1].weight.is_cuda, *contexts])
        self.ranks = [r.tolist() for r in group.gather(mine)]


def net():
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
                         nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(),
                         nn.Conv2d(128, 256, 3, stride=2, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def make_learner(n=8192, bs=256):
    torch.manual_seed(0)
    x, y = torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))
    ds = list(zip(x, y))
    dls = DataLoaders.from_dsets(ds, ds[:1001], bs=bs, device=torch.device('cuda', torch.cuda.current_device()))
    return Learner(dls, net().cuda(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, cbs=Witness())


def used():
    "Bytes in use on each GPU by everyone"
    free = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
    return [total-left for left, total in free]


def fit_and_look(name, gpus, **options):
    "One distributed fit, and whether each promise held"
    learn = make_learner()
    with learn.no_bar(): learn.fit(1, 1e-3)                 # this process has used CUDA: no restart is needed
    params, types = list(learn.model.parameters()), [type(m) for m in learn.model.modules()]
    home = params[0].device
    torch.cuda.empty_cache()
    before = used()
    for again in range(2):
        with learn.no_bar(): learn.distrib_fit(1, 1e-3, **options)
        seen = learn.witness.ranks
        devices = [int(r[0]) for r in seen]
        check(f'{name}, fit {again+1}: device of each rank', devices == gpus, devices)
        check(f'{name}, fit {again+1}: one context per worker, on its own GPU',
              all(r[2:] == [float(i == g) for i in range(torch.cuda.device_count())] for r, g in zip(seen, gpus)))
    check(f'{name}: the same parameters, back on {home}',
          all(p is q and p.device == home for p, q in zip(params, learn.model.parameters())))
    check(f'{name}: the same module types (no SyncBatchNorm left)', types == [type(m) for m in learn.model.modules()])
    torch.cuda.empty_cache()
    time.sleep(1)
    left = [b-a for a, b in zip(before, used())]
    check(f'{name}: GPU memory afterwards as before', all(o < 32*2**20 for o in left),
          f'{[round(o/2**20) for o in left]} MiB more')
    with learn.no_bar(): learn.fit(1, 1e-3)
    check(f'{name}: trains on in this process', len(learn.recorder.values) == 1)


def offloaded_while_training():
    "Does this process hold the model on its GPU while workers train?"
    learn, seen = make_learner(), []
    class Spy(Local):
        def run(self, *args, **kwargs):
            seen.append((next(learn.model.parameters()).device.type, torch.cuda.memory_allocated()))
            return super().run(*args, **kwargs)
    with learn.no_bar(): learn.distrib_fit(1, nprocs=1, launcher=Spy(gpus=[0]))
    check('the notebook\'s copy lies on the CPU while workers train', seen[0][0] == 'cpu',
          f'{seen[0][1]/2**20:.1f} MiB still allocated')


def throughput(repeats=5):
    "Seconds of the second epoch onwards: one NCCL rank over plain `learn.fit`, alternating"
    times = dict(plain=[], rank=[])
    learn = make_learner(n=32768)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=1, launcher=Local(gpus=[0])):
        for _ in range(repeats+1):
            for name, fit in (('plain', type(learn).fit), ('rank', None)):
                t = time.perf_counter()
                fit(learn, 3, 1e-3) if fit else learn.fit(3, 1e-3)
                torch.cuda.synchronize()
                times[name].append(time.perf_counter()-t)
    med = {k: statistics.median(v[1:]) for k, v in times.items()}
    ratio = med['plain']/med['rank']
    rows.append(dict(what='3 epochs, seconds', ok=True, detail={**med, 'ratio': ratio, 'all': times}))
    print(f"      3 epochs: plain {med['plain']:.2f} s, one NCCL rank {med['rank']:.2f} s with snapshot and return, "
          f"ratio {ratio:.3f}")


def main(out=None):
    n = torch.cuda.device_count()
    if not n: sys.exit('gpu_check: no GPU is visible here.')
    print(f'{n} x {torch.cuda.get_device_name()}, torch {torch.__version__}')
    fit_and_look('1 NCCL rank', [0], nprocs=1, launcher=Local(gpus=[0]))
    fit_and_look('2 gloo ranks on one GPU', [0, 0], nprocs=2, launcher=Local(gpus=[0, 0], backend='gloo'))
    if n > 1:
        fit_and_look(f'{n} NCCL ranks', list(range(n)))
        fit_and_look('the last two GPUs in reverse', [n-1, n-2], gpus=[n-1, n-2])
    offloaded_while_training()
    throughput()
    name = torch.cuda.get_device_name(0).replace(' ', '-').lower()
    path = Path(out or Path(__file__).parent/'results'/f'gpu_check-{n}x-{name}.json')
    path.parent.mkdir(parents=True, exist_ok=True)
    about = dict(gpu=torch.cuda.get_device_name(0), gpus=n, torch=torch.__version__, python=platform.python_version())
    path.write_text(json.dumps(dict(**about, rows=rows), indent=1))
    bad = [r for r in rows if not r['ok']]
    print(f"{len(rows)-len(bad)} of {len(rows)} hold; {path}")
    return len(bad) > 0


if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
