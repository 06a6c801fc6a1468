"Processes that lack what most have: output, docstrings, low descriptors, modules of Unix."
import os, subprocess, sys
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
