"Optimizers, backward passes of one's own, callbacks that act in a step, and models that are special to one"
import math
from functools import partial
import torch, torch.nn.functional as F
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelEpochException
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat, MSELossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD, Adam, Lamb, OptimWrapper, RMSProp, ranger
from torch import nn
from torch.utils.checkpoint import checkpoint
from cases import add, case, holds
from cases.losses import Counts, exact
from parity import Collect, Idle, items, largest, learner, mlp, seed

ANY = math.inf      # a tolerance: the weights aren't compared


# Optimizers and losses of torch and fastai

holds('Weights', "Weights and optimizer state are those of one process to 1e-5: fastai's optimizers and torch's in "
      "`OptimWrapper`, weight decay, gradient clipping, label smoothing, class weights, ignored classes, summed "
      "losses, sizes that divide by nothing")
for name, opt_func, kwargs in [
        ('sgd', SGD, dict(wd=.1)), ('momentum', partial(SGD, mom=.9), dict(wd=.01)), ('adam', Adam, dict(wd=.1)),
        ('rmsprop', RMSProp, dict(lr=.005)), ('lamb', Lamb, {}), ('ranger', ranger, dict(lr=.01)),
        ('adamw', partial(OptimWrapper, opt=torch.optim.AdamW), {}),
        ('torch_sgd', partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, weight_decay=.1), {})]:
    add(name, partial(dict, opt_func=opt_func, **kwargs))


def some_ignored(n, n_in=4, n_out=3, s=0):
    "Most items of a class that is ignored, so that many a rank's share is all ignored"
    return [(x, torch.tensor(-100) if i % 3 else y) for i, (x, y) in enumerate(items(n, n_in, n_out, s))]


def tokens(n, s=0):
    "Sequences whose padding is ignored"
    g = torch.Generator().manual_seed(s)
    return [(torch.randn(5, 4, generator=g),
             torch.where(torch.arange(5) < 1+i % 5, torch.randint(3, (5,), generator=g), -100)) for i in range(n)]


class Transposed(nn.Module):
    def __init__(self): super().__init__(); self.m = mlp()
    def forward(self, x): return self.m(x).transpose(1, 2)


def weighted(*weights): return CrossEntropyLossFlat(weight=torch.tensor(weights))
def weighing(p, y): return F.cross_entropy(p, y, weight=torch.tensor([1., 3., .5]))


@case
def clip(): return dict(cbs=GradientClip(.1))
@case
def smoothing(): return dict(loss_func=LabelSmoothingCrossEntropyFlat())
@case
def class_weights(): return dict(loss_func=weighted(1., 3., .5), train=41)
@case
def class_weight_zero(): return dict(loss_func=weighted(1., 0., 2.), train=29)
@case
def functional_weights(): return dict(loss_func=partial(F.cross_entropy, weight=torch.tensor([1., 3., .5])))
@case
def ignored(): return dict(data=some_ignored, train=29)
@case
def ignored_tokens(): return dict(data=tokens, train=29, model=Transposed())
@case
def summed(): return dict(loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.005)
@case
def mse(): return exact('rmse') | dict(loss_func=MSELossFlat())
@case
def drop_last(): return dict(drop_last=True, train=50)
@case(batch=('per_worker',))
def one_over(): return dict(train=25, bs=2)
for n_acc in 8, 24, 30:
    add(f'accumulating_{n_acc}', lambda n=n_acc: dict(train=53, bs=2, cbs=GradientAccumulation(n), opt_func=Adam,
                                                      loss_func=weighted(1., 3., .5) if n == 24 else None))
holds('Weights', "`to_fp16` and `to_bf16` do no harm on the CPU")
for how in 'to_fp16', 'to_bf16': add(how, lambda how=how: getattr(learner(), how)())
holds('Weights', "Options of DDP (`static_graph`, `bucket_cap_mb`, and with torch's optimizers "
      "`gradient_as_bucket_view`) change no result")
for options in dict(static_graph=True), dict(bucket_cap_mb=.001), dict(gradient_as_bucket_view=True):
    add(*options, lambda: dict(train=53, opt_func=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)),
        options=options)


# Methods, and what comes between them

def layers(m): return [list(m[0].parameters()), list(m[2].parameters())]


def frozen_first(learn, call):
    start = learn.model[0].weight.clone()
    learn.freeze()
    call('fit', 2, slice(.001, .05))
    assert torch.equal(learn.model[0].weight, start)
    learn.unfreeze()
    seed(2)
    call('fit', 2, slice(.001, .05))


