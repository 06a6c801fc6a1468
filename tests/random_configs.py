"""Random fits on N workers: none hangs, all ranks end alike, weights and metrics are those of one process.

    python tests/random_configs.py [how many] [seed]     # 200 unless said otherwise
"""
import functools, itertools, random, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import torch
from fastai.callback.core import Callback, CancelBatchException, CancelEpochException, CancelFitException
from fastai.callback.core import CancelTrainException
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat
from fastai.metrics import F1Score, Perplexity, accuracy
from fastai.optimizer import SGD, Adam, OptimWrapper, RMSProp
from torch import nn
from fastddp.base import group
from fastddp.launch.local import Local
from parity import Collect, items, learner, mlp, seed, alone_like, values, largest

KINDS = (CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException)


class Quits(Callback):
    "Leaves at a random moment of training, on one rank"
    order = 51
    def __init__(self, rank, kind, event, epoch, it):
        self.rank, self.kind, self.at = rank, kind, (epoch, it)
        setattr(self, event, self.go)
    def go(self):
        if self.training and group.rank() == self.rank and (self.learn.epoch, self.iter) == self.at:
            raise KINDS[self.kind]()


class Ends(Collect):
    def after_fit(self):
        self.rows = []
        self.note(*(p.detach().double().sum() for p in self.learn.model.parameters()))
        super().after_fit()


class SpreadNet(nn.Module):
    "A branch that some batches don't take"
    def __init__(self): super().__init__(); self.m, self.b, self.k = mlp(), nn.Linear(4, 3), 0
    def forward(self, x):
        self.k += self.training     # not every rank has a part in every batch of validation
        return self.m(x) + (self.b(x) if self.k % 2 else 0)


def draw(rng, n=None):
    "One configuration"
    n = n or rng.choice([2, 2, 3, 4])
    bs = rng.choice([1, 2, 3, 4, 8])
    batch = rng.choice(['per_worker', 'per_worker', 'global'])
    if batch == 'global': bs *= n
    size = bs*(n if batch == 'per_worker' else 1)
    res = dict(n=n, batch=batch, bs=bs, train=rng.randint(max(n, size), 60+size),
               valid=rng.choice([1, 2, 5, 7, 21, 40]), drop_last=rng.random() < .3,
                epochs=rng.choice([1, 2]), opt=rng.randrange(5), loss=rng.randrange(3), net=rng.randrange(2),
               wd=rng.choice([0., .1]),
                acc=rng.choice([None, None, None, 1, 3]), clip=rng.random() < .2,
                quits=(rng.randrange(n), rng.randrange(4),
                       rng.choice(['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_batch']),
                       0, rng.randrange(4)) if rng.random() < .35 else None)
    if res['quits']:
        res['net'] = 0     # a rank that cancels a batch doesn't count it
        # fastai catches it nowhere
        if KINDS[res['quits'][1]] is CancelBatchException and res['quits'][2] == 'after_batch': res['quits'] = None
    return res


def build(c):
    opt = [SGD, functools.partial(SGD, mom=.9), Adam, RMSProp,
           functools.partial(OptimWrapper, opt=torch.optim.AdamW)][c['opt']]
    loss = [CrossEntropyLossFlat(), CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5])),
            LabelSmoothingCrossEntropyFlat()][c['loss']]
    cbs = [GradientAccumulation(c['acc']*c['bs']*c['n'])] if c['acc'] else []
    if c['clip']: cbs.append(GradientClip(.5))
    seed(3)
    net = [mlp, SpreadNet][c['net']]()
    return learner(train=c['train'], valid=c['valid'], bs=c['bs'], drop_last=c['drop_last'], model=net, opt_func=opt,
                   loss_func=loss, cbs=cbs,
                   wd=c['wd'], lr=.01, metrics=[accuracy, F1Score(average='macro'), Perplexity()])


def try_one(c, launcher):
    "Fits on workers and in one process; raises if they are apart"
    learn, ends = build(c), Ends()
    one = alone_like(learn, c['n'], c['batch'])
    own = [Quits(*c['quits'])] if c['quits'] else []
    seed(1)
    learn.distrib_fit(c['epochs'], nprocs=c['n'], launcher=launcher, batch=c['batch'], cbs=[ends, *own])
    assert all(r == ends.ranks[0] for r in ends.ranks), 'ranks differ'
    seed(1)
    one.fit(c['epochs'], cbs=[Quits(0, *c['quits'][1:])] if c['quits'] else [])
    apart = largest([p for p in learn.model.parameters()], [p for p in one.model.parameters()])
    assert apart < 1e-5, f'weights are {apart} apart'
    # of a batch that one rank leaves after its loss, the Recorder notes the loss before
    first = 1 if c['quits'] and c['quits'][2] == 'before_backward' else 0
    for a, b in zip(values(learn), values(one), strict=not c['quits']):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a[first:], b[first:]):
            assert x == y or x != x and y != y or abs(x-y) < 1e-4*max(1, abs(y)), (a, b)


def main(how_many=200, start=0, first=0):
    configs = sorted((draw(random.Random(start*100_000+first+i)) for i in range(how_many)), key=lambda c: c['n'])
    failed, began = [], time.monotonic()
    for n, cs in itertools.groupby(configs, key=lambda c: c['n']):
        with Local() as launcher:
            for c in cs:
                try: try_one(c, launcher)
                except Exception as e: failed.append((c, f'{type(e).__name__}: {e}'[:300]))
    print(f'{how_many} configurations in {time.monotonic()-began:.0f} s, {len(failed)} failed')
    for c, e in failed: print(c, '\n   ', e)
    return not failed


if __name__ == '__main__': sys.exit(not main(*map(int, sys.argv[1:])))
