"""All ranks run the same events: a wish to leave is voted on before any rank leaves. So a forward pass may be a
collective operation, as that of `SyncBatchNorm` is on GPUs."""
import json, os, subprocess, sys
from pathlib import Path
import pytest, torch
from fastai.callback.core import Callback, CancelFitException, CancelStepException, CancelTrainException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import LRFinder
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.metrics import accuracy
from fastai.optimizer import Adam
from torch import nn
from fastddp.base import board, group
from fastddp.base.errors import RankRaised
from parity import alone_like, assert_ranks_alike, largest, learner, mlp, seed, warm
from test_decisions import EVENTS, RAISES, AtEnd, Leave, rank_that_leaves
from cases.steps import Sam

pytestmark = pytest.mark.timeout(120)
here = Path(__file__).resolve().parent


@pytest.fixture(scope='module', params=[2, 3])
def ranks(request):
    with warm(request.param) as launcher: yield request.param, launcher


class Meets(nn.Module):
    """Its forward pass is a collective operation in training, and its result that of the layers. Ranks that don't run
    the same forward passes find that here: each sends the number of its pass"""
    def __init__(self):
        super().__init__()
        self.net, self.k = mlp(), 0
    def forward(self, x):
        if self.training and group.world_size() > 1:
            self.k += 1
            ks = group.all_gather_object(self.k)
            assert ks == [self.k]*len(ks), f'forward passes of different batches: {ks}'
        return self.net(x)


def meeting(**kwargs):
    seed()
    return learner(train=33, valid=21, bs=3, metrics=accuracy, wd=.1, opt_func=Adam, model=Meets(), **kwargs)


def both(make, n, launcher, cbs_of, epochs=2):
    "Fit on ranks and in one process, where the same happens to all items; compare steps, weights and tables"
    learn, end, single = make(), AtEnd(), AtEnd()
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(epochs, nprocs=n, launcher=launcher, cbs=[end, *cbs_of(n-1)], timeout=60)
    assert_ranks_alike(end.ranks)
    seed(1)
    one.fit(epochs, cbs=[single, *cbs_of(0)])
    assert end.ranks[0][0][0] == single.rows[0][0]
    assert largest([*learn.model.parameters()], [*one.model.parameters()]) < 1e-5
    assert [len(o) for o in learn.recorder.values] == [len(o) for o in one.recorder.values]
    return learn, one


@pytest.mark.few(5)
@pytest.mark.spread
@pytest.mark.parametrize('event,kind,at,epoch,valid', EVENTS)
def test_a_wish_where_the_forward_pass_is_a_collective(ranks, event, kind, at, epoch, valid):
    last = rank_that_leaves(ranks[0], at, valid)
    both(meeting, *ranks, lambda rank: [Leave(event, kind, rank and last, at, epoch, valid)])


@pytest.mark.spread
@pytest.mark.parametrize('event,kind,at', [('before_batch', 'batch', 2), ('after_pred', 'batch', 1),
                                           ('after_loss', 'train', 3), ('after_batch', 'train', 4)])
def test_a_wish_while_gradients_accumulate(ranks, event, kind, at):
    n, launcher = ranks
    def make(): return learner(train=41, bs=2, model=Meets(), cbs=GradientAccumulation(n*5))
    both(make, n, launcher, lambda rank: [Leave(event, kind, rank, at)])


class SecondPass(Sam):
    "SAM, which one rank leaves after its second backward pass in one batch"
    def __init__(self, rank):
        super().__init__('before_step')
        self.rank = rank
    def twice(self):
        super().twice()
        if self.iter == 1 and group.rank() == self.rank: raise CancelStepException()


def test_a_wish_after_the_second_pass_of_sam(ranks):
    both(meeting, *ranks, lambda rank: [SecondPass(rank)])


class Two(Callback):
    "Ranks 0 and 1 wish to leave at different events, of one batch or of two"
    order = 51
    def __init__(self, first, second, alone):
        self.wishes = first, second
        self.alone = alone      # in one process both wishes are its own
        for event in {e for e, *_ in self.wishes}: setattr(self, event, lambda event=event: self.go(event))
    def go(self, now):
        for rank, (event, kind, at) in enumerate(self.wishes):
            if now != event or not self.training or self.epoch or self.iter != at: continue
            if self.alone or group.rank() == rank: raise RAISES[kind]()


@pytest.mark.few(4)
@pytest.mark.parametrize('first,second', [
    (('before_batch', 'batch', 1), ('after_loss', 'batch', 1)),         # the second one has left by then
    (('before_batch', 'batch', 1), ('after_pred', 'train', 2)),
    (('after_loss', 'batch', 0), ('after_batch', 'epoch', 0)),
    (('before_backward', 'backward', 1), ('before_step', 'step', 2)),
    (('after_pred', 'fit', -1 % 3), ('before_step', 'step', 1))])
def test_two_ranks_wish_at_two_events(ranks, first, second):
    n, launcher = ranks
    learn, end, single = meeting(), AtEnd(), AtEnd()
    one = alone_like(learn, n)
    seed(1)
    learn.distrib_fit(2, nprocs=n, launcher=launcher, cbs=[end, Two(first, second, False)], timeout=60)
    assert_ranks_alike(end.ranks)
    seed(1)
    one.fit(2, cbs=[single, Two(first, second, True)])
    assert end.ranks[0][0][0] == single.rows[0][0]
    assert largest([*learn.model.parameters()], [*one.model.parameters()]) < 1e-5


