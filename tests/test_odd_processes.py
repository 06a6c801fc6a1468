"Processes that lack what most have: output, docstrings, low descriptors, modules of Unix."
import os, shutil, subprocess, sys
import pytest
from spread import long_but

FIT = '''
import sys
sys.path.insert(0, {tests!r})
from learners import make_learner
import fastddp.all
from fastddp.ranch import ranch

def job():
    print('a line')
    return 1

if __name__ == '__main__':
    out, make = open('out', 'w'), lambda: make_learner(n=32, n_valid=16)
    {before}
    learn = make()
    learn.{fit}
    out.write(f'{{len(learn.recorder.values)}} {{{more}}}')
'''

ON_WORKERS = 'distrib_fit(1, nprocs=2)', 'ranch(2, job)'
ODD = dict(no_output=('sys.stdout = sys.stderr = None', *ON_WORKERS),
           high_descriptors=('import os, resource\n'
                             '    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n'
                             '    for _ in range(1100): os.open(os.devnull, os.O_RDONLY)', *ON_WORKERS),
           windows=('pass', 'fit(1)', 'make().distrib_fit(1, nprocs=1)'), no_docstrings=('pass', *ON_WORKERS))


@pytest.mark.parametrize('what', long_but(ODD, 'windows'))
def test_it_trains_all_the_same(what, tmp_path):
    before, fit, more = ODD[what]
    script, args = tmp_path/'script.py', ['-OO'] if what == 'no_docstrings' else []
    text = FIT.format(tests=os.path.dirname(__file__), before=before, fit=fit, more=more)
    blocked = "import sys\nfor o in 'fcntl', 'resource': sys.modules[o] = None\n"      # as where there are none
    script.write_text(blocked+text if what == 'windows' else text)
    p = subprocess.run([sys.executable, *args, script], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert p.returncode == 0, p.stderr
    assert (tmp_path/'out').read_text() == f"1 {None if what == 'windows' else [1, 1]}"


IN_C = """
#include <signal.h>
#include <unistd.h>
static void noted(int n) { if (write(9, "C", 1)) {} }
__attribute__((constructor)) static void start(void) { signal(SIGINT, noted); }
"""
IN_C_SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
os.environ.pop('LD_PRELOAD')
os.dup2(os.open('noted', os.O_RDWR|os.O_CREAT), 9)
from learners import make_learner
import fastddp.all
from fastddp.ranch import ranch

def job(): return 1

if __name__ == '__main__':
    assert signal.getsignal(signal.SIGINT) is None
    learn = make_learner(n=32, n_valid=16)
    learn.distrib_fit(1, nprocs=2)
    assert ranch(2, job) == [1, 1]
    assert signal.getsignal(signal.SIGINT) is None and not os.path.getsize('noted')
    os.kill(os.getpid(), signal.SIGINT)
    assert os.path.getsize('noted') == 1 and len(learn.recorder.values) == 1
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith('linux') or not shutil.which('cc'), reason='needs Linux and cc')
def test_a_program_that_runs_python_keeps_its_handler(tmp_path):
    "One that was there before Python, such as that of R or Julia, and that Python can't set again"
    (tmp_path/'handler.c').write_text(IN_C)
    subprocess.run(['cc', '-shared', '-fPIC', '-o', 'handler.so', 'handler.c'], cwd=tmp_path, check=True)
    (tmp_path/'script.py').write_text(IN_C_SCRIPT.format(tests=os.path.dirname(__file__)))
    p = subprocess.run([sys.executable, 'script.py'], cwd=tmp_path, capture_output=True, text=True, timeout=150,
                       env={**os.environ, 'LD_PRELOAD': str(tmp_path/'handler.so')})
    assert p.returncode == 0, p.stderr


AS_IN_3_14 = """
import multiprocessing
multiprocessing.context._default_context._default_context = multiprocessing.get_context('forkserver')
"""
LOADERS = """
import sys
sys.path.insert(0, {tests!r})
import multiprocessing, torch
import fastddp.all
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastddp.ranch import ranch
from learners import mlp
from fastai.learner import Learner
from torch import nn

class Items:
    def __len__(self): return 16
    def __getitem__(self, i): return torch.ones(8)*i, i%2

def first():
    multiprocessing.set_start_method('spawn')       # a job may still choose
    return multiprocessing.get_start_method()

if __name__ == '__main__':
    assert multiprocessing.get_start_method() == 'forkserver'
    import torch.utils.data as data
    dls = DataLoaders(*(data.DataLoader(Items(), batch_size=4, num_workers=1) for _ in range(2)))
    learn = Learner(dls, mlp(), loss_func=nn.CrossEntropyLoss(), lr=.1)
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1
    assert ranch(2, first, caller_rank=None) == ['spawn', 'spawn']
"""


@pytest.mark.full
def test_loaders_processes_of_python_3_14(tmp_path):
    "Its default way to start them loses what cells and scripts define, since a worker's `__main__` is another one"
    (tmp_path/'sitecustomize.py').write_text(AS_IN_3_14)
    (tmp_path/'script.py').write_text(LOADERS.format(tests=os.path.dirname(__file__)))
    paths = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    p = subprocess.run([sys.executable, 'script.py'], cwd=tmp_path, capture_output=True, text=True, timeout=150,
                       env={**os.environ, 'PYTHONPATH': paths})
    assert p.returncode == 0, p.stderr[-3000:]
