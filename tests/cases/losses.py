"Losses and outputs of models"
import functools, itertools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import Perplexity
from fastai.optimizer import Adam, OptimWrapper
from fastcore.foundation import L
from torch import nn
from torch.utils import _pytree
from cases import CASES, add, case, holds
from losses import EXACT, numbers
from parity import Collect, items, largest, learner, mlp

whole = partial(case, loss='whole', tol=2e-5)
averaged = partial(case, loss='averaged', tol=.05)
# The model computes a part of the loss: a line says that this is averaged, as it is in one process
named = partial(case, loss=None, tol=2e-5)
AVERAGED = 'averaged over workers, weighted by items',


def floats(n, s=0): return [(x, x[:1]*2) for x, _ in items(n, s=s)]
def itself(n, s=0): return [(x, x) for x, _ in items(n, s=s)]


class Wraps(nn.Module):
    "Returns what `f` makes of the scores of a small net"
    def __init__(self, f, n_out=3):
        super().__init__()
        self.net, self.f = mlp(n_out=n_out), f
    def forward(self, x): return self.f(self.net(x))


holds('Losses', "Outputs of torch's `_pytree` (tuples, dicts, named tuples, outputs of transformers), and "
      "dataclasses; lists with an entry for each item; sparse gradients; a loss that fails with the predictions and "
      "targets of all workers (it reads more), or computes gradients (a gradient penalty, a residual of an "
      "equation), is averaged over workers, and a line says what it saw and what follows")

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
@whole
def named_tuple(): return dict(model=Wraps(lambda t: Named(t, t.detach())), loss_func=logits_std)
@whole
def data_class(): return dict(model=Wraps(Data), loss_func=logits_std)
@whole
def frozen_data_class(): return dict(model=Wraps(Frozen), loss_func=logits_std)
@averaged
def object_with_slots(): return dict(model=Wraps(Slots), loss_func=logits_loss)
@averaged
def plain_object(): return dict(model=Wraps(lambda t: SimpleNamespace(logits=t, name='x')),
                                loss_func=logits_std)
@averaged
def dict_with_attributes(): return dict(model=Wraps(lambda t: Attributes(logits=t)), loss_func=logits_std)
@whole
def library_output(): return dict(model=Wraps(lambda t: Output(logits=t, loss=None)), loss_func=logits_std)
@whole
def output_with_a_cache(): return dict(model=Wraps(lambda t: Output(logits=t, cache=[(t.detach(), t.detach())])),
                                       loss_func=logits_loss)
@whole
def list_of_fastcore(): return dict(model=Wraps(lambda t: L(t, t*2)),
                                    loss_func=lambda o, y: F.cross_entropy(o[1], y))


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


@named(says=AVERAGED)
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
@whole
def vae_of_outputs(): return dict(data=itself, model=Vae(lambda *o: o),
                                  loss_func=lambda o, y: F.mse_loss(o[0], y)+kl(*o[1:]))
