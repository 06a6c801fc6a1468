"""Workers start where the helper process can't, and data is shared where memory files can't be made."""
import errno, os, subprocess, sys, textwrap, warnings
import pytest
from fastddp.all import *
from learners import make_learner

CRASH = '''
import torch
from fastddp.base import group
from fastddp.process import workers
from fastddp.launch.local import Local
from fastddp.launch.engine import Job

def add(ctx, obj): return group.all_sum([ctx.rank, obj.sum()])

if __name__ == '__main__':
    workers.preload('crashes')
    for i in range(2): print('sums', Local(see=()).run(Job.of(add, torch.ones(3)), 1).results[0])
    print(workers.start_method())
'''


def test_helper_that_crashes(tmp_path):
    "A library that ends the helper when it is imported: spawn does it, and one line says so"
    (tmp_path/'crashes.py').write_text('import os\nos._exit(3)\n')
    (tmp_path/'run.py').write_text(textwrap.dedent(CRASH))
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])}
    r = subprocess.run([sys.executable, 'run.py'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    assert r.stdout.split('\n') == ['sums [0.0, 3.0]']*2 + ['spawn', '']
    assert r.stderr.count('UserWarning') == 1 and 'workers start by spawn' in r.stderr, r.stderr


NOTED = """
import sys, warnings
warnings.simplefilter('ignore')
from IPython.core.interactiveshell import InteractiveShell
def run(cell): exec(cell, globals())
typed = InteractiveShell.instance().run_cell if {interactive} else run

def helper(): return getattr(sys.modules.get('fastddp.process.server'), 'helper_pid', lambda: None)()

class Notes:
    "Whether there is a helper when a library is imported"
    def __init__(self): self.seen = {{}}
    def find_spec(self, name, *args):
        if name in ('torch', 'fastai'): self.seen.setdefault(name, helper() is not None)

notes = Notes()
sys.meta_path.insert(0, notes)
typed({cell!r})
print(sorted(notes.seen.items()), helper() is not None)
"""


@pytest.mark.parametrize('cell,interactive,seen,there', [
    ('import fastddp', True, {}, True), ('import fastddp', False, {}, False),
    ('import fastddp.process.helper', True, {}, False),
    ('%load_ext fastddp', True, dict(torch=False), True),
    ('from fastddp.ranch import *', True, dict(torch=False), False),
    ('from fastddp.all import *', True, dict(fastai=True, torch=True), True),
    pytest.param('from fastddp.all import *', False, dict(fastai=False, torch=False), False, marks=pytest.mark.full)])
def test_the_helper_is_asked_for_before_fastai_is_imported(cell, interactive, seen, there):
    "and `import fastddp` imports neither torch nor fastai"
    r = subprocess.run([sys.executable, '-c', NOTED.format(cell=cell, interactive=interactive)], capture_output=True,
                       text=True, timeout=120)
    assert r.stdout.splitlines()[-1:] == [f'{sorted(seen.items())} {there}'], (r.stdout, r.stderr)


def test_data_through_a_temporary_file(monkeypatch):
    "No anonymous memory files here: the notebook's data goes through a file without a name, and comes back"
    def refused(*args): raise OSError(errno.ENOSYS, 'Function not implemented')
    monkeypatch.setattr(os, 'memfd_create', refused, raising=False)
    monkeypatch.setattr('fastddp.payload.shared_memory._warned', set())
    learn = make_learner(n=64)
    before = [p.clone() for p in learn.model.parameters()]
    with warnings.catch_warnings(record=True) as said, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.distrib_fit(1, nprocs=2)
    assert len([o for o in said if 'temporary file' in str(o.message)]) == 1
    assert any((a != b).any() for a, b in zip(before, learn.model.parameters()))
