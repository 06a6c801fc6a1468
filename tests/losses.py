"""Losses that are no mean over items, for the tests of `any loss`; each is a function of (predictions, targets)."""
import functools
import torch
import torch.nn.functional as F
from fastai.losses import DiceLoss, FocalLossFlat, LabelSmoothingCrossEntropy
from torch import nn
from parity import items, mlp


def numbers(n, s=0): return [(x, x[:1]*2+y) for x, y in items(n, s=s)]


def some_ignored(n, s=0):
    return [(x, torch.tensor(-100) if i % 3 == 1 else y) for i, (x, y) in enumerate(items(n, s=s))]


def some_nan(n, s=0):
    return [(x, torch.full((1,), float('nan')) if i % 4 == 1 else y) for i, (x, y) in enumerate(numbers(n, s))]


def masked(n, s=0):
    "A value and whether it counts"
    return [(x, torch.cat([y, torch.tensor([float(i % 3 > 0)])])) for i, (x, y) in enumerate(numbers(n, s))]


def images(n, s=0):
    g = torch.Generator().manual_seed(s)
    return [(torch.randn(1, 4, 4, generator=g), torch.randint(2, (4, 4), generator=g)) for _ in range(n)]


def conv(): return nn.Conv2d(1, 2, 3, padding=1)


class CombinedLoss:
    "Of fastai's documentation: focal loss and Dice"
    def __init__(self, axis=1, smooth=1., alpha=1.):
        self.focal_loss, self.dice_loss, self.alpha = FocalLossFlat(axis=axis), DiceLoss(axis, smooth), alpha
    def __call__(self, pred, targ): return self.focal_loss(pred, targ) + self.alpha*self.dice_loss(pred, targ)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('weight', torch.tensor([1., 4., .3]))
    def forward(self, pred, y): return F.cross_entropy(pred, y, weight=self.weight)


class BatchDice(nn.Module):
    "Dice over all pixels of a batch"
    def forward(self, pred, y):
        p, t = pred.softmax(1)[:, 1], y.float()
        return 1 - (2*(p*t).sum()+1)/(p.sum()+t.sum()+1)


class TwoLosses(nn.Module):
    "A mean and a root in one module, by name"
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(dict(mean=nn.MSELoss(), root=RMSE()))
    def forward(self, pred, y): return sum(f(pred, y) for f in self.parts.values())


class RMSE(nn.Module):
    def forward(self, pred, y): return F.mse_loss(pred, y).sqrt()


def ignoring(pred, y): return F.cross_entropy(pred, y, ignore_index=-100)
def squares(pred, y): return ((pred-y)**2).sum()/20
def huber_mean(pred, y): return F.smooth_l1_loss(pred, y)
def masked_mean(pred, y): return ((pred-y[:, :1])**2*y[:, 1:]).sum() / y[:, 1:].sum().clamp(min=1)


def nan_labels(pred, y):
    known = ~y.isnan()
    return F.mse_loss(pred[known], y[known]) if known.any() else pred.sum()*0


def pearson(pred, y):
    p, t = pred-pred.mean(), y-y.mean()
    return 1 - (p*t).sum()/(p.norm()*t.norm()+1e-6)


def supcon(pred, y, temperature=.5):
    "Supervised contrastive: each item against all others of the batch"
    z = F.normalize(pred, dim=1)
    sim = z@z.T/temperature - torch.eye(len(z), device=z.device)*1e4
    same = (y[:, None] == y[None]).float() - torch.eye(len(z), device=z.device)
    return -((sim.log_softmax(1)*same).sum(1)/same.sum(1).clamp(min=1)).mean()


def variance(pred, y): return F.mse_loss(pred, y) + .1*F.relu(1-pred.std(0, correction=0)).mean()
def two_heads(pred, y): return F.cross_entropy(pred[0], y) + pred[1].var(correction=0)


class TwoHeads(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = mlp(), mlp(n_out=1)
    def forward(self, x): return self.a(x), self.b(x)


class Sequences(nn.Module):
    "Predictions with a dict and a tuple in it"
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return dict(logits=self.m(x), more=(x.mean(1), None))


def from_dict(pred, y):
    return F.cross_entropy(pred['logits'], y, weight=torch.tensor([1., 3., .2])) + pred['more'][0].max()


reg = dict(data=numbers, model=functools.partial(mlp, n_out=1))
seg = dict(data=images, model=conv)
EXACT = dict(                   # name -> (loss, arguments of `learner`, how it is computed)
    summed_function=(lambda: functools.partial(F.cross_entropy, reduction='sum'), dict(lr=.005), 'sum'),
    squares=(lambda: squares, reg, 'gather'),
    mean=(lambda: huber_mean, reg, 'gather'),
    combined=(CombinedLoss, seg, 'gather'),
    weighted=(Weighted, {}, 'gather'),
    weighted_function=(lambda: functools.partial(F.cross_entropy, weight=torch.tensor([1., 3., .5])), {}, 'mean'),
    ignoring=(lambda: ignoring, dict(data=some_ignored), 'gather'),
    masked=(lambda: masked_mean, dict(reg, data=masked), 'gather'),
    nan_labels=(lambda: nan_labels, dict(reg, data=some_nan), 'gather'),
    rmse=(RMSE, reg, 'gather'),
    nested=(TwoLosses, reg, 'gather'),
    pearson=(lambda: pearson, reg, 'gather'),
    supcon=(lambda: supcon, {}, 'gather'),
    batch_dice=(BatchDice, seg, 'gather'),
    variance=(lambda: variance, reg, 'gather'),
    two_outputs=(lambda: two_heads, dict(model=TwoHeads), 'gather'),
    a_dict=(lambda: from_dict, dict(model=Sequences), 'gather'),
    smoothing_and_weights=(lambda: LabelSmoothingCrossEntropy(weight=torch.tensor([1., 3., .2])), {}, 'gather'),
)


class Scaled(nn.Module):
    "A loss with a weight for each class, which a splitter may put into the optimizer"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
    def forward(self, pred, y): return nn.functional.cross_entropy(pred*self.scale, y)