class EndsFinder(LRFinder):
    "Ends the search on one rank"
    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank
    def after_batch(self):
        super().after_batch()
        if self.train_iter == 7 and group.rank() == self.rank: raise CancelFitException()


def test_one_rank_ends_lr_find(ranks, tmp_path):
    n, launcher = ranks
    learn = meeting(path=tmp_path)
    one = alone_like(learn, n)
    seed(1)
    before = [p.detach().clone() for p in learn.model.parameters()]
    learn.distrib_fit(3, nprocs=n, launcher=launcher, cbs=[EndsFinder(n-1, num_it=20)], timeout=60)
    seed(1)
    one.fit(3, cbs=[EndsFinder(0, num_it=20)])
    assert len(learn.recorder.losses) == len(one.recorder.losses) == 7
    assert largest(learn.recorder.losses, one.recorder.losses) < 1e-5
    assert largest(before, [*learn.model.parameters()]) == 0.


class Losses(Callback):
    "`learn.loss` at the end of each training batch"
    order = 60      # after the recorder
    def before_fit(self): self.losses = []
    def after_batch(self):
        if self.training: self.losses.append(float(self.learn.loss))


@pytest.mark.holds('Decisions', "A batch that is left after its loss: the Recorder notes the loss of all items")
@pytest.mark.parametrize('at', [0, 1])
def test_the_loss_of_a_batch_that_is_left_after_it_is_that_of_all_items(ranks, at):
    n, launcher = ranks
    losses, single = Losses(), Losses()
    learn, one = both(meeting, n, launcher,
                      lambda rank: [Leave('after_loss', 'batch', rank, at), losses if rank else single])
    assert largest(losses.losses, single.losses) < 1e-5
    assert largest(learn.recorder.losses, one.recorder.losses) < 1e-5


class Diverts(Callback):
    "Rank 1 runs an event more than others"
    def before_batch(self):
        if self.training and self.iter == 1 and group.rank() == 1: self.learn('before_step')
    def before_step(self): pass


def test_a_rank_that_runs_other_events_is_named():
    with pytest.raises(RankRaised, match=r'Rank 0 is at before_batch .*batch 1.*while rank 1 is at before_step'):
        meeting().distrib_fit(1, nprocs=2, cbs=[Diverts()])


class LeavesInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.k = mlp(), 0
    def forward(self, x):
        self.k += self.training
        if group.rank() == 1 and self.k == 2: raise CancelTrainException()
        return self.net(x)


def test_an_exception_of_fastais_in_one_ranks_forward_pass_ends_the_fit():
    "No event, so no vote: the others are ended as by any failure, and the learner trains again"
    learn = learner(model=LeavesInForward())
    with pytest.raises(RankRaised, match='not all workers do the same'): learn.distrib_fit(1, nprocs=2)
    learn.model = mlp()
    learn.create_opt()
    learn.distrib_fit(1, nprocs=2)


SCRIPT = '''
import json, os, sys
sys.path[:0] = sys.argv[2:]
from test_lock_step import AtEnd, Leave, meeting, seed
rank = int(os.environ.get('RANK', 0))
res = []
for event, kind, at in ('before_batch', 'batch', 1), ('after_loss', 'epoch', 1), ('before_step', 'step', 2):
    learn, end = meeting(), AtEnd()
    seed(1)
    with learn.distrib_ctx(): learn.fit(2, cbs=[end, Leave(event, kind, 1, at)])
    res.append([p.flatten().tolist() for p in learn.model.parameters()])
json.dump(res, open(f'{sys.argv[1]}/rank{rank}.json', 'w'))
'''


@pytest.mark.full
def test_under_torchrun(tmp_path):
    script = tmp_path/'script.py'
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', script, tmp_path, here,
         here.parent], env=os.environ | dict(PYTHONPATH=str(here.parent.parent), OMP_NUM_THREADS='1'),
        capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = (json.loads((tmp_path/f'rank{r}.json').read_text()) for r in range(2))
    assert a == b and len(a) == 3
    for (event, kind, at), weights in zip([('before_batch', 'batch', 1), ('after_loss', 'epoch', 1),
                                           ('before_step', 'step', 2)], a):
        one = alone_like(meeting(), 2)
        seed(1)
        one.fit(2, cbs=[Leave(event, kind, 0, at)])
        assert largest([torch.tensor(o) for o in weights], [p.flatten() for p in one.model.parameters()]) < 1e-5


class NotesMeetings(nn.Module):
    "The number of the ranks' last meeting at each forward pass: no callback notes it, as that would add a vote"
    def __init__(self):
        super().__init__()
        self.net, self.at = mlp(), []
    def forward(self, x):
        if self.training: self.at.append(board.group_board().meeting)
        return self.net(x)


@pytest.mark.parametrize('cb,n', [(None, 1), (MixedPrecision(amp_mode='bf16'), 1), (GradientClip(1.), 1),
                                  (GradientAccumulation(1000), 1), (Leave('after_step', 'batch', 0, 99), 2)], ids=str)
def test_the_ranks_meet_where_a_callback_of_the_users_runs_only(ranks, cb, n):
    learn = learner(train=33, bs=2, model=NotesMeetings(), cbs=cb)
    learn.distrib_fit(1, nprocs=ranks[0], launcher=ranks[1])
    at = learn.model.at
    assert {b-a for a, b in zip(at[1:4], at[2:5])} == {n}, at