def frozen_later(learn, call):
    for change in learn.unfreeze, learn.freeze:
        change()
        call('fit', 1)


def still_decayed(learn, one):
    "Its gradient is zero, not None: in the next fit in the notebook, too"
    assert learn.model[0].weight.grad is not None and not learn.model[0].weight.grad.any()
    was = learn.model[0].weight.clone()
    learn.fit(1)
    assert not torch.equal(was, learn.model[0].weight)


class Thaw(Callback):
    "Unfreezes, and freezes again, in the middle of a fit"
    def before_epoch(self):
        if self.epoch == 1: self.learn.unfreeze()
        if self.epoch == 3: self.learn.freeze()
    def before_batch(self):
        if self.epoch == 2 and self.training: self.learn.freeze_to(self.iter % 2 - 1)


def thawed(learn, call):
    learn.freeze()
    call('fit', 4)


def calling(*args): return lambda learn, call: call(*args)
def as_frozen(learn, one):
    assert [p.requires_grad for p in learn.model.parameters()] == [p.requires_grad for p in one.model.parameters()]


holds('Weights', "Frozen groups and discriminative learning rates, before and after `unfreeze`; freezing and "
      "unfreezing by callbacks during a fit")
for opt_func in SGD, Adam:
    add(f'frozen_{opt_func.__name__}', partial(dict, opt_func=opt_func, splitter=layers, wd=.1), run=frozen_first)
    add(f'thawed_{opt_func.__name__}', lambda o=opt_func: dict(opt_func=o, splitter=layers, wd=.1, cbs=Thaw()),
        run=thawed, check=as_frozen)
holds('Weights', "A layer that was trained and then frozen goes on being decayed, as in fastai: its gradient is "
      "zero, not None")
@case(run=frozen_later, check=still_decayed)
def trained_then_frozen(): return dict(opt_func=Adam, splitter=layers, wd=.1)
holds('Weights', "`fit_one_cycle`, `fine_tune`, `fit_flat_cos`, with the same schedule")
for call in ('fit_one_cycle', 2, .05), ('fine_tune', 1, .05), ('fit_flat_cos', 2, .05):
    add(call[0], lambda: dict(opt_func=Adam, splitter=layers), run=calling(*call))


class Fit(Learner):
    "Its `fit` has arguments of its own, before and behind fastai's"
    def fit(self, scale, n_epoch=2, lr=None, wd=None, cbs=None, *, shift=0., **kwargs):
        self.asked, plain = (scale, shift, kwargs), self.loss_func
        self.loss_func = lambda out, y: plain(out*scale+shift, y)
        super().fit(n_epoch, lr, wd, cbs)
        self.loss_func = plain


def asked(learn, one): assert learn.asked == one.asked and learn.asked[0] == .5
@case(loss=None, check=asked, run=lambda learn, call: call('fit', .5, shift=.1, extra='here'))
def own_fit(): return dict(kind=Fit)
@case(loss=None, run=calling('fit', .5, 1, .02), check=asked)
def own_fit_by_position(): return dict(kind=Fit)


# Models

class Branch(nn.Module):
    "Has a layer that is never used, and one that is used in some steps, or on one rank only"
    def __init__(self, when):
        super().__init__()
        self.a, self.never, self.b = (nn.Linear(4, 3) for _ in range(3))
        self.when = when
        self.start = self.never.weight.detach().clone()
        self.k = 0      # training steps so far
    def forward(self, x):
        out = self.a(x)
        if self.training: self.k += 1
        if self.when == 'all': return out + self.b(x)
        if self.when == 'sometimes' and self.k % 3 or not self.training: return out
        if self.when == 'late' and self.k < 4: return out + self.b(x)
        if self.when == 'data': return out + torch.cat([self.b(o[None]) if o[0] > 1 else out[:1]*0 for o in x])
        return out + self.b(x) if self.when == 'sometimes' else out


def left_alone(learn, one):
    "Weight decay and momentum leave alone what never had a gradient, as in one process"
    assert torch.equal(learn.model.never.weight, learn.model.start)


holds('Weights', "Parameters that get no gradient: never, in some steps, or on one rank only; they are named once")
for when in 'never', 'all', 'sometimes', 'late', 'data':
    for opt_func in SGD, Adam:
        add(f'used_{when}_{opt_func.__name__}', lambda when=when, opt_func=opt_func: dict(
            model=Branch(when), opt_func=opt_func, wd=.3), says=('No gradient for',), check=left_alone)