@whole
def vae_that_sums(): return dict(data=itself, model=Vae(lambda *o: o), lr=.002,
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


@case(loss=None, tol=2e-5, says=AVERAGED)
def term_of_the_predictions():
    model = KeepsTerm()
    return dict(model=model, loss_func=WithTerm(model))


@case(loss=None, tol=2e-5, says=AVERAGED)
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
@whole
def two_heads(): return dict(data=two_targets, model=TwoHeads(), loss_func=heads, n_inp=1)


class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
    def forward(self, o, y, z):
        losses = torch.stack([F.cross_entropy(o[0], y), F.mse_loss(o[1], z)])
        return (losses*(-self.w).exp()+self.w).sum()


@whole
def multi_task(): return dict(data=two_targets, model=TwoHeads(), loss_func=LearnedWeights(), n_inp=1)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = mlp(), mlp()
    def forward(self, x): return dict(out=self.a(x), aux=self.b(x)) if self.training else dict(out=self.a(x))


def auxiliary(o, y): return F.cross_entropy(o['out'], y)+sum(.4*F.cross_entropy(o[k], y) for k in o if k != 'out')
@whole
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
@whole
def focal(): return dict(loss_func=Focal())
@whole
def label_smoothing(): return dict(loss_func=smoothing)
@whole
def dice_of_a_batch(): return dict(loss_func=dice)
def bce(p, y): return F.binary_cross_entropy_with_logits(p, y, pos_weight=torch.tensor([1., 2., 3.]))
@whole
def bce_with_logits(): return dict(data=lambda n, s=0: [(x, (x[:3] > 0).float()) for x, _ in items(n, s=s)],
                                   loss_func=bce)
def pairwise(p, y):
    d, t = p-p.T, (y-y.T).sign()
    return F.softplus(-d*t)[t != 0].mean()
@whole
def ranking(): return dict(data=floats, model=mlp(n_out=1), loss_func=pairwise)
def cox(p, y):
    order = y[:, 0].argsort(descending=True)
    p = p[order, 0]
    return (p.logcumsumexp(0)-p).mean()
@whole
def survival(): return dict(data=floats, model=mlp(n_out=1), loss_func=cox)
def pearson(p, y): return 1-F.cosine_similarity(p[:, 0]-p.mean(), y[:, 0]-y.mean(), dim=0)
@whole
def correlation(): return dict(data=floats, model=mlp(n_out=1), loss_func=pearson)
def surrogate(o, y): return (-o.log_softmax(1).gather(1, y[:, None])[:, 0]*(o.detach().max(1)[0]-.5)).mean()
@whole
def policy_gradient(): return dict(loss_func=surrogate)
def energy(o, y): return o.logsumexp(1).mean()-o.gather(1, y[:, None]).mean()+.1*o.pow(2).mean()
@whole
def energy_based(): return dict(loss_func=energy)
def gaussian(o, y): return -torch.distributions.Normal(o[:, :1], o[:, 1:2].exp()).log_prob(y).mean()
@whole
def likelihood(): return dict(data=floats, model=mlp(n_out=2), loss_func=gaussian)
@averaged
def distribution_as_output(): return dict(
    data=floats, model=Wraps(lambda t: torch.distributions.Normal(t[:, :1], t[:, 1:].exp()), 2),
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


@whole
def simclr(): return dict(model=mlp(), loss_func=nt_xent, cbs=TwoViews())


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, a, b): return self.net(a), self.net(b)


def pairs(n, s=0): return [(x, x.flip(0), y.float()) for x, y in items(n, s=s)]
def contrastive(o, y): return ((o[0]-o[1]).norm(dim=1)*(y > 0)+F.relu(1-(o[0]-o[1]).norm(dim=1))*(y == 0)).mean()
@whole
def siamese(): return dict(data=pairs, model=Siamese(), loss_func=contrastive)
def barlow(o, y):
    a, b = [(t-t.mean(0))/(t.std(0)+1e-3) for t in o]
    c = a.T@b/len(a)
    return (c-torch.eye(len(c))).pow(2).sum()
@whole
def barlow_twins(): return dict(data=pairs, model=Siamese(), loss_func=barlow, lr=.01, train=36)


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(), mlp()
        self.target.requires_grad_(False)
    def forward(self, a, b): return self.online(a), self.target(b)


@whole
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
@whole
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
@whole
def language_model_that_shifts(): return dict(data=words, model=Words(), loss_func=shifted)
def flattened(p, y): return F.cross_entropy(p.view(-1, 11), y.view(-1), ignore_index=0)
@whole
def masked_language_model(): return dict(data=words, model=Words(), loss_func=flattened)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 11)
    def forward(self, x, y=None): return self.out(self.rnn(self.emb(x if y is None else y.roll(1, 1)))[0])


class Forces(Callback):
    order = -5
    def before_batch(self): self.learn.xb = *self.xb[:1], self.yb[0]


@whole
def seq2seq(): return dict(data=words, model=Seq2Seq(), cbs=Forces(),
                           loss_func=lambda p, y: F.cross_entropy(p.transpose(1, 2), y))


# Detection: lists with an entry for each item

def collate(batch):
    xs, ys = zip(*batch)
    return torch.stack(xs), list(ys)


def boxes(n, s=0): return [(x, dict(boxes=x[:2].repeat(1+i % 3, 1), label=y)) for i, (x, y) in enumerate(items(n, s=s))]
def detect_mean(p, ys): return sum((p[i, :2]-t['boxes']).pow(2).mean() for i, t in enumerate(ys))/len(ys)
def detect_sum(p, ys): return sum((p[i, :2]-t['boxes']).pow(2).sum() for i, t in enumerate(ys))/10
def detect_lists(ps, ys): return torch.stack([(p[:2]-t['boxes']).pow(2).mean() for p, t in zip(ps, ys)]).mean()**.5
@whole
def detection(): return dict(data=boxes, loss_func=detect_mean, collate=collate)
@whole
def detection_that_sums(): return dict(data=boxes, loss_func=detect_sum, collate=collate, lr=.01)
@whole
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


