"""Scripts of fastai v1 under the real torchrun."""
import json, os, subprocess, sys
from pathlib import Path
import pytest
from script_v1 import words

here = Path(__file__).parent


def flat(o): return [v for part in o for v in flat(part)] if isinstance(o, list) else [o]


@pytest.mark.full
def test_every_word_in_place(tmp_path):
    """Fit after fit, `load` between them, `lr_find`, validation, predictions, a language model: all ranks get what
    one process gets"""
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(here), str(here.parent.parent)]), 'OMP_NUM_THREADS': '1',
           'MPLBACKEND': 'Agg'}
    cmd = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', here/'script_v1.py',
           tmp_path]
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = [json.loads((tmp_path/f'words{r}.json').read_text()) for r in range(2)]
    assert a == b and not a['stands'] and not a['variables']
    # of rank 0 only: two fits, the search, the language model
    assert done.stdout.count('train_loss') == 4, done.stdout
    one = words(8, tmp_path/'of one')
    assert a['files'] == one['files'] == ['bestmodel.pth', 'encoder.pth', 'stage-1.pth', 'tmp.pth']
    for k in ('fit', 'losses', 'metrics', 'validate', 'preds', 'loaded', 'text', 'text losses', 'text validated'):
        assert flat(a[k]) == pytest.approx(flat(one[k]), abs=1e-5), k
