"""Random losses of predictions and targets on N workers: weights, losses and metrics are those of one process.

    python tests/random_losses.py [how many] [seed]     # 100 unless said otherwise
"""
import functools, itertools, random, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import torch, torch.nn.functional as F
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam
from torch import nn
from fastddp.launch.local import Local
from losses import pearson, supcon
from parity import assert_same, learner, seed, alone_like

# of one item: a vector, no reduction
TERMS = dict(ce=lambda p, y: F.cross_entropy(p, y, reduction='none'), top=lambda p, y: p.relu().amax(1),
             hinge=lambda p, y: F.multi_margin_loss(p, y, reduction='none'),
             square=lambda p, y: (p-F.one_hot(y, 3)).pow(2).sum(1))
# how a batch's items make a number
REDUCE = dict(mean=lambda v, y: v.mean(), sum=lambda v, y: v.sum()/20, root=lambda v, y: (v.mean()+.1).sqrt(),
              masked=lambda v, y: (v*(y > 0)).sum()/(y > 0).sum().clamp(min=1),
              top=lambda v, y: v.topk(-(-len(v)//2))[0].mean(),
              weighted=lambda v, y: (v*(1.+y)).sum()/(1.+y).sum(), spread=lambda v, y: v.mean()+v.std(correction=0),
              log=lambda v, y: v.exp().mean().log(), largest=lambda v, y: v.max(),
              short=lambda v, y: v.sum()/(len(v)+3))
WHOLE = dict(supcon=supcon, dice=lambda p, y: 1-2*(p.softmax(1)*F.one_hot(y, 3)).sum()/(len(y)+p.softmax(1).sum()),
             pearson=lambda p, y: pearson(p[:, 0], y.float()))


class Drawn(nn.Module):
    "A sum of random terms, each a mean, a sum, or something else of its items"
    def __init__(self, terms, nested):
        super().__init__()
        self.terms, self.inner = terms, Drawn(terms[1:], False) if nested and len(terms) > 1 else None
    def forward(self, pred, y):
        one = [f*(WHOLE[a](pred, y) if b is None else REDUCE[b](TERMS[a](pred, y), y)) for f, a, b in self.terms]
        return sum(one) + (.5*self.inner(pred, y) if self.inner else 0.)


def draw(rng):
    "One configuration"
    n = rng.choice([2, 2, 3, 4])
    batch = rng.choice(['per_worker', 'global'])
    bs = rng.choice([2, 3, 5])*(n if batch == 'global' else 1)
    size = bs*(1 if batch == 'global' else n)
    def term():
        if rng.random() < .25: return rng.choice([.5, 1.]), rng.choice(sorted(WHOLE)), None
        return rng.choice([.3, 1.]), rng.choice(sorted(TERMS)), rng.choice(sorted(REDUCE))
    return dict(n=n, batch=batch, bs=bs, train=rng.randint(size+1, 60+size), valid=rng.choice([1, 5, 21]),
                terms=[term() for _ in range(rng.choice([1, 1, 2, 3]))], nested=rng.random() < .3,
                adam=rng.random() < .5, clip=rng.random() < .2, acc=rng.random() < .15)


def try_one(c, launcher):
    "Fits on workers and in one process; raises if they are apart"
    seed(3)
    cbs = [GradientClip(.5)]*c['clip']
    learn = learner(train=c['train'], valid=c['valid'], bs=c['bs'], loss_func=Drawn(c['terms'], c['nested']), cbs=cbs,
                    opt_func=functools.partial(Adam, eps=1e-3) if c['adam'] else SGD, lr=.01, metrics=accuracy)
    one = alone_like(learn, c['n'], c['batch'])
    more = [GradientAccumulation(2*c['bs']*c['n'])] if c['acc'] and all(b != 'root' for *_, b in c['terms']) else []
    seed(1)
    learn.distrib_fit(2, nprocs=c['n'], launcher=launcher, batch=c['batch'], cbs=more)
    seed(1)
    one.fit(2, cbs=more)
    assert_same(learn, one, tol=2e-5, metrics_tol=1e-5)


def main(how_many=100, start=0):
    configs = sorted((draw(random.Random(start*100_000+i)) for i in range(how_many)), key=lambda c: c['n'])
    failed, began = [], time.monotonic()
    for n, cs in itertools.groupby(configs, key=lambda c: c['n']):
        with Local() as launcher:
            for c in cs:
                try: try_one(c, launcher)
                except Exception as e: failed.append((c, f'{type(e).__name__}: {e}'[:600]))
    print(f'{how_many} losses in {time.monotonic()-began:.0f} s, {len(failed)} failed')
    for c, e in failed: print(c, '\n   ', e)
    return not failed


if __name__ == '__main__': sys.exit(not main(*map(int, sys.argv[1:])))