@whole
def physics_informed(): return dict(data=floats, model=Physics(), lr=.01,
                                    loss_func=lambda o, y: F.mse_loss(o[0], y)+(o[1].sum(1)-1).pow(2).mean())


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)
    def forward(self, x): return self.lin(self.emb((x[:, 0].abs()*5).long().clamp(0, 19)))


@case
def sparse_embedding(): return dict(model=Sparse(), loss_func=CrossEntropyLossFlat(),
                                    opt_func=partial(OptimWrapper, opt=torch.optim.SGD))


class Poly:
    gamma = 0.
    def __call__(self, p, y): return F.cross_entropy(p, y)*(1+self.gamma)


class Anneals(Callback):
    def after_pred(self): self.learn.loss_func.gamma = self.pct_train if self.training else 0.


@whole
def annealed_by_a_callback(): return dict(loss_func=Poly(), cbs=Anneals())


@case(loss='whole')
def annealed_by_itself():
    n = 0
    def loss(p, y):
        nonlocal n
        n += 1
        return F.cross_entropy(p, y)*(1+n/10)
    return dict(loss_func=loss)


WRITTEN = [*CASES]      # they train with any optimizer: tests/random_combinations.py draws of them


# Any loss of predictions and targets

holds('Losses', "Any loss of predictions and targets: means, sums, class weights and ignored targets inside a "
      "function, masked means, missing labels, roots, correlations, Dice over a batch, contrastive losses, any "
      "nesting of them; in training and in validation. Losses that are not torch's or fastai's own are computed "
      "over the predictions and targets of all workers; one line says so. Also where workers have unequal parts or "
      "none, and while gradients accumulate")


def exact(name, **more):
    loss, kwargs, _ = EXACT[name]
    return dict(kwargs, loss_func=loss(), model=kwargs.get('model', mlp)(), **more)


for name, (*_, how) in EXACT.items(): add(name, partial(exact, name), loss='whole' if how == 'gather' else 'weighted')


def ratio(pred, y):
    "Its value is a mean, its gradient is none"
    a, b = F.mse_loss(pred, y), pred.var(unbiased=False)+1
    return a + b*(a/b).detach()


def regression(loss_func=None, **kwargs): return dict(data=numbers, model=mlp(n_out=1), loss_func=loss_func, **kwargs)
def one_missing(n, s=0): return [(x, torch.tensor(-100) if i == n-1 else y) for i, (x, y) in enumerate(items(n, s=s))]
def rarely(pred, y): return F.cross_entropy(pred, y, ignore_index=-100)


@whole
def of_ratio(): return regression(ratio)
@whole
def one_ignored_target(): return dict(loss_func=rarely, data=one_missing, train=16, valid=8, bs=8)
@case(loss=None, options=dict(loss='gather'))
def said_to_be_whole(): return exact('rmse')
add('known_and_said_to_be_whole', dict, loss=None, options=dict(loss='gather'))
@case(options=dict(loss='sum'))
def said_to_be_a_sum(): return exact('squares')
@case(options=dict(loss='mean'))
def said_to_be_a_mean(): return exact('mean')


# fastai counts the boxes of the first item, and divides a square root in place: neither of these accumulates
def accumulating(name):
    made = CASES[name].make()
    return made | dict(train=32, cbs=[*L(made.get('cbs')), GradientAccumulation(16)])


for name in ('data_class', 'masked_language_model', 'barlow_twins', 'label_smoothing', 'two_heads', 'survival',
             'variance', 'squares', 'views_first'):
    add(f'{name}_accumulating', partial(accumulating, name), loss=CASES[name].loss, tol=CASES[name].tol)


class RowsOfViews(Callback):
    "Two views of each item; the targets say in which row the other view of an item is, as in SimCLR"
    def __init__(self, together=False): self.together = together
    def before_batch(self):
        x = self.x
        rows = torch.arange(2*len(x))
        if self.together: self.learn.xb, self.learn.yb = (torch.stack([x*.5, x*.8], 1).flatten(0, 1),), (rows ^ 1,)
        else: self.learn.xb, self.learn.yb = (torch.cat([x*.5, x*.8]),), (rows.roll(len(x)),)


