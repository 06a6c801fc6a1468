"""What the user sees when something fails: their own lines and the item first, once; nothing that could hurt them, and
nothing that others should not read."""
import os, sys, traceback
from pathlib import Path
import pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch import nn
from fastddp.all import *
from fastddp.launch import local as launch
from learners import make_learner, mlp, points
from parity import Warm


class Pictures:
    "A data set of files, one of which is broken"
    def __init__(self, folder, n=64): self.items = [Path(folder)/f'{i}.pt' for i in range(n)]
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return torch.load(self.items[i]), torch.tensor(i % 2)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    d = tmp_path_factory.mktemp('pictures')
    for i in range(64): torch.save(torch.randn(8), d/f'{i}.pt')
    (d/'37.pt').write_text('no picture')
    return d


@pytest.fixture(scope='module')
def launcher():
    launcher = Warm()
    try: yield launcher
    finally: launcher.end()


def shown(err): return err._render_traceback_()


@pytest.mark.parametrize('num_workers', [0, 2])
def test_a_bad_file(folder, num_workers):
    "Own lines first and once, then the item that failed and those of its batch, with their paths"
    dl = DataLoader(Pictures(folder), bs=8, num_workers=num_workers)
    dls = DataLoaders(dl, DataLoader(points(16), bs=8))
    with pytest.raises(RankRaised) as e:
        Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss()).distrib_fit(1, nprocs=2)
    err, lines = e.value, e.value.lines()
    bad = f"{37} ({folder/'37.pt'})"
    assert err.batch_items and 37 in err.batch_items and 'epoch 0, batch 2' in lines[0]
    if num_workers: assert 'in DataLoader worker' in lines[0]
    assert lines[1:3] == ['', 'Your code:'] and any('torch.load' in o for o in lines[3:10])
    assert len(lines) < 50 and sum('torch.load(self.items[i])' in o for o in lines) == 2, '\n'.join(lines)
    if sys.version_info >= (3, 11): assert f"The item that failed: {bad}" in lines
    assert any(o.startswith('Items of the batch at hand: ') and bad in o for o in lines)
    assert sum('Original Traceback' in o for o in lines) == 0
    assert 'Caught' not in lines[0] and err.failure.text.count('Traceback (most recent') >= 1


class Raises(Callback):
    "Raises in `event` what `make` gives"
    def __init__(self, event, make): setattr(self, event, self._go); self.make = make
    def _go(self):
        token = 'hf_12345'
        headers = {'Authorization': f'Bearer {token}'}
        raise self.make(headers, 7)


def failed(learn, launcher, **kwargs):
    with pytest.raises(RankRaised) as e: learn.distrib_fit(1, nprocs=2, launcher=launcher, **kwargs)
    return e.value


class AtFirst(Callback):
    def __init__(self, event): self.event = event
    def __call__(self, event):
        if event == self.event and int(os.environ['RANK']) == 1: raise ValueError('at first')


@pytest.mark.parametrize('event,where', [('before_fit', 'before the first epoch'), ('before_epoch', 'epoch 0'),
                                         ('before_train', 'epoch 0, batch 0'), ('after_train', 'epoch 0'),
                                         ('before_validate', 'epoch 0, validation, batch 0')])
def test_the_place_before_and_between_batches(event, where, launcher):
    learn = make_learner(n=64, cbs=AtFirst(event))
    learn.epoch, learn.iter = 7, 3      # of an earlier fit
    assert failed(learn, launcher).failure.where == where


def secretly(headers, n): return ValueError('no access')


def test_secrets_are_not_shown_and_libraries_are_folded(launcher):
    err = failed(make_learner(n=64, cbs=Raises('before_batch', secretly)), launcher)
    text = '\n'.join(shown(err))
    assert 'hf_12345' not in text.replace("token = 'hf_12345'", '') and "headers = {'Authorization': ***}" in text
    assert not any('hf_12345' in v for *_, vars_ in err.failure.locals for v in vars_.values())
    assert 'frames of libraries' in text and len(text.split('\n')) < 50
    assert 'learner.py' in err.failure.text and 'learner.py' not in text
    assert 'err.failure.locals, err.batch_items' in text and text.endswith('in this process: %debug is live.')


def test_the_debugger_finds_the_recorded_frames(launcher, monkeypatch):
    "`%debug` walks the traceback that a cell's error has once it was shown"
    monkeypatch.setattr(sys, 'last_traceback', None, raising=False)
    err = failed(make_learner(n=64, cbs=Raises('before_batch', secretly)), launcher)
    shown(err)
    frames = [f for f, _ in traceback.walk_tb(err.__traceback__)]
    assert sys.last_traceback is err.__traceback__ and frames[-1].f_code.co_name == '_go'
    assert repr(frames[-1].f_locals['token']) == '***' and 64 < frames[-1].f_lineno < 70


class Mute(Exception):
    def __str__(self): raise SystemExit(3)
    __repr__ = __str__


class Leaves(Exception):
    def __reduce__(self): sys.exit(3)


class LeavesHere(Exception):
    def __reduce__(self): return sys.exit, (3,)


class Odd(str): pass


