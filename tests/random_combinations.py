"""Random combinations of data, model, loss, optimizer and callbacks on N workers: all that a fit leaves behind is what
one process leaves, and one more epoch in the notebook goes on from there. A third of them has a loss and outputs of
the table of cases (cases/losses.py).

    python tests/random_combinations.py [how many] [seed]     # 100 unless said otherwise
"""
import functools, itertools, random, sys, tempfile, time, traceback
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np, torch
from fastai.callback.core import Callback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat, FocalLossFlat, LabelSmoothingCrossEntropyFlat
from fastai.metrics import F1Score, accuracy
from fastai.optimizer import Adam, OptimWrapper, QHAdam, RAdam, RMSProp, SGD, ranger
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, WeightedRandomSampler
from fastddp.launch.local import Local
from cases import CASES
from cases.losses import WRITTEN
from parity import alone_like, assert_same, items, learner, mlp, seed
from random_losses import Drawn, draw as draw_loss

# Data, and a model for it

def images(n, s=0): return [(x.repeat(4)[:16].view(1, 4, 4), y) for x, y in items(n, s=s)]
def texts(n, s=0): return [((x*10).long().abs() % 20, y) for x, y in items(n, s=s)]


class Mean(nn.Module):
    def forward(self, x): return x.mean(1)


class Tied(nn.Module):
    "One layer used twice, and one that is never used"
    def __init__(self):
        super().__init__()
        self.unused, self.a, self.b = nn.Linear(2, 2), nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x): return self.b(self.a(self.a(x).tanh()))


def conv(): return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1),
                                 nn.Flatten(), nn.Linear(4, 3))
def words(): return nn.Sequential(nn.Embedding(20, 4), Mean(), nn.LayerNorm(4), nn.Linear(4, 3))


DATA = dict(vectors=(items, [mlp, Tied]), images=(images, [conv]), texts=(texts, [words]))


# Loaders

def with_torch(dls, **kwargs):
    return DataLoaders(*(TorchLoader(dl.dataset, batch_size=dl.bs, **(dict(shuffle=True) | kwargs if not i else {}))
                         for i, dl in enumerate(dls.loaders)))


def weighted(dls):
    n = len(dls.train.dataset)
    return with_torch(dls, shuffle=False, sampler=WeightedRandomSampler(torch.arange(1., n+1), n))


class Bucketed:
    "A batch sampler of the user's own"
    def __init__(self, n, bs): self.n, self.bs = n, bs
    def __len__(self): return -(-self.n//self.bs)
    def __iter__(self):
        order = torch.randperm(self.n).tolist()
        return iter([order[i:i+self.bs] for i in range(0, self.n, self.bs)])


def bucketed(dls):
    own = TorchLoader(dls.train.dataset, batch_sampler=Bucketed(len(dls.train.dataset), dls.train.bs))
    return DataLoaders(own, dls.valid)


def processes(dls):
    return DataLoaders(*(DataLoader(dl.dataset, bs=dl.bs, shuffle=not i, num_workers=1)
                         for i, dl in enumerate(dls.loaders)))


LOADERS = dict(torch=with_torch, weighted=weighted, bucketed=bucketed, processes=processes,
               generator=lambda dls: with_torch(dls, generator=torch.Generator().manual_seed(7)))


# Callbacks

class Looks(Callback):
    "At some event: goes over a loader, takes a batch, validates or predicts by itself"
    def __init__(self, what, at): self.what, self.at, self.seen, self.busy = what, at, [], False
    def __call__(self, event):
        if event == self.at and not self.busy:
            self.busy = True
            self.seen.append(self.look(self.learn))
            self.busy = False
        return super().__call__(event)
    def look(self, learn):
        if self.what == 'loop': return sum(float(x.float().sum()) for x, _ in learn.dls.valid)
        if self.what == 'batch': return float(next(iter(learn.dls.train))[0].float().abs().sum() > 0)
        if self.what == 'validate': return float(learn.validate()[0])
        return float(learn.get_preds(inner=True)[0].double().abs().sum())


class Thaws(Callback):
    "Trains only the last layer in the first epoch"
    def before_epoch(self):
        if self.epoch == 0: self.learn.freeze()
        if self.epoch == 1: self.learn.unfreeze()


class Keeps(Callback):
    "Notes the loss of each step, and leaves something on learner and model"
    def __init__(self): self.losses = []
    def after_batch(self):
        if self.training: self.losses.append(float(self.loss))
    def after_fit(self): self.learn.found = self.model.found = len(self.losses)


CBS = dict(clip=lambda c: GradientClip(.3), acc=lambda c: GradientAccumulation(2*c['bs']),
           save=lambda c: SaveModelCallback(), stop=lambda c: EarlyStoppingCallback(min_delta=.01, patience=1),
           plateau=lambda c: ReduceLROnPlateau(min_delta=.01, patience=1, factor=2.),
           looks=lambda c: Looks(*c['looks']), thaws=lambda c: Thaws(), keeps=lambda c: Keeps())

OPTS = dict(sgd=SGD, momentum=functools.partial(SGD, mom=.9), adam=functools.partial(Adam, eps=1e-3),
            rms=functools.partial(RMSProp, eps=1e-3), radam=functools.partial(RAdam, eps=1e-3),
            qh=functools.partial(QHAdam, eps=1e-3), ranger=functools.partial(ranger, eps=1e-3, k=3),
            adamw=functools.partial(OptimWrapper, opt=functools.partial(torch.optim.AdamW, eps=1e-3)),
            nesterov=functools.partial(OptimWrapper, opt=functools.partial(torch.optim.SGD, momentum=.9,
                                                                           nesterov=True)))
PLAIN = 'sgd','momentum','nesterov'
LOSSES = dict(flat=CrossEntropyLossFlat, smooth=LabelSmoothingCrossEntropyFlat, focal=FocalLossFlat,
              weighted=lambda: CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5])),
              summed=lambda: functools.partial(nn.functional.cross_entropy, reduction='sum'))