def by_rows(pred, y):
    pred = F.normalize(pred, dim=1)
    like = pred @ pred.T
    return F.cross_entropy(like.masked_fill(torch.eye(len(y)).bool(), -1e9), y)


def by_halves(pred, y, t=.5):
    a, b = F.normalize(pred, dim=1).chunk(2)
    return F.cross_entropy(a@b.T/t, torch.arange(len(a)))


holds('Losses', "One ignored target in the whole batch is noticed; predictions with several views of each item are "
      "put in order, also where targets number the rows")
@whole
def views_one_after_the_other(): return dict(loss_func=by_halves, train=32, valid=16, cbs=TwoViews())
@whole
def rows_of_views(): return dict(loss_func=by_rows, cbs=RowsOfViews())
@whole
def rows_of_views_together(): return dict(loss_func=by_rows, train=32, cbs=RowsOfViews(True))


class Letters(nn.Module):
    "Log-probabilities of 5 letters, one of them blank, at each time"
    def __init__(self):
        super().__init__()
        self.net = mlp(n_out=5)
    def forward(self, x): return self.net(x).log_softmax(-1).transpose(0, 1)


def texts(n, s=0):
    "`n` pairs of 9 vectors and a text of 1 to 4 letters"
    g = torch.Generator().manual_seed(s)
    lengths = torch.randint(1, 5, (n,), generator=g).tolist()
    return [(torch.randn(9, 4, generator=g), torch.randint(1, 5, (m,), generator=g)) for m in lengths]


def text_batch(pairs, join):
    xs, ys = zip(*pairs)
    return torch.stack(xs), join(ys), torch.full((len(ys),), 9), torch.tensor([len(y) for y in ys])


# targets are one row of all letters, or padded rows: the mean is over texts
@case
def ctc_of_a_row(): return dict(model=Letters(), loss_func=nn.CTCLoss(), data=texts, n_inp=1,
                                collate=partial(text_batch, join=torch.cat))
@case
def ctc_of_padded_rows(): return dict(model=Letters(), loss_func=partial(F.ctc_loss, zero_infinity=True), data=texts,
                                      n_inp=1, collate=partial(text_batch, join=partial(
                                          nn.utils.rnn.pad_sequence, batch_first=True)))


# What a loss keeps

holds('Losses', "A loss function that changes a state of its own in each call: all workers validate all batches, so "
      "that its state is that of one process, at any depth: in closures, dicts, lists, iterators, objects in "
      "modules, attributes that its first call makes. One that does so only in a validation: from the second one "
      "on, and a line says so. What a first call makes, such as a cache, is no state")


def in_a_closure():
    kept = dict(calls=0, mean=1.)
    def loss(p, y):
        kept['calls'] += 1
        ce = F.cross_entropy(p, y)
        kept['mean'] = .8*kept['mean']+.2*float(ce)
        return ce/kept['mean']*(1+kept['calls']/20)
    return loss


def in_an_iterator():
    "Two objects below the function"
    class Temperatures:
        def __init__(self): self.it = itertools.count(1)
    held = [Temperatures()]
    return lambda p, y: F.cross_entropy(p/(1+.05*next(held[0].it)), y)


class Weights:
    def __init__(self): self.t = 0
    def next(self):
        self.t += 1
        return 1/(1+.1*self.t)


class InAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = Weights()
    def forward(self, p, y): return F.cross_entropy(p, y)*self.w.next()


class InADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.ema = dict(ce=1.)
    def forward(self, p, y):
        ce = F.cross_entropy(p, y)
        self.ema['ce'] = .9*self.ema['ce']+.1*float(ce)
        return ce/self.ema['ce']


class Centers(nn.Module):
    "Plain tensors, and a list of them"
    def __init__(self):
        super().__init__()
        self.center, self.bank = torch.zeros(3), []
    def forward(self, p, y):
        self.center = .9*self.center+.1*p.detach().mean(0)
        self.bank.append(p.detach().mean(0))
        del self.bank[:-4]
        return F.cross_entropy(p-self.center+torch.stack(self.bank).mean(0), y)


class InItsFunction:
    def __init__(self): self.inner = in_a_closure()
    def __call__(self, p, y): return self.inner(p, y).sqrt()


class Counts:
    "Counts in a plain attribute, which its first call makes, and a list"
    def __init__(self): self.seen = []
    def __call__(self, p, y):
        self.n = getattr(self, 'n', 0)+1
        self.seen.append(len(y))
        return F.cross_entropy(p, y)/(1+.1*self.n)


