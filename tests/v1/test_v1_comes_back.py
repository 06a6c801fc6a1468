"""After fits of fastai v1 on workers the notebook has what local fits would have left: optimizer, model, loss."""
import pytest, torch
from torch.nn.utils import prune, weight_norm
from learners_v1 import *


class Counting(torch.optim.SGD):
    "Lookahead: a count and slow weights in attributes of its own"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count, self.slow = 0, None
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        ps = [p for g in self.param_groups for p in g['params']]
        if self.slow is None: self.slow = [p.detach().clone() for p in ps]
        if self.count % 4: return
        for s, p in zip(self.slow, ps):
            s.add_((p-s)*.5)
            p.copy_(s)


def twice(learn):
    for _ in range(2): learn.fit(1, 1e-2)


def test_an_optimizers_own_attributes_go_on():
    two, one = pair(plain, twice, opt_func=partial(Counting, momentum=.9))
    same_weights(two, one)
    a, b = two.opt.opt, one.opt.opt
    assert a.count == b.count > 4
    for s, t in zip(a.slow, b.slow, strict=True): torch.testing.assert_close(s, t, rtol=1e-5, atol=1e-5)


def test_hooks_travel_and_stay():
    "Frozen rows of a weight, by a hook of it, and one of torch's optimizer"
    def make(bs):
        learn = plain(bs, opt_func=partial(torch.optim.SGD, momentum=.9))
        learn.create_opt(1e-2)
        learn.frozen = learn.model[0].weight.register_hook(lambda g: g*(torch.arange(8) < 4).float()[:, None])
        learn.opt.opt.register_step_post_hook(shrink)
        return learn
    two, one = pair(make, twice)
    same_weights(two, one)
    weight = two.model[0].weight
    assert len(weight._backward_hooks) == len(two.opt.opt._optimizer_step_post_hooks) == 1
    two.frozen.remove()
    assert not weight._backward_hooks


def shrink(opt, args, kwargs):
    with torch.no_grad(): opt.param_groups[0]['params'][0].mul_(.9)


class Grows(LearnerCallback):
    "A buffer, and a layer that the optimizer trains"
    def on_train_begin(self, **kwargs):
        model = self.learn.model
        if hasattr(model, 'ema'): return
        model.register_buffer('ema', torch.zeros(1))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model.add_module('3', nn.Linear(2, 2))
        self.learn.opt.opt.param_groups[-2]['params'].extend(model[3].parameters())
    def on_epoch_end(self, **kwargs):
        self.learn.model.ema += 1
        self.learn.model[0].epochs = kwargs['epoch']+1


def test_a_model_that_grows():
    before = {}
    def run(learn):
        before[id(learn)] = learn.model, learn.model[0].weight
        learn.fit(2, 1e-2)
        learn.fit(1, 1e-2)
    two, one = pair(plain, run, callback_fns=[Grows])
    same_weights(two, one)
    assert two.model is before[id(two)][0] and two.model[0].weight is before[id(two)][1]
    assert (len(two.model), two.model[0].epochs, two.model.ema.item()) == (4, one.model[0].epochs, 3)
    inside = {id(p) for g in two.opt.opt.param_groups for p in g['params']}
    assert {*map(id, two.model.parameters())} == inside
    for o in two, one: o.fit(1, 1e-2)      # and goes on in the notebook


class Gathers(LearnerCallback):
    "Steps after each fourth batch, and leaves the gradients of what comes after that to the next fit"
    _order = -5
    def __init__(self, learn):
        super().__init__(learn)
        self.n = 0
    def on_backward_end(self, **kwargs):
        self.n += 1
        if self.n % 4: return dict(skip_step=True, skip_zero=True)


def test_gradients_that_accumulation_left_travel_both_ways():
    "6 batches, of which the last two make no step; they go into the next fit's first"
    left = {}
    def run(learn):
        gathers = Gathers(learn)
        learn.fit(1, 1e-2, callbacks=[gathers])
        left[id(learn)] = [p.grad.clone() for p in learn.model.parameters()]
        learn.fit(1, 1e-2, callbacks=[gathers])
    two, one = pair(plain, run)
    same_weights(two, one)
    for a, b in zip(left[id(two)], left[id(one)], strict=True): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert left[id(two)][0].any()


class SAM(LearnerCallback):
    "A second backward pass, at weights that the first one's gradient moved"
    def on_batch_begin(self, last_input, last_target, train, **kwargs):
        if train: self.batch = last_input, last_target
    def on_backward_end(self, **kwargs):
        ps, (x, y) = list(self.learn.model.parameters()), self.batch
        moves = [p.grad*.05 for p in ps]
        for p, d in zip(ps, moves): p.data.add_(d)
        for p in ps: p.grad = None
        self.learn.loss_func(self.learn.model(x), y).backward()
        for p, d in zip(ps, moves): p.data.sub_(d)


