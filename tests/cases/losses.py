"""Losses and outputs of models as people write them. Each is a function that makes the arguments of
`parity.learner`; `AVERAGED` are those that can't be computed over the items of all workers."""
import random
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from fastcore.foundation import L
from torch import nn
from torch.utils import _pytree
from parity import items, learner, mlp, seed

AVERAGED = set()
# The model computes a part of the loss: a line says that this is averaged, as it is in one process
NAMED = 'loss_of_the_model', 'vae_that_reads_the_model', 'term_of_the_predictions'


def averaged(f):
    "Marks a case whose loss reads more than predictions and targets, or whose items aren't in dimension 0"
    AVERAGED.add(f.__name__)
    return f


def floats(n, s=0): return [(x, x[:1]*2) for x, _ in items(n, s=s)]
def itself(n, s=0): return [(x, x) for x, _ in items(n, s=s)]


class Wraps(nn.Module):
    "Returns what `f` makes of the scores of a small net"
    def __init__(self, f, n_out=3):
        super().__init__()
        self.net, self.f = mlp(n_out=n_out), f
    def forward(self, x): return self.f(self.net(x))


# Outputs

Named = namedtuple('Named', 'logits hidden')


@dataclass
class Data:
    logits: torch.Tensor
    loss: torch.Tensor = None


@dataclass(frozen=True)
class Frozen: logits: torch.Tensor


class Slots:
    __slots__ = 'logits',
    def __init__(self, logits): self.logits = logits


class Attributes(dict):
    def __getattr__(self, k): return self[k]


class Output(OrderedDict):
    "Like the outputs of Hugging Face's models: a dict whose items are attributes, too"
    def __init__(self, **kw):
        super().__init__({k: v for k, v in kw.items() if v is not None})
        vars(self).update(kw)


# as transformers does for each of its classes
_pytree.register_pytree_node(Output, lambda o: ([*o.values()], [*o]),
                             lambda new, names: Output(**dict(zip(names, new))))


def logits_loss(o, y): return F.cross_entropy(o.logits, y)
def logits_std(o, y): return F.cross_entropy(o.logits, y)+o.logits.std()
def named_tuple(): return dict(model=Wraps(lambda t: Named(t, t.detach())), loss_func=logits_std)
def data_class(): return dict(model=Wraps(Data), loss_func=logits_std)
def frozen_data_class(): return dict(model=Wraps(Frozen), loss_func=logits_std)
@averaged
def object_with_slots(): return dict(model=Wraps(Slots), loss_func=logits_loss)
@averaged
def plain_object(): return dict(model=Wraps(lambda t: SimpleNamespace(logits=t, name='x')), loss_func=logits_std)
@averaged
def dict_with_attributes(): return dict(model=Wraps(lambda t: Attributes(logits=t)), loss_func=logits_std)
def library_output(): return dict(model=Wraps(lambda t: Output(logits=t, loss=None)), loss_func=logits_std)
def output_with_a_cache():
    return dict(model=Wraps(lambda t: Output(logits=t, cache=[(t.detach(), t.detach())])), loss_func=logits_loss)
def list_of_fastcore(): return dict(model=Wraps(lambda t: L(t, t*2)), loss_func=lambda o, y: F.cross_entropy(o[1], y))


class OwnLoss(nn.Module):
    "Computes its loss itself, as a model that is given its labels"
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x, y=None):
        logits = self.net(x)
        return Output(loss=None if y is None else F.cross_entropy(logits, y), logits=logits)


class Labelled(Callback):
    order = -5
    def before_batch(self): self.learn.xb = *self.xb[:1], self.yb[0]


def loss_of_the_model(): return dict(model=OwnLoss(), loss_func=lambda o, y: o.loss, cbs=Labelled())


# Losses that read more

class Distil(Callback):
    def __init__(self): self.teacher = mlp().eval()
    def before_fit(self): self.learn.loss_func = self.loss
    def loss(self, p, y):
        with torch.no_grad(): t = self.teacher(self.learn.x)
        return F.cross_entropy(p, y) + F.kl_div(p.log_softmax(1), t.softmax(1), reduction='batchmean')


class Teacher(Callback):
    "Keeps the teacher's predictions, which the loss reads"
    order = -5
    def __init__(self): self.teacher = mlp().eval()
    def before_fit(self): self.learn.loss_func = self.loss
    def after_pred(self): self.soft = self.teacher(self.learn.x).detach().softmax(1)
    def loss(self, p, y): return F.cross_entropy(p, self.soft)