def as_often(learn, one):
    "Called as often as in one process"
    if isinstance(learn.loss_func, Counts):
        assert learn.loss_func.n == one.loss_func.n and len(learn.loss_func.seen) == len(one.loss_func.seen)


def keeping(loss): return dict(loss_func=loss())
def keeping_while_accumulating(loss): return dict(loss_func=loss(), train=33, cbs=GradientAccumulation(16))


for f in in_a_closure, in_an_iterator, InAnObject, InADict, Centers, InItsFunction, Counts:
    add(f.__name__, partial(keeping, f), loss=None, says=('changes a state of its own',), check=as_often)
for f in in_a_closure, Centers:
    add(f'{f.__name__}_accumulating', partial(keeping_while_accumulating, f), loss=None)


# One of torch's, whose code or result is another one

class Root(nn.CrossEntropyLoss):
    def __call__(self, p, y): return super().__call__(p, y).sqrt()


@functools.wraps(F.cross_entropy)
def named_as_torchs(p, y): return F.cross_entropy(p, y).sqrt()


def with_its_own_forward():
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda p, y: F.cross_entropy(p, y).sqrt()
    return loss


def with_a_hook():
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, args, out: out.sqrt())
    return loss


def with_its_name(): return named_as_torchs


for make in Root, with_its_name, with_its_own_forward, with_a_hook:
    add(f'torchs_changed_by_{make.__name__}', partial(keeping, make), loss='whole', tol=2e-5)


class Replaces(Callback):
    "Replaces the loss function as fastai's mixup does, under its names"
    def before_fit(self): self.old_lf, self.learn.loss_func = self.learn.loss_func, self.lf
    def lf(self, p, *yb): return self.old_lf(p, *yb).sqrt()
    def after_fit(self): self.learn.loss_func = self.old_lf


@whole
def replaced_by_a_callback(): return dict(cbs=Replaces())


class CachesWeights:
    "What its first call makes is no state: validations are divided"
    weight = None
    def __call__(self, p, y):
        if self.weight is None: self.weight = torch.ones(3)
        return F.cross_entropy(p, y, weight=self.weight)


@whole
def a_cache(): return dict(loss_func=CachesWeights())


class ArcFace(nn.Module):
    "A loss with weights of its own, and one for how much it counts"
    def __init__(self):
        super().__init__()
        self.classes, self.scale = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.zeros(()))
        self.register_buffer('margin', torch.tensor(.1))
    def forward(self, pred, y):
        cos = F.normalize(pred, dim=1)@F.normalize(self.classes, dim=1).T
        return F.cross_entropy(4*(cos-self.margin*F.one_hot(y, 3)), y)*torch.exp(-self.scale) + self.scale


class RootArc(ArcFace):
    def forward(self, pred, y): return super().forward(pred, y).sqrt()


def trained(loss_func, **kwargs):
    return dict(loss_func=loss_func, opt_func=Adam,
                splitter=lambda m: [list(m.parameters()), list(loss_func.parameters())], **kwargs)


def same_loss(learn, one):
    a, b = ([*o.loss_func.parameters()] for o in (learn, one))
    assert largest(a, b) < 1e-5 and a[1].abs() > 1e-3
    assert all(any(p is q for g in learn.opt.param_lists for q in g) for p in a), 'and goes on in the notebook'


holds('Losses', "Parameters of the loss function are trained like those of the model, and are in the notebook's "
      "loss afterwards")
@whole(check=same_loss)
def loss_with_parameters(): return trained(ArcFace())
@whole(check=same_loss)
def loss_with_parameters_accumulating(): return trained(ArcFace(), cbs=GradientAccumulation(16))
@whole(check=same_loss)
def root_with_parameters(): return trained(RootArc())


# What callbacks do with a loss

class Swaps(Callback):
    "Another loss, from an event of the second epoch on"
    def __init__(self, event, loss):
        self.loss = loss
        setattr(self, event, self.swap)
    def swap(self):
        if self.epoch == 1: self.learn.loss_func = self.loss


def swapped(learn, one): assert learn.loss_func in (pearson, F.mse_loss)


@case(loss=None, check=swapped)
def another_loss_in_the_next_epoch(): return exact('mean', cbs=Swaps('before_epoch', pearson))
@case(loss=None, check=swapped)
def another_loss_in_the_middle_of_a_batch(): return exact('rmse', cbs=Swaps('after_backward', F.mse_loss))


