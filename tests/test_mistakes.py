"""tests/mistakes.md: what is typed by mistake, and the sentence that answers it. Nothing is started, and the learner
stays as it was."""
import math, re
from pathlib import Path
import pytest
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from fastddp.all import *
from fastddp.base import group
from fastddp.launch import local as launch
from learners import make_learner

page = (Path(__file__).resolve().parent/'mistakes.md').read_text(encoding='utf-8')
ROWS = re.findall(r'^\| `(.+?)` \| `(.+)` \|$', page, re.M)


def f(*args): return args


@pytest.fixture(scope='module')
def shell():
    res = InteractiveShell.instance()
    res.run_line_magic('load_ext', 'fastddp')
    yield res
    InteractiveShell.clear_instance()      # or other tests of this process would be in a notebook


def magic(code):
    name, _, line = code.lstrip('%').partition(' ')
    shell = InteractiveShell.instance()
    return shell.run_cell_magic(name, line, '1') if code.startswith('%%') else shell.run_line_magic(name, line)


def answer(code, **names):
    "What is raised by `code`, as the cell shows it"
    try: magic(code) if code.startswith('%') else eval(code, dict(globals(), nan=float('nan'), **names))
    except Exception as e: return f'{type(e).__name__}: {e}'


def fits(said, row): return re.fullmatch('.*'.join(map(re.escape, row.split(' ... '))), said or '', re.S)


@pytest.fixture(autouse=True)
def no_process_starts(monkeypatch):
    def start(*args, **kwargs): raise AssertionError('a process was started')
    monkeypatch.setattr(launch, 'Workers', start)
    monkeypatch.setattr(group, 'n_gpus', lambda: 0)


def test_the_table_is_as_long_as_promised():
    values = [o for o in ROWS if 'Did you mean' not in o[1] or re.search(r'=.*: .*Did', o[1])]
    assert len(values) >= 40 and len(ROWS)-len(values) >= 15 and len(dict(ROWS)) == len(ROWS)


@pytest.mark.parametrize('code,row', ROWS, ids=[o[0] for o in ROWS])
def test_it_says_what_the_page_says(code, row, shell):
    learn = make_learner()
    before = dict(vars(learn))
    said = answer(code, learn=learn)
    assert fits(said, row), said
    assert vars(learn) == before and learn.opt is None


def test_all_gpus_in_a_word(monkeypatch):
    "People type it"
    from fastddp.launch.options import workers_for
    monkeypatch.setattr(group, 'n_gpus', lambda: 2)
    assert workers_for(None, 'all') == workers_for(2, 'all') == (2, [0, 1])


def test_numbers_of_numpy_are_numbers():
    import numpy as np
    learn = make_learner()
    with pytest.raises(AssertionError, match='a process was started'):
        learn.distrib_fit(1, nprocs=np.int64(2), restarts=np.int32(0), timeout=np.float32(5), sync_bn=np.True_)


@pytest.mark.parametrize('name', ['makedip', 'autodip', 'dipush', 'dipull', 'dipper', 'dipstat'])
def test_help_of_a_magic(name, shell, capsys):
    assert answer(f'%{name} -h') is None
    said = capsys.readouterr().out
    assert said.startswith(f'  %{name}') and '::' not in said


def test_lines_of_a_message_end_at_90_columns(shell):
    "In a cell; the exception's own text has no breaks"
    try: make_learner().distrib_fit(1, bs=64)
    except CantDistribute as e: text, lines = str(e), e._render_traceback_()
    message = lines[next(i for i, o in enumerate(lines) if o.startswith('CantDistribute')):]
    assert len(text) > 90 and max(map(len, message)) <= 90
    assert ' '.join(message) == f'CantDistribute: {text}'