def whole(bs, **kwargs):
    "A learner whose last batch is a smaller one"
    learn = plain(bs, **kwargs)
    learn.data.train_dl = learn.data.train_dl.new(drop_last=False)
    return learn


@pytest.mark.parametrize('n', [50, 53])       # 53: the ranks' parts of the last batch are of different sizes
def test_a_second_backward_pass(n):
    same_weights(*pair(whole, lambda l: l.fit(2, 1e-2), callback_fns=[SAM], n=n))


class Uncertain(nn.Module):
    "A loss with a weight of its own, which an optimizer trains along with the model"
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(()))
    def forward(self, out, y): return F.cross_entropy(out, y)*torch.exp(-self.s) + self.s


class TrainsLoss(LearnerCallback):
    def on_train_begin(self, **kwargs):
        group, s = self.learn.opt.opt.param_groups[-1], self.learn.loss_func.s
        if all(s is not p for p in group['params']): group['params'].append(s)


def test_parameters_of_a_loss_are_trained_alike_and_come_back():
    def run(learn):
        learn.loss_func = Uncertain()
        twice(learn)
    two, one = pair(plain, run, callback_fns=[TrainsLoss])
    same_weights(two, one)
    assert abs(one.loss_func.s.item()) > 1e-3
    torch.testing.assert_close(two.loss_func.s, one.loss_func.s, rtol=1e-5, atol=1e-5)


def writer():
    "A callback that writes into a variable of this function, its class and the data, and that variable"
    losses = []
    class Writes(LearnerCallback):
        steps = 0
        def on_batch_end(self, last_loss, train, **kwargs):
            if not train: return
            losses.append(float(last_loss))
            Writes.steps += 1
            self.learn.data.train_ds.difficulty = self.learn.loss_func.difficulty = Writes.steps
    return Writes, losses


def test_variables_and_attributes_that_callbacks_set_come_back():
    written = {}
    def run(learn):
        Writes, losses = writer()
        learn.fit(1, 1e-2, callbacks=[Writes(learn)])
        learn.fit(1, 1e-2, callbacks=[Writes(learn)])
        written[id(learn)] = losses, Writes.steps, learn.data.train_ds.difficulty, learn.loss_func.difficulty
    two, one = pair(plain, run)
    (losses, *many), (expected, *alone) = written[id(two)], written[id(one)]
    assert losses == pytest.approx(expected, abs=1e-5) and many == alone == [len(expected)]*3


@pytest.mark.parametrize('kind', ['orthogonal'])
def test_models_that_torch_does_not_pickle(kind):
    def make(bs):
        learn = plain(bs)
        if kind == 'orthogonal': torch.nn.utils.parametrizations.orthogonal(learn.model[0])
        else: learn.model = torch.jit.trace(learn.model, next(iter(learn.data.train_dl))[0])
        return learn
    two, one = pair(make, lambda learn: learn.fit(1, 1e-2))
    same_weights(two, one)


class Steps(LearnerCallback):
    "Steps a scheduler of torch's after each epoch"
    def __init__(self, learn, schedule):
        super().__init__(learn)
        self.schedule = schedule
    def on_epoch_end(self, **kwargs): self.schedule.step()


def test_a_scheduler_of_torch_over_the_learners_optimizer():
    "v1 sets the rate of a fit when the fit begins, so the scheduler decides over what is left of it"
    def run(learn):
        learn.create_opt(1e-1)
        for group in learn.opt.opt.param_groups: group['lr'] = 1e-1
        learn.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(learn.opt.opt, 8)
        cb = Steps(learn, learn.schedule)
        for _ in range(2): learn.fit(2, 1e-1, callbacks=[cb])
    two, one = pair(plain, run, opt_func=partial(torch.optim.SGD, momentum=.9), true_wd=False, wd=0.)
    same_weights(two, one)
    assert two.schedule.optimizer is two.opt.opt and two.schedule.last_epoch == 4
    lrs = [[g['lr'] for g in o.opt.opt.param_groups] for o in (two, one)]
    assert lrs[0] == pytest.approx(lrs[1]) and lrs[0][0] < .1
    for o in two, one: o.schedule.step()       # and goes on in the notebook
    assert two.opt.opt.param_groups[0]['lr'] == pytest.approx(one.opt.opt.param_groups[0]['lr'])


class Prunes(LearnerCallback):
    def on_train_begin(self, **kwargs):
        if not hasattr(self.learn.model[0], 'weight_orig'): self.put(self.learn.model[0])
    def put(self, layer): prune.l1_unstructured(layer, 'weight', .5)


class Normalizes(Prunes):
    def on_train_begin(self, **kwargs):
        if not hasattr(self.learn.model[0], 'weight_g'): weight_norm(self.learn.model[0])


