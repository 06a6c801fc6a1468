"""The table of tests/mistakes.md for fastai v1: the same mistakes, the same sentences."""
import re
from pathlib import Path
import pytest
from fastddp.all import *
from fastddp.launch import local as launch
from learners_v1 import plain

page = (Path(__file__).resolve().parents[1]/'mistakes.md').read_text(encoding='utf-8')
NOT_HERE = re.compile('fact|bucket_cap|find_unused|fine_?tune|max_lr|epochs=|nn.Linear'
                      '|lr_max|resume|^ranch|^spawn|^in_torchddp|^Torch|^%'      # tables of their own
                      '|ds_idx|tta|dl=')                                         # arguments of fastai 2
ROWS = [o for o in re.findall(r'^\| `(.+?)` \| `(.+)` \|$', page, re.M) if not NOT_HERE.search(o[0])]


@pytest.mark.parametrize('code,row', ROWS, ids=[o[0] for o in ROWS])
def test_it_says_what_the_page_says(code, row, monkeypatch):
    def start(*args, **kwargs): raise AssertionError('a process was started')
    monkeypatch.setattr(launch, 'Workers', start)
    learn = plain()
    with pytest.raises((CantDistribute, AttributeError)) as e:
        eval(code, dict(globals(), learn=learn, nan=float('nan')))
    said = f'{type(e.value).__name__}: {e.value}'
    assert re.fullmatch('.*'.join(map(re.escape, row.split(' ... '))), said, re.S), said


@pytest.mark.parametrize('given,says', [(dict(callbacks=5), '^callbacks=5: expected callbacks, such as'),
                                        (dict(cbs=5), '^No option cbs.')])
def test_what_is_no_callback(given, says, monkeypatch):
    monkeypatch.setattr(launch, 'Workers', None)
    with pytest.raises(CantDistribute, match=says): plain().distrib_fit(1, nprocs=2, **given)


@pytest.mark.parametrize('option', ['wait', 'checkpoint'])
@pytest.mark.parametrize('word', ['distrib_fit_one_cycle', 'distrib_get_preds', 'distrib_ctx'])
def test_no_jobs(word, option, monkeypatch):
    monkeypatch.setattr(launch, 'Workers', None)
    args = [] if word != 'distrib_fit_one_cycle' else [1]
    with pytest.raises(CantDistribute, match=f'^No option {option}. Background jobs and checkpoints are for fastai 2'):
        with getattr(plain(), word)(*args, nprocs=2, **{option: False}): pass
