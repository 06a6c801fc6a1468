"""The failure table: what goes wrong x where x on which rank. The right type, the rank, the place and the remedy; the
end of the last complete epoch in the learner; nothing left (conftest.py sees to that); the next fit works.

`make test` runs a spread of it, `make test-faults` and `make test-all` the whole."""
import os
import pytest, torch
from torch.utils.data import DataLoader
from boot_fault import Boots
from faults import Broken, OnDump, OneFault, OnLoad
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastddp.all import RankDied, RankRaised
from fastddp.base.errors import GroupTimeout, remedy_for, trouble_of
from learners import make_learner, mlp, points

RAISED = {'exception': 'ValueError', 'silent exception': 'Silent', 'sys.exit': 'SystemExit',
          'out of memory': 'MemoryError'}
DIED = {'os._exit': ('exited with code 4', 'exited'), 'segfault': ('killed by SIGSEGV', 'compiled code crashed'),
        'SIGKILL': ('killed by SIGKILL', 'killed by the system')}
WHAT = [*RAISED, *DIED, 'SIGSTOP']
# place -> event, epoch, batch, complete epochs when it happens, words that say where
PLACES = {'starting': None, 'loading the payload': None,
          'first batch': ('before_batch/train', 0, 0, 0, 'epoch 0, batch 0'),
          'mid-epoch': ('after_pred/train', 1, 3, 1, 'epoch 1, batch 3'),
          # rank 0 has the first batch of the loader, rank 1 the second one
          'validation': ('before_batch/valid', 1, None, 1, 'epoch 1, validation, batch'),
          'callback': ('after_epoch', 1, None, None, 'epoch 1'),
          'returning': ('after_fit', None, None, 2, 'epoch 1')}
TABLE = [(what, place, rank) for what in WHAT for place in PLACES for rank in (0, 1)]
# Seconds without a step that count as a hang here; a busy machine takes its time.
LIMIT = 5.*max(1., os.getloadavg()[0]/(os.cpu_count() or 1))


def faulty(what, place, rank, marker):
    "A learner to which `what` happens"
    if place == 'starting': return make_learner()
    if place == 'loading the payload':
        learn = make_learner()
        learn.heavy = OnLoad(what, rank, str(marker))
        return learn
    event, epoch, batch, _, _ = PLACES[place]
    return make_learner(cbs=[OneFault(what, event, rank, epoch, batch, marker=str(marker))])


def boots(what, place, rank, marker):
    "Options of a call in which it happens before the job"
    return dict(launcher=Boots(what, rank, str(marker))) if place == 'starting' else {}


@pytest.mark.few(4)
@pytest.mark.spread
@pytest.mark.parametrize('what,place,rank', TABLE, ids=[f'{w}, {p}, rank {r}' for w, p, r in TABLE])
def test_table(what, place, rank, tmp_path):
    marker = tmp_path/'fired'
    before = make_learner()
    learn = faulty(what, place, rank, marker)
    learn.recorder.values = []
    with pytest.raises((RankRaised, RankDied, GroupTimeout)) as caught:
        learn.distrib_fit(2, nprocs=2, timeout=LIMIT if what == 'SIGSTOP' else 240., **boots(what, place, rank, marker))
    err, text = caught.value, str(caught.value)
    assert marker.exists() and err.rank == rank, text
    if what in RAISED:
        assert isinstance(err, RankRaised) and err.failure.kind == RAISED[what]
        assert remedy_for(err.failure.kind, err.failure.message) in text
        if what == 'silent exception' and not PLACES[place]: assert 'without a message' in text
        assert 'Your code:' in text and text.index('Your code:') < text.index('Traceback of rank')
    elif what in DIED:
        said, name = DIED[what]
        assert type(err) is RankDied and said in text and trouble_of(err.signal
                                                                     or 'exit').name == name and err.remedy in text
    else: assert type(err) is GroupTimeout and 'does not react' in text
    if PLACES[place]:
        _, _, _, complete, where = PLACES[place]
        assert where in text
        if complete is None: assert len(learn.recorder.values) in (1, 2)    # rank 0's state may be on its way
        else: assert len(learn.recorder.values) == complete
    if not learn.recorder.values:
        assert 'learn is unchanged.' in text
        assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), before.model.parameters()))
    else: assert f'the end of epoch {len(learn.recorder.values)-1}' in text
    learn.__dict__.pop('heavy', None)
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1


def test_a_start_whose_ranks_cant_connect_is_tried_again(tmp_path):
    "gloo fails so now and then on a busy machine"
    learn = make_learner()
    learn.distrib_fit(1, nprocs=2, **boots('connect', 'starting', 1, tmp_path/'fired'))
    assert (tmp_path/'fired').exists() and len(learn.recorder.values) == 1