KINDS = {'mute': lambda h, n: Mute(n), 'leaves when pickled': lambda h, n: Leaves('left'),
         'leaves when loaded': lambda h, n: LeavesHere('left'), '50 MB': lambda h, n: ValueError('x'*50_000_000),
         'a text of its own': lambda h, n: ValueError(Odd('odd'))}


@pytest.mark.parametrize('kind', KINDS)
def test_an_exception_that_is_a_hazard(kind, launcher):
    "It is still that exception, with its type and traceback, in bounded size, and the notebook lives"
    err = failed(make_learner(n=64, cbs=Raises('before_batch', KINDS[kind])), launcher)
    assert err.failure.kind == type(KINDS[kind]({}, 1)).__name__ and '_go' in err.failure.text
    assert len(str(err)) < 250_000 and len(err.failure.original) < 2**21 and len(shown(err)[0]) < 3000
    assert not isinstance(err.__cause__, SystemExit)


class Asks(Callback):
    def before_batch(self): input('How are you? ')


def test_input_says_why_not(launcher):
    assert 'no keyboard' in failed(make_learner(n=64, cbs=Asks()), launcher).remedy


def test_the_debugger_stands_in_the_users_frame():
    "What `%debug` opens after InProcess() is the innermost frame"
    learn = make_learner(n=64, cbs=Raises('before_batch', secretly))
    with pytest.raises(ValueError) as e: learn.distrib_fit(1, launcher=InProcess())
    assert [*traceback.walk_tb(e.value.__traceback__)][-1][0].f_code.co_name == '_go'


def test_after_a_second_failure_it_is_clear_what_is_there(launcher):
    "Nothing that can be read as if the earlier epochs were lost"
    learn = make_learner(n=64, cbs=FromEpoch(1))
    with pytest.raises(RankRaised) as first: learn.distrib_fit(3, nprocs=2, launcher=launcher)
    with pytest.raises(RankRaised) as second: learn.distrib_resume()
    assert first.value.kept.startswith('holds the last finished batch')
    assert second.value.kept.startswith('holds the last finished batch')


class FromEpoch(Callback):
    def __init__(self, n): self.n = n
    def before_batch(self):
        if self.learn.epoch >= self.n: raise ValueError('again')


def test_a_refusal_is_the_users_line_and_the_sentence(monkeypatch):
    learn = make_learner(n=64)
    try: learn.distrib_fit(1, nprocs=0)
    except CantDistribute as e: lines = shown(e)
    assert len(lines) == 4 and 'test_bad_minute.py' in lines[0] and 'nprocs=0)' in lines[1]
    assert lines[2].startswith('CantDistribute: nprocs=0')


CELL = """
import os
from fastai.callback.core import Callback
from torch import nn
fh = open(os.devnull)
class LogsToFile(Callback):
    def after_epoch(self): print('done', file=fh)
class HasFile(Callback):
    stream = fh
class HasClosure(Callback):
    def __init__(self): self.f = closure()
def closure():
    numbers = (i for i in range(3))
    return lambda: next(numbers)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 2)
    def forward(self, x):
        print(file=fh)
        return self.lin(x)
"""


@pytest.mark.parametrize('what,path', [('LogsToFile', 'LogsToFile.after_epoch (its global fh)'),
                                       ('HasFile', 'HasFile.stream'), ('Net', 'Net.forward (its global fh)')])
def test_what_cannot_travel_is_named_down_to_the_variable(what, path, monkeypatch):
    monkeypatch.setattr(launch, 'Workers', None)
    cell = dict(__name__='__main__')
    exec(CELL, cell)
    learn = make_learner(**(dict(model=cell[what]) if what == 'Net' else dict(cbs=cell[what]())))
    with pytest.raises(NotPicklable) as e: learn.distrib_fit(1, nprocs=2)
    cell['fh'].close()
    assert e.value.path == path and e.value.__cause__ is None and e.value.__context__ is None


@pytest.mark.parametrize('name', ['distrib_fit', 'distrib_validate'])
def test_a_callback_that_distributes_once_more(name, launcher):
    "On a worker, which has a process group: the advice is for that"
    class Nested(Callback):
        def after_epoch(self): getattr(self.learn, name)(*[1]*(name == 'distrib_fit'))
    with pytest.raises(RankRaised, match=r'a worker of a fit[\s\S]*calls learn.validate\(\)'):
        make_learner(cbs=Nested()).distrib_fit(1, nprocs=2, launcher=launcher)


def test_what_all_workers_raise_is_shown_once(launcher):
    class Fails(Callback):
        def before_batch(self): raise ValueError('the cause')
    with pytest.raises(RankRaised, match=r'Other workers:\n  rank \d raised the same') as e:
        make_learner(cbs=Fails()).distrib_fit(1, nprocs=2, launcher=launcher)
    assert str(e.value).count('the cause') == 4     # headline, traceback, and the line of code in both


def test_a_failed_jobs_display_has_the_cause(launcher):
    "It stands behind a line break in fastai's message"
    class Fails(Callback):
        def before_batch(self): raise ValueError('the cause')
    job = make_learner(cbs=Fails()).distrib_fit(1, nprocs=2, launcher=launcher, wait=False)
    assert isinstance(job.exception(), RankRaised)
    assert 'event `before_batch`: the cause' in job.log and 'job.result() raises it' in job.log