class Standardized(nn.Module):
    "What an item gets depends on all others"
    def forward(self, p, y): return F.cross_entropy((p-p.mean(0))/(p.std(0)+.1), y)


class Attacks(Collect):
    "An adversarial example, by the learner's loss, in an event"
    order = -5
    def __init__(self, event, scaled):
        super().__init__()
        self.scaled = scaled
        setattr(self, event, self.attack)
    def attack(self):
        if not self.training: return
        x = self.x.clone().requires_grad_()
        loss = self.learn.loss_func(self.model(x), self.y)
        self.note(loss)
        g, = torch.autograd.grad(loss, x)
        x = x.detach()+(.5*g if self.scaled else .3*g.sign())
        if hasattr(self, 'before_batch'): self.learn.xb = (x,)
        else: self.learn.loss_grad = self.learn.loss_grad+.5*self.learn.loss_func(self.model(x), self.y)


def attacked(*how): return dict(train=35, loss_func=Standardized(), cbs=Attacks(*how))
def noted_alike(learn, one):
    for rows in learn.attacks.ranks: assert largest(rows, one.attacks.ranks[0]) < 1e-5


holds('Losses', "A loss module is computed over all items in every event of a batch in which a callback calls it, "
      "and a gradient by the inputs is that of one process")
for event in 'before_batch', 'after_loss':
    for scaled in False, True:
        add(f'attack_{event}_{scaled}', partial(attacked, event, scaled), loss=None, check=noted_alike)


class Penalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad + .1*self.pred.pow(2).mean()


class AddsTerm(Callback):
    "A mean over items, to what is trained and to what is shown"
    def after_loss(self):
        term = .1*self.pred.pow(2).mean()
        self.learn.loss_grad, self.learn.loss = self.loss_grad+term, self.loss+term


holds('Limits', "A number that the model computed, and a penalty that a callback adds to `loss_grad`, is weighted "
      "by items, and a line says so")


class Number(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x).pow(2).mean()


@named(says=AVERAGED)
def number_of_the_model(): return dict(model=Number(), loss_func=lambda p, y: p)
@case(loss=None, says=('Penalty changes the loss',))
def penalty(): return exact('mean', cbs=Penalty())
@case(loss=None, says=('Penalty changes the loss',))
def penalty_to_a_root(): return exact('rmse', cbs=Penalty())
holds('Losses', "What a callback adds to `learn.loss` (a mean over items) is in `valid_loss`, also where the loss "
      "is computed over all predictions")
@case(loss=None, says=('AddsTerm changes the loss',))
def term_of_a_callback(): return exact('rmse', cbs=AddsTerm())
@case(loss=None, says=('AddsTerm changes the loss',))
def term_of_a_callback_and_perplexity(): return exact('rmse', cbs=AddsTerm(), metrics=Perplexity())


class NeedsGradient(Callback):
    "Losses compute gradients with respect to inputs"
    order = -5
    def before_batch(self): self.learn.xb = (self.x.requires_grad_(),)


def gradient_penalty(learn, pred, y):
    "The loss differentiates its predictions"
    loss = F.cross_entropy(pred, y)
    if not learn.training: return loss
    g, = torch.autograd.grad(pred.sum(), learn.xb[0], create_graph=True)
    return loss+.1*g.square().sum(1).mean()


def residual(learn, pred, y):
    "The loss differentiates the model at points of its own"
    loss = F.cross_entropy(pred, y)
    if not learn.training: return loss
    x = learn.xb[0].detach().requires_grad_()
    g, = torch.autograd.grad(learn.model(x).sum(), x, create_graph=True)
    return loss+.1*(g[:len(y)].sum(1)-y).square().mean()


def of_learner(loss):
    learn = learner(train=32, cbs=NeedsGradient())
    learn.loss_func = partial(loss, learn)
    return learn


add('gradient_penalty', partial(of_learner, gradient_penalty), loss=None, says=('computes gradients through',))
add('residual', partial(of_learner, residual), loss=None, says=('raised RuntimeError',))


class TwoOfViews(Views):
    "As many views as items in each worker's batch"
    def forward(self, x): return super().forward(x)[:2]


@named(ranks=(2,), batch=('per_worker',), says=('as many entries in dimension 1 as in dimension 0',))
def stacked_views(): return dict(train=32, valid=8, bs=2, model=TwoOfViews(), loss_func=swav)