def idle(learn, one): assert learn.model.idle.weight.grad is None
# in the last batch of one item; with zeros for gradients it would be decayed
@case(batch=('per_worker',), ranks=(2,), check=idle)
def unused_where_a_rank_has_no_items(): return dict(
    bs=2, model=Idle(), loss_func=weighted(1., 3., .5), opt_func=Adam, wd=.1)


class Empty(nn.Module):
    "A batch norm without elements, as a tabular model without continuous variables has it"
    def __init__(self):
        super().__init__()
        self.bn, self.layers, self.nothing = nn.BatchNorm1d(0), mlp(), nn.Parameter(torch.zeros(0, 3))
    def forward(self, x): return self.layers(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight
    def forward(self, x): return self.head(self.b(self.a(x).relu()))


class Counting(nn.Module):
    "Buffers that training changes, of which one isn't saved"
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer('steps', torch.zeros((), dtype=torch.long))
        self.register_buffer('scale', torch.ones(4))
        self.register_buffer('passing', torch.zeros(1), persistent=False)
    def forward(self, x):
        if self.training:
            self.steps += 1
            self.passing += 1
        return self.head(x*self.scale)


def tied(learn, one): assert learn.model.a.weight is learn.model.b.weight
def counted(learn, one): assert learn.model.steps == learn.model.passing == len(learn.recorder.losses)
def same_means(learn, one): torch.testing.assert_close(learn.model[0].running_mean, one.model[0].running_mean)


@case
def parameters_without_elements(): return dict(model=Empty())
@case(check=tied)
def of_tied(): return dict(model=Tied())
@case(check=counted)
def buffers(): return dict(model=Counting())
# each worker sees its part of the batch: without the average they would be rank 0's
@case(run=calling('fit', 1), tol=ANY, batch=('per_worker',), ranks=(2,), check=same_means)
def running_means(): return dict(train=24, model=nn.Sequential(nn.BatchNorm1d(4), mlp()))


class Hook:
    "Makes three times of what it saw"
    def __call__(self, module, inputs, out): return out*3


def hooked():
    learn = learner()
    learn.model[0].register_forward_hook(Hook())
    return learn


add('hooked', hooked)


class NewHead(Callback):
    "In the second epoch, a new last layer of the same shape"
    def before_epoch(self):
        if self.epoch != 1: return
        self.learn.model[2] = nn.Linear(8, 3)
        for p in self.learn.model[2].parameters(): nn.init.constant_(p, .1)
        self.learn.create_opt()


holds('Weights', "A layer that a callback replaces during a fit")
@case(run=calling('fit', 3))
def new_layer(): return dict(cbs=NewHead())


class Checkpointed(nn.Module):
    "Computes its middle again in the backward pass, twice with the same weights"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    def forward(self, x):
        h = self.a(x)
        for _ in range(2): h = checkpoint(self.b, h, use_reentrant=True)
        return self.c(h)


holds('Weights', "Checkpointing with `use_reentrant=True`, which DDP can't follow: gradients are averaged after the "
      "backward pass")
LINE = 'use_reentrant=False gives the same results'
@case(says=(LINE,))
def checkpointed(): return dict(model=Checkpointed())
@case(says=(LINE,), options=dict(find_unused_parameters=True))
def checkpointed_find_unused(): return dict(model=Checkpointed())
@case
def checkpointed_accumulating(): return dict(model=Checkpointed(), cbs=GradientAccumulation(24))


# Backward passes

class Sam(Callback):
    "Sharpness-aware minimization: the gradient of weights that were moved uphill; `event` says when"
    rho = .05
    def __init__(self, event): setattr(self, event, self.twice)
    def _uphill(self):
        "Moves the weights, and returns by how much"
        ps = [p for p in self.model.parameters() if p.grad is not None]
        by = self.rho/(torch.stack([p.grad.norm() for p in ps]).norm()+1e-12)
        moved = [(p, p.grad*by) for p in ps]
        with torch.no_grad():
            for p, e in moved: p.add_(e)
        return moved
    def twice(self):
        moved = self._uphill()
        self.model.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p, e in moved: p.sub_(e)


class Awp(Sam):
    "Adversarial weight perturbation: the gradient there is added"
    def twice(self):
        moved = self._uphill()
        self.learn.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p, e in moved: p.sub_(e)


class SamLearner(Learner):
    "SAM without any of fastai's events"
    def _do_grad_opt(self):
        self.loss_grad.backward()
        Sam.twice(self)
        self.opt.step()
        self.opt.zero_grad()
    rho, _uphill = Sam.rho, Sam._uphill


class SamBackward(Learner):
    def _backward(self):
        super()._backward()
        Sam.twice(self)
    rho, _uphill = Sam.rho, Sam._uphill


class SamStep(Learner):
    def _step(self):
        Sam.twice(self)
        super()._step()
    rho, _uphill = Sam.rho, Sam._uphill


class OwnPass(Callback):
    "A backward pass of its own in place of fastai's"
    def before_backward(self):
        (self.learn.loss_grad*1.).backward()
        raise CancelBackwardException()


class Halves(Callback):
    "One backward pass of two losses"
    def before_backward(self):
        torch.autograd.backward([self.learn.loss_grad*.5, self.learn.loss_grad*.5])
        raise CancelBackwardException()


class OwnBatch(Learner):
    "Does everything by itself"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        if not self.training: return
        self.loss_grad.backward()
        self.opt.step()
        self.opt.zero_grad()


class Clip(Callback):
    "Alike on all ranks"
    def before_step(self): nn.utils.clip_grad_norm_(self.model.parameters(), .1)


PASSES = {'sam': dict(cbs=lambda: Sam('before_step')), 'sam_after_backward': dict(cbs=lambda: Sam('after_backward')),
          'awp': dict(cbs=lambda: Awp('before_step')), 'own_clip': dict(cbs=Clip),
          '_do_grad_opt': dict(kind=SamLearner), '_backward': dict(kind=SamBackward), '_step': dict(kind=SamStep),
          'own_pass': dict(cbs=OwnPass), 'two_losses': dict(cbs=Halves), '_do_one_batch': dict(kind=OwnBatch)}


def passing(name, n_acc=0, **kwargs):
    of, acc = PASSES[name], [GradientAccumulation(n_acc)] if n_acc else []
    return dict(kwargs, kind=of.get('kind', Learner), cbs=[*acc, *([of['cbs']()] if 'cbs' in of else [])])


holds('Weights', "SAM, adversarial weight perturbation, a learner's own `_do_grad_opt`, `_backward`, `_step` or "
      "`_do_one_batch`, a backward pass of a callback's own: each backward pass of a batch is weighed and averaged "
      "over all workers")
for name in PASSES:
    add(f'{name}_sgd', partial(passing, name, opt_func=partial(SGD, mom=.9)))
    add(f'{name}_adam', partial(passing, name, opt_func=partial(OptimWrapper, opt=torch.optim.Adam)))
# fastai's callback multiplies the loop's loss by the items of a batch, and not that of the second pass
for name in 'sam', 'awp', '_backward', '_step':
    add(f'{name}_accumulating', partial(passing, name, 12), tol=3e-5, ranks=(3,))


class NotesGradients(Collect):
    "The norm of the first layer's gradient after each backward pass, which a callback may read in any batch"
    def after_backward(self): self.note(self.model[0].weight.grad.norm())


def noted(learn, one):
    for rows in learn.notes_gradients.ranks: assert largest(rows, one.notes_gradients.ranks[0]) < 1e-6


@case(check=noted)
def gradients_read_while_accumulating(): return dict(cbs=[GradientAccumulation(24), NotesGradients()])
holds('Weights', "A second pass (SAM) with a loss that is no mean")
for event in 'before_step', 'after_backward':
    add(f'sam_{event}_of_a_root', lambda event=event: exact('rmse', cbs=Sam(event)), loss='whole')


class SamOptimizer(torch.optim.Optimizer):
    "In two steps: `first_step` goes uphill, `second_step` back and along the gradient that is there"
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=.9)
    def params(self): return [p for g in self.param_groups for p in g['params'] if p.grad is not None]
    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.params()]).norm()
        for p in self.params():
            self.state[p]['old'] = p.clone()
            p.add_(p.grad*(.05/norm))
        self.zero_grad()
    @torch.no_grad()
    def second_step(self):
        for p in self.params(): p.copy_(self.state[p]['old'])
        self.base.step()
        self.zero_grad()


