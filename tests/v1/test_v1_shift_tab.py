"""What Shift-Tab and help() show of the words for fastai v1."""
import inspect
import pytest
from fastai.basic_train import Learner
from fastddp.all import *
from fastddp.fastai1.learner import OPTIONS

FITS, INFERS = ('fit', 'fit_one_cycle', 'lr_find'), ('validate', 'get_preds')


@pytest.mark.parametrize('name', [*FITS, *INFERS])
def test_the_options_that_do_something(name):
    word = getattr(Learner, f'distrib_{name}')
    own, base = inspect.signature(word).parameters, inspect.signature(getattr(Learner, name)).parameters
    options = [k for k in OPTIONS.defaults if name in FITS or k not in ('batch', 'sync_bn', 'loss', 'restarts')]
    assert [*own] == [k for k, p in base.items() if p.kind != p.VAR_KEYWORD] + options


@pytest.mark.parametrize('name', [f'distrib_{o}' for o in (*FITS, *INFERS)])
def test_what_is_raised_and_left(name):
    doc = getattr(Learner, name).__doc__
    assert all(o in doc for o in ('CantDistribute', 'RankRaised', 'RankDied', 'GroupTimeout', 'KeyboardInterrupt'))
    assert 'After a failure' in doc or 'Model and optimizer stay' in doc