class Masked(Callback):
    "Hides parts of the inputs, which the model is to restore"
    order = -5
    def before_fit(self): self.learn.loss_func = self.loss
    def before_batch(self):
        self.mask = self.x > 0
        self.learn.xb, self.learn.yb = (self.x*~self.mask,), (self.x,)
    def loss(self, p, y): return ((p-y)**2*self.mask).sum()/(p.shape[1]*len(p))


class SampleWeights(Callback):
    def before_fit(self): self.learn.loss_func = self.loss
    def loss(self, p, y): return (F.cross_entropy(p, y, reduction='none')*self.learn.x[:, 0].abs()).mean()


@averaged
def distillation(): return dict(cbs=Distil())
@averaged
def distillation_of_kept_predictions(): return dict(cbs=Teacher())
@averaged
def masked_pretraining(): return dict(model=mlp(n_out=4), loss_func=F.mse_loss, cbs=Masked())
@averaged
def weights_of_items(): return dict(cbs=SampleWeights())


class Vae(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.enc, self.dec, self.out = nn.Linear(4, 4), nn.Linear(2, 4), out
    def forward(self, x):
        self.mu, self.lv = self.enc(x).chunk(2, 1)
        return self.out(self.dec(self.mu), self.mu, self.lv)


def kl(mu, lv): return (-.5*(1+lv-mu**2-lv.exp())).sum(1).mean()
def vae_of_outputs():
    return dict(data=itself, model=Vae(lambda *o: o), loss_func=lambda o, y: F.mse_loss(o[0], y)+kl(*o[1:]))
def vae_that_sums():
    return dict(data=itself, model=Vae(lambda *o: o), lr=.002,
                loss_func=lambda o, y: F.mse_loss(o[0], y, reduction='sum')+kl(*o[1:])*len(y))


class ReadsModel:
    def __init__(self, model): self.model = model
    def __call__(self, p, y): return F.mse_loss(p, y)+kl(self.model.mu, self.model.lv)


class KeepsTerm(nn.Module):
    "Keeps a term that it makes of its predictions"
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x):
        out = self.net(x)
        self.term = (out**2).mean()
        return out


class WithTerm:
    def __init__(self, model): self.model = model
    def __call__(self, p, y): return F.cross_entropy(p, y)+.1*self.model.term


def term_of_the_predictions():
    model = KeepsTerm()
    return dict(model=model, loss_func=WithTerm(model))


def vae_that_reads_the_model():
    model = Vae(lambda p, *_: p)
    return dict(data=itself, model=model, loss_func=ReadsModel(model))


# Several heads, several losses

class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    def forward(self, x):
        h = self.body(x).tanh()
        return self.a(h), self.b(h)


def two_targets(n, s=0): return [(x, y, x[:1]) for x, y in items(n, s=s)]
def heads(o, y, z): return F.cross_entropy(o[0], y) + F.mse_loss(o[1], z).sqrt()
def two_heads(): return dict(data=two_targets, model=TwoHeads(), loss_func=heads, n_inp=1)


class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
    def forward(self, o, y, z):
        losses = torch.stack([F.cross_entropy(o[0], y), F.mse_loss(o[1], z)])
        return (losses*(-self.w).exp()+self.w).sum()


def multi_task(): return dict(data=two_targets, model=TwoHeads(), loss_func=LearnedWeights(), n_inp=1)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = mlp(), mlp()
    def forward(self, x): return dict(out=self.a(x), aux=self.b(x)) if self.training else dict(out=self.a(x))


def auxiliary(o, y): return F.cross_entropy(o['out'], y)+sum(.4*F.cross_entropy(o[k], y) for k in o if k != 'out')
def auxiliary_outputs(): return dict(model=Auxiliary(), loss_func=auxiliary)


# Means, sums, and others

class Focal(nn.Module):
    def __init__(self, gamma=2.):
        super().__init__()
        self.gamma = gamma
    def forward(self, p, y):
        ce = F.cross_entropy(p, y, reduction='none')
        return ((1-(-ce).exp())**self.gamma*ce).mean()


def smoothing(p, y): return F.cross_entropy(p, y, label_smoothing=.1)
def dice(p, y):
    p, y = p.softmax(1), F.one_hot(y, 3)
    return 1-(2*(p*y).sum(0)+1).div((p+y).sum(0)+1).mean()
def focal(): return dict(loss_func=Focal())
def label_smoothing(): return dict(loss_func=smoothing)
def dice_of_a_batch(): return dict(loss_func=dice)
def bce_with_logits():
    return dict(data=lambda n, s=0: [(x, (x[:3] > 0).float()) for x, _ in items(n, s=s)],
                loss_func=lambda p, y: F.binary_cross_entropy_with_logits(p, y, pos_weight=torch.tensor([1., 2., 3.])))