class InTwoSteps(Learner):
    def _do_grad_opt(self):
        self.loss_grad.backward()
        self.opt.opt.first_step()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.opt.opt.second_step()


class KeepsGraph(Learner):
    def _backward(self): self.loss_grad.backward(create_graph=True)


def in_two_steps(**kwargs): return dict(kind=InTwoSteps, opt_func=partial(OptimWrapper, opt=SamOptimizer), **kwargs)


holds('Weights', "SAM in two steps (`first_step`, `second_step`), and `backward(create_graph=True)`")
add('in_two_steps', in_two_steps)
@case(loss='whole')
def in_two_steps_of_a_root(): return exact('rmse') | in_two_steps()
@case
def keeps_graph(): return dict(kind=KeepsGraph)


# The model is called by the learner, or in an event

def calls_model(predict, tells):
    "A learner's class that makes its predictions itself, and the event after them or not"
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = predict(self, *self.xb)
            if tells: self('after_pred')
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.clone()
            self('after_loss')
            if self.training: self._do_grad_opt()
    return Own


for name, predict in dict(once=lambda self, x: self.model(x)*2, twice=lambda self, x: self.model(x)+self.model(-x),
                          layers=lambda self, x: self.model[2](self.model[1](self.model[0](x))),
                          part=lambda self, x: self.model(x)+self.model[2](self.model[0](x))).items():
    for tells in True, False: add(f'calls_model_{name}_{tells}', partial(dict, kind=calls_model(predict, tells)))


