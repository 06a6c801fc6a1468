"The same code as a script: under the real torchrun, and under plain python."
import json, os, subprocess, sys
from pathlib import Path
import pytest
from learners import make_learner

here = Path(__file__).parent


def run(*cmd, **env):
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(here), str(here.parent)]), 'OMP_NUM_THREADS': '1', **env}
    return subprocess.run([sys.executable, *map(str, cmd)], env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope='module')
def launched(tmp_path_factory):
    "What two ranks under torchrun said and have"
    out = tmp_path_factory.mktemp('torchrun')
    done = run('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', here/'script_fit.py', out, 'fastai-arguments')
    assert done.returncode == 0, done.stderr[-3000:]
    return done, [json.loads((out/f'rank{r}.json').read_text()) for r in range(2)]


def test_all_ranks_train_alike(launched):
    _, (a, b) = launched
    assert a['weights'] == b['weights'] and a['values'] == b['values'] and a['losses'] == b['losses']
    assert a['world'] == '2' and not a['fit']


def test_only_rank_0_prints(launched):
    done, _ = launched
    assert done.stdout.count('train_loss') == 1


def test_torchrun_trains_what_a_notebook_trains(launched):
    _, (a, _) = launched
    learn = make_learner(bs=16)
    learn.distrib_fit(2, 0.01, nprocs=2)
    assert len(a['losses']) == len(learn.recorder.losses) and a['values'][-1][-1] == pytest.approx(learn.recorder.values[-1][-1], abs=0.2)


SCRIPT = """
from learners import make_learner
from fastddp.all import *
print('TOP LEVEL')
learn = make_learner()
learn.distrib_fit(1, 0.01, nprocs=2)
print('TRAINED', len(learn.recorder.values))
"""


def test_a_plain_script_needs_no_main_guard(tmp_path):
    script = tmp_path/'train.py'
    script.write_text(SCRIPT)
    done = run(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('TOP LEVEL') == 1 and 'TRAINED 1' in done.stdout and 'nanobind' not in done.stderr


def test_without_the_helper(tmp_path):
    script = tmp_path/'train.py'
    script.write_text(SCRIPT)
    done = run(script, FASTDDP_PRELOAD='0')
    assert done.returncode == 0 and 'TRAINED 1' in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize('module', ['fastddp', 'fastddp.workers', 'fastddp.launch'])
def test_low_rooms_import_no_fastai(module):
    done = run('-c', f"import sys, {module}; assert not [m for m in sys.modules if m.split('.')[0] in ('fastai', 'accelerate')]")
    assert done.returncode == 0, done.stderr
