"""What editors complete, though the methods are patched onto fastai's class: from a kernel, and from the stub."""
import subprocess, sys
from pathlib import Path
import jedi, pytest
from fastai.learner import Learner
from fastddp.all import *
from learners import make_learner

root = Path(__file__).resolve().parent.parent
METHODS = {k for k in vars(Learner) if k.startswith('distrib') and k != 'distrib_session'}


@pytest.mark.full
def test_the_stub_for_editors_is_rendered():
    "In a process of its own: other tests patch learners"
    said = subprocess.run([sys.executable, '-c', "import runpy; print(runpy.run_path('tools/stubs.py')['render']())"],
                          cwd=root, capture_output=True, text=True, timeout=180)
    assert said.returncode == 0, said.stderr
    assert (root/'fastddp'/'all.pyi').read_text(encoding='utf-8') == said.stdout[:-1], 'run `make stubs`'


@pytest.mark.full
def test_a_kernel_completes_them():
    "As Jupyter, VS Code's notebooks and IPython ask: with the objects that are there"
    here = jedi.Interpreter('learn.distrib', [dict(learn=make_learner())])
    assert METHODS <= {o.name for o in here.complete()}


SCRIPT = '''from fastai.learner import *
from fastddp.all import Learner
learn = Learner(None, None)
learn.distrib'''


@pytest.mark.full
def test_the_stub_completes_them_where_nothing_runs():
    "A script in an editor with Jedi"
    said = jedi.Script(SCRIPT, environment=jedi.InterpreterEnvironment()).complete(4, len('learn.distrib'))
    assert METHODS <= {o.name for o in said}
