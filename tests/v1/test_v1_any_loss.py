"""Any loss of outputs and targets is that of one process, in fastai v1, too."""
import pytest
import torch.nn.functional as F
from learners_v1 import *
from fastddp.base.errors import CantDistribute


def squares(out, y): return ((out[:, 0]-y.float())**2).sum()/9
def root(out, y): return ((out[:, 0]-y.float())**2).mean().sqrt()
def weighted(out, y): return F.cross_entropy(out, y, weight=torch.tensor([1., 4.]))
def mean(out, y): return F.cross_entropy(out, y)


class Ignores(nn.Module):
    def forward(self, out, y): return F.cross_entropy(out, y, ignore_index=1)


LOSSES = dict(summed=partial(F.cross_entropy, reduction='sum'), squares=squares, root=root, weighted=weighted,
              mean=mean, ignores=Ignores())


@pytest.mark.parametrize('name', LOSSES)
def test_any_loss_is_that_of_one_process(name, capfd):
    two, one = pair(plain, lambda l: l.fit(2, 1e-2), loss_func=LOSSES[name], n=49)
    same_weights(two, one)
    same_recorder(two, one, 1e-4)
    assert capfd.readouterr().out.count('predictions of all workers') == (name != 'summed')


def in_a_closure():
    kept = dict(calls=0)
    def loss(out, y):
        kept['calls'] += 1
        return F.cross_entropy(out, y)/(1+kept['calls']/10)
    return loss


class InAnObject(nn.Module):
    "A dict of an object of the module"
    class Weights:
        def __init__(self): self.ema = dict(ce=1.)
    def __init__(self): super().__init__(); self.weights = self.Weights()
    def forward(self, out, y):
        ce = F.cross_entropy(out, y)
        self.weights.ema['ce'] = .9*self.weights.ema['ce']+.1*ce.item()
        return ce/self.weights.ema['ce']


@pytest.mark.parametrize('make', [in_a_closure, InAnObject])
def test_a_state_at_any_depth_is_that_of_one_process(make, capfd):
    "In a validation, too; one line says that every worker validates all"
    two, one = pair(lambda **kw: plain(loss_func=make(), **kw), lambda l: l.fit(2, 1e-2), n=49)
    same_weights(two, one)
    same_recorder(two, one)
    said = capfd.readouterr().out


def time_first(out, y):
    "A sum, of outputs whose items aren't in dimension 0"
    return F.cross_entropy(out.transpose(0, 1)[:, 0], y, reduction='sum')


class TimeFirst(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(3, 2)
    def forward(self, x): return torch.stack([self.lin(x)]*7)


def test_what_a_line_says_of_a_sum_that_is_averaged(capfd):
    learn = plain(loss_func=time_first, metrics=[])
    learn.model = TimeFirst()
    learn.layer_groups = [learn.model]
    learn.distrib_fit(1, 1e-2, nprocs=2)
    said = capfd.readouterr().out
    assert 'No prediction for time_first is a tensor' in said
    assert "a sum over items is divided by 2. If it is a sum, pass loss='sum'." in said


def test_the_option():
    two, one = plain(4, loss_func=root), plain(8, loss_func=root)
    seed(5)
    two.distrib_fit(1, 1e-2, nprocs=2, loss='gather')
    seed(5)
    one.fit(1, 1e-2)
    same_weights(two, one)
    with pytest.raises(CantDistribute, match="loss='max'"): two.distrib_fit(1, nprocs=2, loss='max')


class KeepsPenalty(nn.Module):
    "A model that keeps a term of its loss, as a variational autoencoder does"
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
    def forward(self, x):
        h = self.a(x)
        self.kl = h.pow(2).mean()
        return self.b(h)


def test_a_term_that_the_model_keeps_is_weighted_by_items_and_named(capfd):
    def make(**kwargs):
        learn = plain(**kwargs)
        learn.model = model = KeepsPenalty()
        learn.layer_groups = [model]
        learn.loss_func = lambda out, y: F.cross_entropy(out, y).sqrt() + .1*model.kl
        return learn
    two, one = pair(make, lambda l: l.fit(2, 1e-2), n=49)
    same_weights(two, one)
    same_recorder(two, one)
    assert capfd.readouterr().out.count("doesn't come from predictions and targets") == 1


class Scaled(nn.Module):
    "What an item gets depends on all others"
    def forward(self, out, y): return F.cross_entropy(out/(out.abs().mean(0)+.1), y)


class Attacks(LearnerCallback):
    "An adversarial example, by the learner's loss; `event` says when"
    def __init__(self, learn, event):
        super().__init__(learn)
        self.event, self.seen = event, []
    def attack(self, x, y):
        x = x.clone().requires_grad_()
        loss = self.learn.loss_func(self.learn.model(x), y)
        self.seen.append(float(loss))
        return (x+.3*torch.autograd.grad(loss, x)[0].sign()).detach()
    def on_batch_begin(self, last_input, last_target, train, **kwargs):
        if train and self.event == 'begin': return dict(last_input=self.attack(last_input, last_target))
    def on_backward_begin(self, last_input, last_target, last_loss, **kwargs):
        if self.event != 'backward': return
        x = self.attack(last_input, last_target)
        return dict(last_loss=last_loss+.5*self.learn.loss_func(self.learn.model(x), last_target))
    def on_backward_end(self, last_input, last_target, **kwargs):
        if self.event == 'again': self.learn.loss_func(self.learn.model(last_input), last_target).backward()


@pytest.mark.parametrize('event', ['begin', 'backward', 'again'])
def test_a_loss_module_in_an_event_is_that_of_all_items(event):
    "Of parts of other sizes, too"
    def make(bs):
        learn = plain(bs, n=51, loss_func=Scaled())
        learn.data.train_dl = learn.data.train_dl.new(drop_last=False)
        learn.attacks = Attacks(learn, event)
        return learn
    two, one = pair(make, lambda l: l.fit(2, 1e-2, callbacks=[l.attacks]))
    same_weights(two, one)
    assert two.attacks.seen == pytest.approx(one.attacks.seen, abs=1e-5)
    assert 'forward' not in vars(two.loss_func)


def test_a_loss_function_in_a_further_pass_is_named(capfd):
    learn = plain(4, loss_func=root)
    learn.distrib_fit(1, 1e-2, callbacks=[Attacks(learn, 'again')], nprocs=2)
    assert 'A callback calls root for a further backward pass' in capfd.readouterr().out