def pairwise(p, y):
    d, t = p-p.T, (y-y.T).sign()
    return F.softplus(-d*t)[t != 0].mean()
def ranking(): return dict(data=floats, model=mlp(n_out=1), loss_func=pairwise)
def cox(p, y):
    order = y[:, 0].argsort(descending=True)
    p = p[order, 0]
    return (p.logcumsumexp(0)-p).mean()
def survival(): return dict(data=floats, model=mlp(n_out=1), loss_func=cox)
def pearson(p, y): return 1-F.cosine_similarity(p[:, 0]-p.mean(), y[:, 0]-y.mean(), dim=0)
def correlation(): return dict(data=floats, model=mlp(n_out=1), loss_func=pearson)
def surrogate(o, y): return (-o.log_softmax(1).gather(1, y[:, None])[:, 0]*(o.detach().max(1)[0]-.5)).mean()
def policy_gradient(): return dict(loss_func=surrogate)
def energy(o, y): return o.logsumexp(1).mean()-o.gather(1, y[:, None]).mean()+.1*o.pow(2).mean()
def energy_based(): return dict(loss_func=energy)
def gaussian(o, y): return -torch.distributions.Normal(o[:, :1], o[:, 1:2].exp()).log_prob(y).mean()
def likelihood(): return dict(data=floats, model=mlp(n_out=2), loss_func=gaussian)
@averaged
@averaged
def distribution_as_output():
    return dict(data=floats, model=Wraps(lambda t: torch.distributions.Normal(t[:, :1], t[:, 1:].exp()), 2),
                loss_func=lambda o, y: -o.log_prob(y).mean())


# Views, pairs and contrasts

def nt_xent(z, y):
    n = len(z)//2
    z = F.normalize(z, dim=1)
    sim = (z@z.T/.5).masked_fill(torch.eye(2*n, dtype=torch.bool), -1e9)
    return F.cross_entropy(sim, (torch.arange(2*n)+n) % (2*n))


class TwoViews(Callback):
    order = -5
    def before_batch(self): self.learn.xb = torch.cat([self.x, self.x*.9+.1]),


def simclr(): return dict(model=mlp(), loss_func=nt_xent, cbs=TwoViews())


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, a, b): return self.net(a), self.net(b)


def pairs(n, s=0): return [(x, x.flip(0), y.float()) for x, y in items(n, s=s)]
def contrastive(o, y): return ((o[0]-o[1]).norm(dim=1)*(y > 0)+F.relu(1-(o[0]-o[1]).norm(dim=1))*(y == 0)).mean()
def siamese(): return dict(data=pairs, model=Siamese(), loss_func=contrastive)
def barlow(o, y):
    a, b = [(t-t.mean(0))/(t.std(0)+1e-3) for t in o]
    c = a.T@b/len(a)
    return (c-torch.eye(len(c))).pow(2).sum()
def barlow_twins(): return dict(data=pairs, model=Siamese(), loss_func=barlow, lr=.01, train=36)


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(), mlp()
        self.target.requires_grad_(False)
    def forward(self, a, b): return self.online(a), self.target(b)


def byol(): return dict(data=pairs, model=Byol(),
                        loss_func=lambda o, y: (2-2*F.cosine_similarity(o[0], o[1].detach(), dim=1)).mean())


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x): return torch.stack([self.net(x), self.net(-x), self.net(x*2)])


def swav(p, y): return -(p[0].softmax(-1)*p[1:].log_softmax(-1)).sum(-1).mean()
@averaged
def views_first(): return dict(model=Views(), loss_func=swav)


# Sequences

class Steps(nn.Module):
    "Scores of 5 steps, items first or time first"
    def __init__(self, time_first=False):
        super().__init__()
        self.lin, self.time_first = nn.Linear(4, 5*4), time_first
    def forward(self, x):
        out = self.lin(x).view(len(x), 5, 4).log_softmax(2)
        return out.transpose(0, 1) if self.time_first else out


def labelled(n, s=0): return [(x, torch.tensor([1, 2]) if y else torch.tensor([2, 3])) for x, y in items(n, s=s)]
def ctc(p, y): return F.ctc_loss(p.transpose(0, 1), y, torch.full((len(p),), 5), torch.full((len(y),), 2))
def ctc_time(p, y): return F.ctc_loss(p, y, torch.full((p.shape[1],), 5), torch.full((len(y),), 2))
def ctc_items_first(): return dict(data=labelled, model=Steps(), loss_func=ctc)
@averaged
def ctc_time_first(): return dict(data=labelled, model=Steps(True), loss_func=ctc_time)


