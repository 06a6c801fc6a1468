"""What the benchmarks share: cases that take turns, medians with their spread, results by machine.

Two cores are noisy, so no number stands alone: every figure is a ratio to a peer measured in the same run, turn by
turn.
"""
import argparse, json, os, platform, random, statistics, sys, time
from pathlib import Path
import numpy as np, torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

HERE = Path(__file__).parent


def argument_parser(description, repeats=5):
    "The options that every benchmark has: how often, and where the results go"
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', '--turns', type=int, default=repeats, help='turns of each case')
    p.add_argument('--small', action='store_true', help='little data, to see that it runs; writes no results')
    device = 'gpu' if torch.cuda.is_available() else 'cpu'
    p.add_argument('--machine', default=f'{device}-{os.cpu_count()}core', help='folder of the results')
    return p


def arguments(description, repeats=5, **more):
    "Command line of a benchmark; `more`: options of its own with their defaults"
    p = argument_parser(description, repeats)
    for name, default in more.items(): p.add_argument(f'--{name}', type=type(default), default=default)
    return p.parse_args()


def take_turns(cases, repeats, unit='s'):
    "What each case returns (seconds, or several figures), `repeats` times, in turns: `name -> [figures]`"
    times = {name: [] for name in cases}
    for turn in range(repeats):
        for name, case in cases.items():
            times[name].append(case())
            figures = np.round(times[name][-1], 3)
            print(f'  turn {turn+1}/{repeats}  {name}: {figures} {unit}', file=sys.stderr, flush=True)
    return times


def summary(times, base, unit=1., digits=3):
    "Rows `name, median, least, most, ratio to base`"
    med = {k: statistics.median(v) for k, v in times.items()}
    return [dict(case=k, median=round(med[k]*unit, digits), least=round(min(v)*unit, digits),
                 most=round(max(v)*unit, digits),
                 ratio=round(med[k]/med[base], 3)) for k, v in times.items()]


def show(title, rows):
    "A table for people"
    names = list(rows[0])
    cells = [[str(r[n]) for n in names] for r in rows]
    width = [max(map(len, col)) for col in zip(names, *cells)]
    print(f'\n{title}')
    for row in [names, *cells]: print('  '.join(c.ljust(w) for c, w in zip(row, width)))


def save(name, machine, **results):
    "Writes `benchmarks/results/<machine>/<name>.json`"
    path = HERE/'results'/machine/f'{name}.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    about = dict(torch=torch.__version__, python=platform.python_version(), cores=os.cpu_count(),
                 date=time.strftime('%Y-%m-%d'))
    path.write_text(json.dumps(dict(about=about, **results), indent=1)+'\n')
    print(f'\n{path.relative_to(HERE.parent)}')


def seed_all(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mlp(width=128): return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def convnet():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
                         nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def data(shape, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)


def learner(model, shape, n, bs, **kwargs):
    "A learner over tensors in memory, whose loader indexes a whole batch at a time as the raw script does"
    seed_all()
    x, y = data(shape, n)
    train, valid = (torch.utils.data.TensorDataset(x[:m], y[:m]) for m in (n, bs))
    dls = DataLoaders(torch.utils.data.DataLoader(train, batch_size=bs, shuffle=True),
                      torch.utils.data.DataLoader(valid, batch_size=bs, shuffle=n == bs))
    opt_func = kwargs.pop('opt_func', sgd)
    return Learner(dls, model(), loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, lr=0.01, **kwargs)


def sgd(params, lr, **kwargs):
    from fastai.optimizer import OptimWrapper
    return OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=0.9)