def draw(rng):
    "One configuration"
    c = draw_own(rng)
    names = sorted(WRITTEN)
    c['written'] = rng.choice([None]*2*len(names)+names)
    if not c['written']: return c
    # accumulating: fastai counts the boxes of the first item; the others read or change what a case has of its own
    left_out = {'looks', 'thaws'}
    if 'detection' in c['written'] or c['written'] == 'annealed_by_itself': left_out.add('acc')
    if 'sparse' in c['written']: c['wd'] = 0.       # torch's optimizers refuse to decay weights by sparse gradients
    c.update(loaders=None, loss=None, cbs=[o for o in c['cbs'] if o not in left_out])
    # These don't change when a bias adds the same to all outputs: its gradient is rounding, of which an optimizer that
    # divides by the gradient's size makes whole steps (fastai's RMSProp ignores its `eps`)
    if c['written'] in ('barlow_twins', 'correlation', 'survival') and c['opt'] not in PLAIN: c['opt'] = 'sgd'
    if c['written'] == 'barlow_twins':      # the deviation of one item is none
        c['train'], c['valid'] = (-(-c[k]//size)*size for k, size in (('train', 5*3*4*2), ('valid', 5*3*4*2)))
    return c


def draw_own(rng):
    "One with data, a model and a loss of this file"
    n = rng.choice([2, 2, 2, 3, 4])
    data = rng.choice(sorted(DATA))
    kind = rng.choice([None, None, *LOADERS])
    cbs = rng.sample(sorted(CBS), rng.choice([0, 1, 1, 2, 3]))
    # by itself a callback validates and predicts in batches of the loader's own size
    batch = 'global' if kind or 'looks' in cbs else rng.choice(['per_worker', 'global'])
    bs = rng.choice([2, 3, 5])*(n if batch == 'global' else 1)
    terms, size = draw_loss(rng), bs*(1 if batch == 'global' else n)
    return dict(n=n, data=data, model=rng.randrange(len(DATA[data][1])), loaders=kind, batch=batch, bs=bs,
                train=rng.randint(size, size+50), valid=rng.choice([1, 5, 21]), opt=rng.choice(sorted(OPTS)),
                loss=rng.choice([*sorted(LOSSES), None, None]), terms=terms['terms'], nested=terms['nested'],
                cbs=cbs, wd=rng.choice([0., .1]),
                looks=(rng.choice(['loop', 'batch', 'validate', *['preds'][:not kind or kind == 'processes']]),
                       rng.choice(['before_train', 'after_train', 'after_epoch'])),
                how=rng.choice(['fit', 'fit', 'fit_one_cycle', 'fit_flat_cos']), epochs=rng.choice([1, 2, 3]))


def build(c, path):
    if c['written']:
        own = CASES[c['written']].make()
        opt = dict(opt_func=OPTS[c['opt']]) if 'opt_func' not in own else {}
        return CASES[c['written']].learner(train=c['train'], valid=c['valid'], bs=c['bs'], wd=c['wd'],
                                          lr=own.get('lr', .01), path=path, **opt)
    seed(3)
    data, models = DATA[c['data']]
    loss = LOSSES[c['loss']]() if c['loss'] else Drawn(c['terms'], c['nested'])
    learn = learner(train=c['train'], valid=c['valid'], bs=c['bs'], data=data, model=models[c['model']](), lr=.01,
                    opt_func=OPTS[c['opt']], loss_func=loss, wd=c['wd'], path=path, splitter=halves,
                    metrics=[accuracy, F1Score(average='macro')])
    if c['loaders']: learn.dls = LOADERS[c['loaders']](learn.dls)
    return learn


def drop_times(learn):
    "A validation in the middle of an epoch writes some into its row"
    learn.recorder.values = [[v for v in row if not isinstance(v, str)] for row in learn.recorder.values]


def halves(model):
    "Parameter groups: all but the last two tensors, and those"
    ps = [p for p in model.parameters()]
    return [ps[:-2], ps[-2:]]


def streams(learn):
    "What the next draws would be"
    return random.random(), np.random.rand(), float(torch.rand(1))


def attrs(cb): return {k: v for k, v in vars(cb).items() if k != 'learn'}      # which is gone


def plain(v):
    "Numbers and lists of them among a callback's values"
    if isinstance(v, (list, tuple)) and all(isinstance(o, (int, float)) for o in v): return [float(o) for o in v]
    return [float(v)] if isinstance(v, (int, float, np.floating)) else []


def try_one(c, launcher):
    "Fits on workers and in one process; raises if anything is apart"
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        learn = build(c, a)
        one = alone_like(build(c, b) if c['written'] else learn, c['n'], c['batch'])     # a closure isn't copied
        one.path = Path(b)
        cbs = [[CBS[k](c) for k in c['cbs']] for _ in range(2)]
        seed(1)
        learn.distrib(c['how'], c['epochs'], nprocs=c['n'], launcher=launcher, batch=c['batch'], cbs=cbs[0])
        drawn = streams(learn)
        if c['written'] and CASES[c['written']].tol == .05: return     # trains; test_cases says how near
        seed(1)
        getattr(one, c['how'])(c['epochs'], cbs=cbs[1])
        assert drawn == streams(one), 'random streams differ'
        for o in learn, one: drop_times(o)
        # gradients of a sum are as much larger; drawn losses divide by small numbers, and rounding depends on the
        # threads of this process
        tol = 1e-4 if c['loss'] in ('summed', None) else 1e-5
        assert_same(learn, one, tol, tol/10)
        for x, y in zip(*cbs):
            assert attrs(x).keys() == attrs(y).keys(), f'{type(x).__name__}: {attrs(x).keys()} or {attrs(y).keys()}'
            for k in attrs(x):
                np.testing.assert_allclose(plain(vars(x)[k]), plain(vars(y)[k]), rtol=1e-4, atol=1e-4,
                                           err_msg=f'{type(x).__name__}.{k}')
        assert getattr(learn, 'found', 0) == getattr(one, 'found', 0) == getattr(learn.model, 'found', 0)
        for dl, dl_one in zip(learn.dls.loaders, one.dls.loaders):      # the next epoch is one of the same size
            if isinstance(dl, DataLoader): dl.bs = dl_one.bs
        for o in learn, one:
            seed(2)
            with o.no_logging(): o.fit(1)
        assert_same(learn, one, tol, tol/10)


def main(how_many=100, start=0, first=0):
    configs = sorted((draw(random.Random(start*100_000+first+i)) for i in range(how_many)), key=lambda c: c['n'])
    failed, began = [], time.monotonic()
    for n, cs in itertools.groupby(configs, key=lambda c: c['n']):
        with Local() as launcher:
            for c in cs:
                try: try_one(c, launcher)
                except Exception as e:
                    at = traceback.extract_tb(e.__traceback__)[-1]      # most assertions have no message
                    failed.append((c, f'{at.name}, line {at.lineno}: {at.line}\n    {type(e).__name__}: {e}'[:600]))
    print(f'{how_many} combinations in {time.monotonic()-began:.0f} s, {len(failed)} failed')
    for c, e in failed: print(c, '\n   ', e)
    return not failed


if __name__ == '__main__': sys.exit(not main(*map(int, sys.argv[1:])))
