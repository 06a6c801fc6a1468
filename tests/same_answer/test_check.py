"""`learn.distrib_check`: the answer, the reasons, and a learner that stays as it was."""
import copy, random
import pytest, torch
from fastai.callback.training import GradientClip
from fastai.metrics import accuracy
from fastai.optimizer import Adam
from torch import nn
from parity import items, learner, mlp, warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def streams(): return random.getstate(), torch.get_rng_state().tolist()


def test_same_answer_and_nothing_changed(two, capsys):
    learn = learner(opt_func=Adam, metrics=accuracy, cbs=GradientClip(.1), wd=.1)
    learn.fit(1)        # an optimizer with state
    was = copy.deepcopy((learn.model.state_dict(), learn.opt.state_dict(), vars(learn.recorder)['losses'],
                         len(learn.cbs)))
    rng, order = streams(), learn.dls.train.rng.getstate()
    capsys.readouterr()
    res = learn.distrib_check(nprocs=2, launcher=two)
    assert res.same and [r.what for r in res] == ['batches', 'losses', 'gradients', 'weights', 'validation']
    assert str(res) in capsys.readouterr().out
    assert rng == streams() and order == learn.dls.train.rng.getstate()
    now = (learn.model.state_dict(), learn.opt.state_dict(), vars(learn.recorder)['losses'], len(learn.cbs))
    assert all(torch.equal(a, b) for a, b in zip(was[0].values(), now[0].values()))
    assert str(was[1:]) == str(now[1:])


@pytest.mark.parametrize('layer,why', [(nn.BatchNorm1d(8), 'batch norm'), (nn.Dropout(.5), 'dropout')])
def test_differences_have_their_reason(two, layer, why):
    res = learner(model=nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3))).distrib_check(nprocs=2, launcher=two,
                                                                                              show=False)
    by = {r.what: r for r in res}
    assert by['batches'].same and not by['losses'].same and why in by['losses'].why


def test_a_difference_without_a_known_reason_is_reported(two):
    class Odd(nn.Module):
        "Its answer depends on the size of the batch"
        def __init__(self): super().__init__(); self.m = mlp()
        def forward(self, x): return self.m(x)*len(x)
    res = learner(model=Odd()).distrib_check(nprocs=2, launcher=two, show=False)
    assert not res.same and 'please report' in str(res)


def test_torch_loaders(two):
    learn = learner()
    learn.dls.loaders = [torch.utils.data.DataLoader(items(30), batch_size=6, shuffle=True),
                         torch.utils.data.DataLoader(items(9, s=1), batch_size=4)]
    assert learn.distrib_check(nprocs=2, launcher=two, show=False).same


def root(pred, y): return ((pred.sum(1)-y)**2).mean().sqrt()


@pytest.mark.parametrize('loss_func,kind', [(nn.CrossEntropyLoss(), 'a mean over items'),
                                            (nn.CrossEntropyLoss(reduction='sum'), 'a sum over items'),
                                            (nn.CrossEntropyLoss(torch.ones(3)), 'a mean over its weights'),
                                            (root, 'computed over the predictions and targets of all workers')])
def test_the_kind_of_loss_is_named(two, loss_func, kind, capsys):
    res = learner(loss_func=loss_func).distrib_check(nprocs=2, launcher=two)
    assert res.same and res.loss.endswith(f': {kind}') and res.loss in capsys.readouterr().out
