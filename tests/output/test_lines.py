"""The library's own lines: they say what happened, once, and not at all where the learner wants none."""
import re, sys, warnings
import pytest
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import *
from fastai.callback.tracker import EarlyStoppingCallback
from fastai.callback.training import ShortEpochCallback
from fastai.learner import Learner
from torch import nn
from fastddp.all import InProcess
from fastddp.launch import options, session
from fastddp.output import replay
from learners import make_learner
from parity import learner, warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


def last(capsys): return capsys.readouterr().out.splitlines()[-1]


def test_the_epochs_that_ran(two, capsys):
    learn = learner(cbs=EarlyStoppingCallback(min_delta=1000, patience=1))
    learn.distrib_fit(6, nprocs=2, launcher=two)
    assert len(learn.recorder.values) == 2 and last(capsys).startswith('2 epochs in ')


def test_iterations_of_lr_find(two, capsys, tmp_path):
    learn = learner(path=tmp_path)
    learn.add_cb(ProgressCallback())
    learn.distrib_lr_find(nprocs=2, launcher=two, num_it=12, show_plot=False, stop_div=False)
    assert '12 iterations in ' in last(capsys)      # behind what is left of the bar


def test_no_line_where_none_is_wanted(two, capsys):
    "Neither of a fit on workers, nor of a prediction, nor why something runs in this process"
    learn = learner(train=40, model=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    with Learner.no_bar(learn), learn.no_logging():
        learn.distrib_fit(1, nprocs=2, launcher=two)
        learn.distrib_get_preds(nprocs=2, launcher=two)
        learn.distrib_validate(nprocs=2, launcher=two)
        learn.distrib_fit(1, nprocs=1)
    assert capsys.readouterr().out == ''
    learn.distrib_fit(1, nprocs=1)
    assert 'in this process' in capsys.readouterr().out


def test_batch_norm_is_explained_once(two, capsys, monkeypatch):
    monkeypatch.setattr(replay, '_printed', set())
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        learner(train=40, model=model).distrib_fit(1, nprocs=2, launcher=two)
    assert len(re.findall('Batch norm', capsys.readouterr().out)) == 1


def test_more_workers_than_cores_get_a_remark(two, capsys, monkeypatch):
    monkeypatch.setattr(replay, '_printed', set())
    printed = False
    for cores in 2, 1, 1:
        monkeypatch.setattr(options, 'visible_cores', lambda: cores)
        learner().distrib_fit(1, nprocs=2, launcher=two)
        assert ('2 workers share 1 core: ' in capsys.readouterr().out) == (cores == 1 and not printed)
        printed = cores == 1


def test_in_process_is_one_rank_whatever_is_asked(capsys):
    "One option is enough to debug a call"
    learn = learner()
    learn.distrib_fit(1, nprocs=2, launcher=InProcess())
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert 'runs one rank' in first and second.startswith('1 worker ') and len(learn.recorder.values) == 1


class Warns(Callback):
    def before_fit(self):
        import old_and_tired
        old_and_tired.warn()


def test_a_librarys_warning_comes_once(tmp_path, monkeypatch, capsys):
    "Each call has fresh workers, in which every warning is the first; both ranks warn"
    folder = tmp_path/'site-packages'
    folder.mkdir()
    (folder/'old_and_tired.py').write_text('import warnings\ndef warn(): warnings.warn("this library is old")\n')
    monkeypatch.syspath_prepend(str(folder))
    for _ in range(2): learner(cbs=Warns()).distrib_fit(1, nprocs=2)
    assert capsys.readouterr().err.count('UserWarning: this library is old') == 1


def test_a_warning_that_the_notebook_has_shown(two, tmp_path, monkeypatch, capsys):
    "Workers don't repeat it"
    (tmp_path/'old_and_tired.py').write_text('import warnings\ndef warn(): warnings.warn("I am old")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, 'old_and_tired', raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter('default')
        monkeypatch.setattr(warnings, 'showwarning', shows)
        learner(cbs=Warns()).fit(1)
        learner(cbs=Warns()).distrib_fit(1, nprocs=2, launcher=two)
    assert capsys.readouterr().err.count('UserWarning: I am old') == 1


def shows(*args): sys.stderr.write(warnings.formatwarning(*args[:4]))


def test_items_of_a_short_epoch(monkeypatch):
    "Those that were trained on, not those of the whole epoch"
    told = []
    monkeypatch.setattr(session, 'summary_line', lambda result, *args: told.append(result['items']) or '')
    make_learner().distrib_fit(1, nprocs=2, cbs=ShortEpochCallback(.1))
    make_learner().distrib_fit(1, nprocs=2)
    assert told == [64, 203]