def test_hang_in_python_shows_stacks(tmp_path):
    learn = make_learner(cbs=[OneFault('loop', 'before_batch/train', 1, 0, 2, marker=str(tmp_path/'fired'))])
    with pytest.raises(GroupTimeout) as caught: learn.distrib_fit(1, nprocs=2, timeout=LIMIT)
    err = caught.value
    assert err.rank == 1 and err.where == 'epoch 0, batch 2'
    assert 'in do' in err.stacks[0] and 'faults.py' in err.stacks[0] and err.stacks[1].startswith('Rank 0')


def test_last_words_of_a_library(tmp_path, capfd):
    """What compiled code wrote lies in the rank's log, whose end is in the report, and nowhere else; the next job's
    report begins anew"""
    learn = make_learner(cbs=[OneFault('library', 'before_batch/train', 1, 0, 2, marker=str(tmp_path/'fired'))])
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(1, nprocs=2)
    assert 'Last output of rank 1:\na library complains\n' in str(caught.value)
    assert 'complains' not in ''.join(capfd.readouterr())
    learn.one_fault.what, learn.one_fault.marker = 'exception', str(tmp_path/'again')
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(1, nprocs=2)
    assert 'Last output' not in str(caught.value)


def broken_learner(bad, what, marker, num_workers):
    data = points(96)
    train = DataLoader(Broken(data, bad, what, str(marker)), batch_size=8, num_workers=num_workers)
    return Learner(DataLoaders(train, DataLoader(points(16), batch_size=8)), mlp(),
                   loss_func=torch.nn.CrossEntropyLoss(), lr=.1)


# Where the bad item lies: in batch 0 of 6 or in batch 3, which the ranks share item by item
BAD = {('first batch', 0): 2, ('first batch', 1): 3, ('mid-epoch', 0): 50, ('mid-epoch', 1): 51}
IN_LOADER = [(what, place, rank) for what in ('exception', 'SIGKILL') for place, rank in BAD]


@pytest.mark.spread
@pytest.mark.parametrize('what,place,rank', IN_LOADER)
def test_in_a_dataloader_worker(what, place, rank, tmp_path):
    "The workers of workers: their error comes through, and they are gone afterwards"
    # torch sees that a worker is gone, or stands in the middle of a batch that it hands over
    kinds = dict(exception=['ValueError'], SIGKILL=['RuntimeError', 'ConnectionResetError'])[what]
    learn = broken_learner(BAD[place, rank], what, tmp_path/'fired', 2)
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(1, nprocs=2)
    kind = caught.value.failure.kind
    assert kind in kinds and 'DataLoader worker' in str(caught.value)
    assert caught.value.rank == rank
    trouble = dict(RuntimeError='shared memory is full', ConnectionResetError='a connection broke')
    if what == 'SIGKILL': assert trouble_of(kind, caught.value.failure.message).name == trouble[kind]
    learn.distrib_fit(1, nprocs=2)


def test_post_mortem(tmp_path):
    "Which items, and what the variables were"
    learn = broken_learner(51, 'exception', tmp_path/'fired', 0)
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(1, nprocs=2)
    err = caught.value
    assert 51 in err.batch_items and len(err.batch_items) == 8
    names = {name: values for *_, name, values in err.failure.locals}
    assert names['__getitem__']['i'] == '51' and 'Items of the batch at hand' in str(err)


def test_what_cannot_be_pickled_costs_nothing(tmp_path):
    """An attribute of a callback that can't be sent back stays as the notebook has it, and is named; the training is
    not lost"""
    learn = make_learner(cbs=[OneFault('nothing', 'before_fit', 9, marker=str(tmp_path/'fired'))])
    learn.one_fault.extra = OnDump('exception', 0, str(tmp_path/'dumped'))     # the first time only
    learn.one_fault.when_done = 'generator'
    with pytest.warns(UserWarning, match=r"learn.one_fault.generator \(TypeError: cannot pickle 'generator' object\) "
                                         r"can't be sent back"):
        learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1 and not hasattr(learn.one_fault, 'generator')
    learn.one_fault.when_done = 'fussy'
    learn.distrib_fit(1, nprocs=2)      # an exception whose `__init__` has arguments of its own can be loaded
    assert type(learn.one_fault.fussy).__name__ == 'Fussy' and learn.one_fault.fussy.args == ('1 and 2',)
    assert learn.epoch == 0 and len(learn.recorder.values) == 1


@pytest.mark.parametrize('rank', [0, 1])
def test_result_of_a_job_that_cannot_be_pickled(rank):
    from fastddp.launch.local import Local
    from fastddp.launch.engine import Job
    from jobs_that_fail import returns_a_generator
    with pytest.raises(RankRaised, match='pickle') as caught:
        Local().run(Job.of(returns_a_generator, rank), 2)
    assert caught.value.rank == rank