def words(n, s=0): return [(t, t) for t in (torch.arange(6)*(i+s) % 11 for i in range(n))]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 11)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])


def shifted(p, y): return F.cross_entropy(p[:, :-1].reshape(-1, 11), y[:, 1:].reshape(-1))
def language_model_that_shifts(): return dict(data=words, model=Words(), loss_func=shifted)
def flattened(p, y): return F.cross_entropy(p.view(-1, 11), y.view(-1), ignore_index=0)
def masked_language_model(): return dict(data=words, model=Words(), loss_func=flattened)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 11)
    def forward(self, x, y=None): return self.out(self.rnn(self.emb(x if y is None else y.roll(1, 1)))[0])


class Forces(Callback):
    order = -5
    def before_batch(self): self.learn.xb = *self.xb[:1], self.yb[0]


def seq2seq(): return dict(data=words, model=Seq2Seq(), loss_func=lambda p, y: F.cross_entropy(p.transpose(1, 2), y),
                           cbs=Forces())


# Detection: lists with an entry for each item

def collate(batch):
    xs, ys = zip(*batch)
    return torch.stack(xs), list(ys)


def boxes(n, s=0): return [(x, dict(boxes=x[:2].repeat(1+i % 3, 1), label=y)) for i, (x, y) in enumerate(items(n, s=s))]
def detect_mean(p, ys): return sum((p[i, :2]-t['boxes']).pow(2).mean() for i, t in enumerate(ys))/len(ys)
def detect_sum(p, ys): return sum((p[i, :2]-t['boxes']).pow(2).sum() for i, t in enumerate(ys))/10
def detect_lists(ps, ys): return torch.stack([(p[:2]-t['boxes']).pow(2).mean() for p, t in zip(ps, ys)]).mean()**.5
def detection(): return dict(data=boxes, loss_func=detect_mean, collate=collate)
def detection_that_sums(): return dict(data=boxes, loss_func=detect_sum, collate=collate, lr=.01)
def detection_of_lists(): return dict(data=boxes, model=Wraps(lambda t: [*t.unbind()], 7),
                                      loss_func=detect_lists, collate=collate)


# Others

class Physics(nn.Module):
    "Returns the output and its gradient by the input"
    def __init__(self):
        super().__init__()
        self.net = mlp(n_out=1)
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.net(x)
            return u, torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def physics_informed():
    return dict(data=floats, model=Physics(), lr=.01,
                loss_func=lambda o, y: F.mse_loss(o[0], y)+(o[1].sum(1)-1).pow(2).mean())


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)
    def forward(self, x): return self.lin(self.emb((x[:, 0].abs()*5).long().clamp(0, 19)))


def sparse_embedding():
    return dict(model=Sparse(), loss_func=CrossEntropyLossFlat(), opt_func=partial(OptimWrapper, opt=torch.optim.SGD))


class Poly:
    gamma = 0.
    def __call__(self, p, y): return F.cross_entropy(p, y)*(1+self.gamma)


class Anneals(Callback):
    def after_pred(self): self.learn.loss_func.gamma = self.pct_train if self.training else 0.


def annealed_by_a_callback(): return dict(loss_func=Poly(), cbs=Anneals())


def annealed_by_itself():
    n = 0
    def loss(p, y):
        nonlocal n
        n += 1
        return F.cross_entropy(p, y)*(1+n/10)
    return dict(loss_func=loss)


CASES = {k: f for k, f in list(globals().items())
         if callable(f) and getattr(f, '__module__', '') == __name__ and hasattr(f, '__code__')
         and not f.__code__.co_argcount and k not in ('collate', 'averaged')}


def made(name, **more):
    "The learner of a case; `more`: other arguments of `parity.learner`"
    seed()
    kwargs = CASES[name]() | more
    kwargs.pop('loss_kind', None)
    collate, n_inp = kwargs.pop('collate', None), kwargs.pop('n_inp', None)
    learn = learner(train=kwargs.pop('train', 37), valid=kwargs.pop('valid', 21), bs=kwargs.pop('bs', 4), **kwargs)
    if collate:
        dls = [DataLoader(dl.dataset, bs=dl.bs, shuffle=i == 0, num_workers=0, create_batch=collate)
               for i, dl in enumerate(learn.dls.loaders)]
        learn.dls = DataLoaders(*dls)
    if n_inp: learn.dls.n_inp = n_inp
    return learn