@pytest.mark.parametrize('cb,name', [(Prunes, 'weight_mask'), (Normalizes, 'weight_g')])
def test_what_a_callback_puts_on_a_layer(cb, name):
    def run(learn):
        learn.fit(1, 1e-2, callbacks=[cb(learn)])
        learn.fit(1, 1e-2)
    two, one = pair(plain, run)
    same_weights(two, one)
    assert hasattr(two.model[0], name) and len(two.model[0]._forward_pre_hooks) == 1
    x = torch.ones(2, 3)
    torch.testing.assert_close(two.model.eval()(x), one.model.eval()(x), rtol=1e-5, atol=1e-5)
    two.fit(1, 1e-2)       # it trains here, too


class Watches(LearnerCallback):
    "A hook of a layer, and its handle"
    handle = None
    def __init__(self, learn):
        super().__init__(learn)
        self.sizes = []
    def on_train_begin(self, **kwargs):
        if self.handle is None: self.handle = self.learn.model[1].register_forward_hook(self.note)
    def note(self, module, x, out): self.sizes.append(out.shape[1])


def test_a_hook_stays_and_its_handle_removes_it():
    learn = plain()
    cb = Watches(learn)
    with learn.distrib_ctx(nprocs=2):
        for _ in range(2): learn.fit(1, 1e-2, callbacks=[cb])
    n, x = len(cb.sizes), torch.ones(2, 3)
    assert {*cb.sizes} == {8} and len(learn.model[1]._forward_hooks) == 1
    learn.model(x)
    assert len(cb.sizes) == n+1
    cb.handle.remove()
    learn.model(x)
    assert len(cb.sizes) == n+1 and not learn.model[1]._forward_hooks


class Centred:
    "A loss that keeps a tensor, and a list of them"
    def __init__(self): self.centre, self.bank = torch.zeros(2), []
    def __call__(self, out, y):
        if out.requires_grad:
            self.centre.mul_(.9).add_(out.detach().mean(0), alpha=.1)
            self.bank.append(out.detach().mean(0))
        return F.cross_entropy(out, y)


class CentredModule(nn.Module):
    __call__ = nn.Module.__call__
    def __init__(self):
        super().__init__()
        Centred.__init__(self)
    forward = Centred.__call__


@pytest.mark.parametrize('loss', [Centred, CentredModule])
def test_what_a_loss_keeps(loss):
    kept = {}
    def run(learn):
        learn.loss_func = loss()
        kept[id(learn)] = learn.loss_func.centre, learn.loss_func.bank
        twice(learn)
    two, one = pair(plain, run)
    same_weights(two, one)
    (centre, bank), (expected, all_of_one) = kept[id(two)], kept[id(one)]
    assert two.loss_func.centre is centre and two.loss_func.bank is bank and centre.any()
    # of worker 0's part of each batch
    assert len(bank) == len(all_of_one) and expected.any()


class Box:
    def __init__(self, **kwargs): vars(self).update(kwargs)


class Deep(LearnerCallback):
    def __init__(self, learn, of_epoch):
        super().__init__(learn)
        self.box = Box(inner=Box(of_epoch=of_epoch, owner=learn.model))
    def on_epoch_end(self, epoch, **kwargs):
        inner = self.box.inner
        inner.of_epoch[0]['seen'].append(epoch)
        inner.last, inner.layer = inner.of_epoch[0], self.learn.model[0]


def test_an_object_three_levels_deep():
    learn, of_epoch = plain(), [dict(seen=[])]
    seen = of_epoch[0]['seen']
    cb = Deep(learn, of_epoch)
    inner = cb.box.inner
    with learn.distrib_ctx(nprocs=2):
        learn.fit(2, 1e-2, callbacks=[cb])
        learn.fit(1, 1e-2, callbacks=[cb])
    assert seen == [0, 1, 0] and cb.box.inner is inner
    assert inner.last is of_epoch[0] and inner.last['seen'] is seen
    assert inner.layer is learn.model[0] and inner.owner is learn.model


class Adds(LearnerCallback):
    "Repeats hard examples from the next epoch on"
    def on_epoch_end(self, **kwargs):
        items = self.learn.data.train_ds
        items += items[:8]


def test_a_list_of_items_that_grows():
    def make(bs):
        learn = plain(bs)
        items = [learn.data.train_ds[i] for i in range(48)]
        learn.data = DataBunch.create(items, items[:8], bs=bs, val_bs=4, num_workers=0)
        learn.items = items
        return learn
    def run(learn):
        learn.fit(1, 1e-2, callbacks=[Adds(learn)])
        learn.fit(2, 1e-2, callbacks=[Adds(learn)])
    two, one = pair(make, run)
    assert len(two.items) == len(one.items) == 72 and two.data.train_ds is two.items
    for (x, y), (x1, y1) in zip(two.items, one.items, strict=True): assert torch.equal(x, x1) and y == y1
    assert all(a is b for a, b in zip(two.items[48:56], two.items))
    assert len(two.data.train_dl) == 72//4
    same_weights(two, one)
