"""What Shift-Tab and help() show: the signature and docstring of every word."""
import inspect
import pytest
from fastai.learner import Learner
from fastddp.all import *
from fastddp.fastai2.learner import OPTIONS

FITS, INFERS = ('fit', 'fit_one_cycle', 'fit_flat_cos', 'fit_sgdr', 'fine_tune', 'lr_find'), ('validate', 'get_preds',
                                                                                              'tta')
NOT_FOR_INFERENCE = {'batch', 'sync_bn', 'loss', 'restarts', 'checkpoint'}
RAISED = 'CantDistribute', 'RankRaised', 'RankDied', 'GroupTimeout', 'KeyboardInterrupt'


def params(name): return inspect.signature(getattr(Learner, name)).parameters


@pytest.mark.parametrize('name', [*FITS, *INFERS])
def test_the_signature_is_the_methods_with_the_options_that_do_something(name):
    own, base = params(f'distrib_{name}'), [k for k, p in params(name).items() if p.kind != p.VAR_KEYWORD]
    options = [k for k in OPTIONS.defaults if name in FITS or k not in NOT_FOR_INFERENCE]
    assert [*own] == base + options
    assert all(own[k].default == params('distrib_ctx')[k].default for k in options)
    assert all(own[k].kind == inspect.Parameter.KEYWORD_ONLY for k in options)


@pytest.mark.parametrize('name', [f'distrib_{o}' for o in (*FITS, *INFERS, 'resume')])
def test_the_docstring_says_what_is_returned_raised_and_left(name):
    doc = getattr(Learner, name).__doc__
    assert all(o in doc for o in RAISED) and 'Returns' in doc
    assert any(o in doc for o in ('After a failure', 'Model and optimizer stay', 'The learner is unchanged'))
    assert name == 'distrib_resume' or 'those of `distrib_ctx`' in doc


def test_what_belongs_to_a_fit_is_said_of_fits_only():
    for o in FITS: assert 'distrib_resume()' in getattr(Learner, f'distrib_{o}').__doc__
    for o in INFERS: assert 'distrib_resume' not in getattr(Learner, f'distrib_{o}').__doc__


def test_defaults_are_those_of_the_signature():
    shown = {k: p.default for k, p in params('distrib_ctx').items() if k not in ('self', 'ddp_kwargs')}
    assert OPTIONS.defaults == shown


def test_what_is_not_shown_is_still_accepted(capsys):
    "Code that was written for fastai's own words, or that gives one set of options to all of them"
    from learners import make_learner
    learn = make_learner()
    learn.distrib_validate(launcher=InProcess(), sync_bn=False, restarts=1)