class StepsByItself(Callback):
    "Trains in an event, tells the Recorder its loss, and leaves the batch"
    run_valid = False
    def before_batch(self):
        loss = F.cross_entropy(self.model(*self.xb), *self.yb)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.learn.loss = loss.detach()
        raise CancelBatchException


class NotesLossLate(Learner):
    "Its own code sets `loss` last"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        loss = F.cross_entropy(self.pred, *self.yb)
        if self.training:
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        self.loss = loss.detach().clone()


holds('Losses', "A loss that a callback or a learner sets after its own backward pass, also where one rank makes "
      "none")
@case
def steps_by_itself(): return dict(cbs=StepsByItself())
@case
def notes_loss_late(): return dict(kind=NotesLossLate)


# Callbacks that change a batch

class LeavesOut(Collect):
    "Missing labels, hard examples: some items of a batch don't go on, or all of a rank's"
    order = 60
    def before_batch(self):
        keep = self.x[:, 0] > .2
        self.note(keep.sum())
        self.learn.xb, self.learn.yb = (self.x[keep],), (self.y[keep],)


class LeavesOutLate(Callback):
    order = 60
    def after_pred(self):
        keep = self.x[:, 0] > -.3
        self.learn.pred, self.learn.yb = self.pred[keep], (self.y[keep],)


class Doubles(Callback):
    order = 60
    def before_batch(self):
        self.learn.xb, self.learn.yb = (torch.cat([self.x, -self.x]),), (torch.cat([self.y, self.y]),)


class Nodes(Callback):
    "A batch of graphs: each item has as many rows as its class says"
    order = 60
    def before_batch(self):
        rows = torch.arange(len(self.y)).repeat_interleave(self.y+1)
        self.learn.xb, self.learn.yb = (self.x[rows],), (self.y[rows],)


def one_had_none(learn, one): assert any([0.] in rows for rows in learn.leaves_out.ranks)


holds('Weights', "A callback that leaves items out of a batch, or doubles it; rows that are no items (nodes of "
      "graphs): also where a rank has none left")
@case(check=one_had_none)
def leaves_out(): return dict(train=16, valid=16, metrics=accuracy, cbs=LeavesOut())
@case(loss='whole', check=one_had_none)
def leaves_out_of_a_root(): return exact('rmse', train=16, valid=16, cbs=LeavesOut())
@case
def leaves_out_late(): return dict(metrics=accuracy, cbs=LeavesOutLate())
@case(loss='whole')
def leaves_out_late_of_a_root(): return exact('rmse', cbs=LeavesOutLate())
@case
def doubles(): return dict(cbs=Doubles())
@case
def doubles_summed(): return dict(cbs=Doubles(), loss_func=nn.CrossEntropyLoss(reduction='sum'), lr=.005)
@case
def doubles_accumulating(): return dict(cbs=[GradientAccumulation(32), Doubles()])
@case
def rows_that_are_no_items(): return dict(cbs=Nodes())


# Exceptions

class Swallows(Learner):
    "Goes on with the next batch"
    def one_batch(self, *args):
        try: super().one_batch(*args)
        except ZeroDivisionError: pass


class Leaves(Callback):
    "Leaves a batch or an epoch, and notes the loss function of each"
    order = 51
    def __init__(self, error): self.error, self.kinds = error, []
    def before_epoch(self): self.kinds.append(type(self.learn.loss_func).__name__)
    def after_loss(self):
        if self.training and self.epoch == 0 and self.iter == 1: raise self.error


def own_loss(learn, one): assert learn.leaves.kinds == [type(learn.loss_func).__name__]*2


@case(loss='whole', check=own_loss)
def exception_that_a_learner_swallows(): return exact('rmse', kind=Swallows, cbs=Leaves(ZeroDivisionError('no')))
@case(loss=None, check=own_loss)
def epoch_that_is_left(): return dict(loss_func=Counts(), cbs=Leaves(CancelEpochException))
