"""The core does without its annexes: deleted from a copy of the tree, what is left trains, and its words are there."""
import os, shutil, subprocess, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
ANNEXES = {'machines': ['machines'], 'cluster': ['cluster', 'magics.py'], 'fastai1': ['fastai1']}

TRAINS = """
import sys, torch
from fastai.basics import *
from fastddp.all import *
from fastddp.ranch import *

def double(x): return 2*x

if __name__ == '__main__':
    x = torch.randn(32, 3)
    data = list(zip(x, x.sum(1, keepdim=True)))
    learn = Learner(DataLoaders.from_dsets(data, data, bs=8), nn.Linear(3, 1), loss_func=MSELossFlat(), metrics=mae)
    was = learn.model.weight.clone()
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1 and not learn.model.weight.equal(was)
    with learn.distrib_ctx(nprocs=2): preds = learn.get_preds()[0]
    assert len(preds) == 32
    learn.distrib_fit(1, launcher=InProcess())
    assert ranch(2, double, 1) == [2, 2]
    print('trained', *sorted(o for o in ('Hosts', 'Ray', 'Local') if o in globals()))
    found = {o.split('.')[1] for o in sys.modules if o.startswith('fastddp.')}
    print('loaded', *sorted(found & {'machines', 'cluster', 'fastai1', 'magics'}))
"""


@pytest.fixture
def tree(tmp_path):
    "A copy of the package, alone"
    shutil.copytree(root/'fastddp', tmp_path/'tree'/'fastddp', ignore=shutil.ignore_patterns('__pycache__'))
    # an installation in editable form would find what is deleted
    (tmp_path/'tree'/'sitecustomize.py').write_text(
        "import sys\nsys.meta_path[:] = [o for o in sys.meta_path if '__editable__' not in repr(o)]\n")
    return tmp_path/'tree'


def run(tree, script):
    (tree/'script.py').write_text(script)
    env = os.environ | dict(PYTHONPATH=str(tree), PYTHONWARNINGS='ignore', CUDA_VISIBLE_DEVICES='')
    r = subprocess.run([sys.executable, 'script.py'], cwd=tree, env=env, capture_output=True, text=True, timeout=250)
    assert r.returncode == 0, r.stderr[-3000:]
    return r.stdout.strip().split('\n')[-2:]


@pytest.mark.full
@pytest.mark.parametrize('annex', ANNEXES)
def test_the_core_does_without(tree, annex):
    for o in ANNEXES[annex]: shutil.rmtree(tree/'fastddp'/o) if '.' not in o else (tree/'fastddp'/o).unlink()
    words, loaded = run(tree, TRAINS)
    assert words == ('trained Local' if annex == 'machines' else 'trained Hosts Local Ray')
    assert loaded == ('loaded' if annex == 'machines' else 'loaded machines')


@pytest.mark.full
def test_an_annex_is_imported_when_its_word_is_used(tree):
    said = run(tree, "import sys, fastddp.all\nbefore = 'fastddp.machines' in sys.modules\nfastddp.all.Ray\n"
                     "print(before)\nprint('fastddp.machines' in sys.modules)")
    assert said == ['False', 'True']
