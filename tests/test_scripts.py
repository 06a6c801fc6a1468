"The same code as a script: under the real torchrun, and under plain python."
import contextlib, json, os, re, shutil, socket, subprocess, sys, tempfile
from pathlib import Path
import pytest
from fastai.callback.training import GradientAccumulation
from learners import Anneals, make_learner, seed_all
from script_words import words

here = Path(__file__).parent


def run(*cmd, first=(), **env):
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(here), str(here.parent)]), 'OMP_NUM_THREADS': '1', **env}
    argv = [*map(str, first), sys.executable, *map(str, cmd)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)


# Inside, this host's name leads to another address than 127.0.0.1, as most hosts' do
NAMED = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'


def named_host(folder):
    "What a command begins with to run on a host whose name leads elsewhere; nothing where that is not allowed"
    if os.getuid() != 0 or not shutil.which('unshare'): return []
    (folder/'hosts').write_text(f'127.0.0.1 localhost\n127.0.0.2 {socket.gethostname()}\n')
    return ['unshare', '-m', 'sh', '-c', NAMED, 'sh', folder/'hosts']


@pytest.fixture(scope='module')
def launched(tmp_path_factory):
    "What two ranks under torchrun said and have"
    out = tmp_path_factory.mktemp('torchrun')
    done = run('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', here/'script_fit.py', out,
               first=named_host(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return done, [json.loads((out/f'rank{r}.json').read_text()) for r in range(2)]


def test_all_ranks_train_alike(launched):
    _, (a, b) = launched
    assert a['weights'] == b['weights'] and a['values'] == b['values'] and a['losses'] == b['losses']
    assert a['world'] == '2' and not a['fit'] and a['again'] == b['again'] and a['again'][-1] < a['losses'][0]


def test_only_rank_0_prints(launched):
    done, _ = launched
    assert done.stdout.count('train_loss') == 2      # one table for each fit


def test_first_and_last_line(launched):
    "Of each fit, once, from rank 0"
    lines = launched[0].stdout.splitlines()
    said = [o.split('\r')[-1] for o in lines if 'workers (' in o or 'items/s' in o]
    first = r'2 workers \(torchrun, gloo\) x batch 16 = 32 per step, 7 steps per epoch'
    last = r'{} in [\d.]+ s, [\d,]+ items/s'
    wanted = [first, last.format('2 epochs'), first, last.format('1 epoch')]
    assert len(said) == 4 and all(re.search(w, o) for w, o in zip(wanted, said)), said


@pytest.mark.full
def test_the_error_of_a_rank_is_shown(tmp_path):
    path = tmp_path/'script.py'
    path.write_text(FAILS, encoding='utf-8')
    temp = tempfile.mkdtemp(prefix='t')     # torchrun may end the other rank by SIGTERM, which leaves a folder
    try: done = run('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', path, TMPDIR=temp)
    finally: shutil.rmtree(temp)
    # fastai puts callback and event before the text
    assert done.returncode and '[rank1]: ValueError: ' in done.stderr and "raise ValueError('mine')" in done.stderr


FAILS = '''
from fastai.callback.core import Callback
from learners import make_learner
from fastddp.all import *

class Fails(Callback):
    def before_batch(self):
        if rank_distrib(): raise ValueError('mine')

from fastai.torch_core import rank_distrib
make_learner().distrib_fit(1, cbs=[Fails()])
'''


def test_torchrun_trains_what_one_process_trains(launched):
    _, (a, _) = launched
    learn = make_learner(bs=32)
    seed_all(0)
    learn.fit(2, 0.01)
    assert a['losses'] == pytest.approx([float(o) for o in learn.recorder.losses], abs=1e-5)
    for mine, theirs in zip(learn.model.parameters(), a['weights'], strict=True):
        assert mine.flatten().tolist() == pytest.approx(theirs, abs=1e-5)


def test_a_validation_calls_no_callback_of_rank_0_on_others(launched):
    _, ranks = launched
    found = [o['of_rank0'] for o in ranks]
    assert found == [['before_fit', 'after_validate', 'after_fit'], []]


def test_ranks_begin_with_the_weights_of_rank_0(launched):
    "Also where DDP doesn't send them: in a validation, and while gradients accumulate"
    learn = make_learner(bs=32, cbs=[GradientAccumulation(64)])
    seed_all(0)
    validated = list(learn.validate())
    learn.fit(1, 0.01)
    for rank in launched[1]:
        assert rank['validated'] == pytest.approx(validated, abs=1e-5)
        for mine, theirs in zip(learn.model.parameters(), rank['accumulated'], strict=True):
            assert mine.flatten().tolist() == pytest.approx(theirs, abs=1e-5)


def test_a_loss_that_counts_is_called_as_often_as_in_one_process(launched):
    learn = make_learner(bs=32, loss_func=Anneals())
    learn.dls.valid.bs = 16
    with learn.no_bar(), learn.no_logging(): learn.fit(2, 0.01)
    for rank in launched[1]:
        weights, n = rank['annealed']
        assert n == learn.loss_func.kept[0]['n']
        for mine, theirs in zip(learn.model.parameters(), weights, strict=True):
            assert mine.flatten().tolist() == pytest.approx(theirs, abs=1e-5)


def test_what_ranks_have_made_otherwise_is_said(launched):
    "Once, and not where all have the same: in each of the fits before"
    done, (a, b) = launched
    assert b['said'] == [] and 'has other items' not in done.stderr and 'has another' not in done.stderr
    begins = 'has other items in its data sets than rank 0', 'has another 0.frequencies than rank 0'
    assert len(a['said']) == 2 and all(o.startswith(f'fastddp: rank 1 {b}') for o, b in zip(a['said'], begins))


def test_ranks_of_one_host_listen_there_only(launched):
    "Not at the address by which others find this host, as gloo does by itself (torchrun's own store is torchrun's)"
    for o in launched[1]: assert o['listening'] and {*o['listening']} <= {'127.0.0.1', '::1'}


def test_a_script_keeps_its_variables(launched):
    "Those by which torch connects are set while a group stands"
    assert [o['variables'] for o in launched[1]] == [[], []]


def test_each_rank_has_the_report(launched):
    "The numbers of all ranks, of a fit and of predictions; only the clock that frames them is a rank's own"
    a, b = [o['reports'] for o in launched[1]]
    assert [o['what'] for o in a] == ['2 epochs', 'inference'] and [o['ranks'] for o in a] == [o['ranks'] for o in b]
    for report, kind in zip(a, ['forward', 'validation'], strict=True):
        assert len(report['ranks']) == 2
        for r in report['ranks']: assert r['seconds'][kind] > 0 and sum(r['seconds'].values()) <= report['seconds']


@pytest.mark.full
def test_every_word_in_place(tmp_path):
    """Under torchrun all ranks get what one process gets: fit with its best model, metrics, predictions, `lr_find`;
    one file"""
    done = run('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', here/'script_words.py', tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = [json.loads((tmp_path/f'words{r}.json').read_text()) for r in range(2)]
    assert a == b
    assert a['files'] == ['models/model.pth'] and a['untouched'] and not a['own'] and len(a['preds']) == 5
    one = words(32, tmp_path/'models of one', contextlib.nullcontext)
    assert a['lrs'] == one['lrs'] and one['files'] == a['files']
    for k in ('fit', 'values', 'validate', 'midst', 'preds', 'small'):
        assert flat(a[k]) == pytest.approx(flat(one[k]), rel=1e-3, abs=1e-4), k


def flat(o): return [v for part in o for v in flat(part)] if isinstance(o, list) else [o]


SCRIPT = """
import sys
from fastai.callback.core import Callback
from learners import make_learner
from fastddp.all import *
print('TOP LEVEL')
class Says(Callback):
    def before_fit(self): print('THERE', [m for m in ('fastai.learner', 'fastai.text.all') if m in sys.modules])
learn = make_learner(cbs=[Says()])
learn.distrib_fit(1, 0.01, nprocs=2)
print('TRAINED', len(learn.recorder.values))
print('OF V1', [m for m in sys.modules if m.startswith('fastddp.fastai1')])
"""


@pytest.mark.full
def test_a_plain_script_needs_no_main_guard(tmp_path):
    "and its helper imports what the script has, not all of fastai: the first fit would wait for that"
    script = tmp_path/'train.py'
    script.write_text(SCRIPT)
    done = run(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('TOP LEVEL') == 1 and 'TRAINED 1' in done.stdout
    assert "THERE ['fastai.learner']" in done.stdout
    assert 'OF V1 []' in done.stdout and 'nanobind' not in done.stderr


IMPORTS = """
import sys
from fastai.callback.core import Callback
from fastddp.all import *
from learners import make_learner

class Imported(Callback):
    def before_fit(self): self.before = {*sys.modules}
    def after_fit(self): self.new = sorted(o for o in {*sys.modules}-self.before if o.startswith(('torch','fastai')))

learn = make_learner(n=64, cbs=Imported())
learn.distrib_fit(1, nprocs=2)
# `torch.load` has imported this one: a few constants
print('imported:', [o for o in learn.imported.new if not o.startswith('torch.utils.serialization')])
"""


@pytest.mark.full
def test_a_worker_imports_nothing_while_it_trains(tmp_path):
    "The helper has done so, once for all; by its DDP alone torch would have each worker import for a second"
    (tmp_path/'script.py').write_text(IMPORTS)
    done = run(tmp_path/'script.py')
    assert 'imported: []' in done.stdout, done.stdout[-2000:]+done.stderr[-2000:]


@pytest.mark.full
def test_without_the_helper(tmp_path):
    script = tmp_path/'train.py'
    script.write_text('from fastddp.process.helper import turn_off_helper\nturn_off_helper("a test")\n'+SCRIPT)
    done = run(script)
    assert done.returncode == 0 and 'TRAINED 1' in done.stdout, done.stderr[-3000:]


@pytest.mark.full
def test_fastai_distributed_imported_before(tmp_path):
    pytest.importorskip('accelerate')
    script = tmp_path/'train.py'
    script.write_text("import fastai.distributed\nfrom fastai.learner import Learner\n" + SCRIPT +
                      "print('PARAMS', *__import__('inspect').signature(Learner.distrib_ctx).parameters)")
    done = run(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'TRAINED 1' in done.stdout and 'PARAMS self nprocs gpus' in done.stdout, done.stderr[-3000:]


AROUND = """
import json, os, sys, warnings
from fastai.distributed import *
from torch import nn
from learners import make_learner
from fastddp.all import *

def error_of(f, *args, **kwargs):
    try: f(*args, **kwargs)
    except CantDistribute as e: return str(e)

res = dict(first=rank0_first(lambda: 'made'))
learn = rank0_first(make_learner)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    learn.distrib_fit(1, checkpoint='epoch', restarts=1, nprocs=5)
    learn.distrib_fit(1, nprocs=5)
res['told'] = [str(w.message) for w in told if 'fastddp' in str(w.message)]
res['check'],res['bench'] = error_of(learn.distrib_check), error_of(learn.distrib_bench)
rank = int(os.environ['RANK'])
n = learn.model[0].in_features
learn.model = nn.Sequential(nn.Linear(n, 4+rank), nn.Linear(4+rank, 2))
learn.opt = None
res['differ'] = [error_of(learn.distrib_fit, 1), error_of(learn.distrib_validate)]
with open(f'{sys.argv[1]}/{rank}.json', 'w') as f: json.dump(res, f)
"""


@pytest.mark.full
def test_what_people_call_around_a_fit(tmp_path):
    "fastai's `rank0_first`; options and methods that torchrun leaves no sense; models that differ"
    pytest.importorskip('accelerate')
    (tmp_path/'script.py').write_text(AROUND, encoding='utf-8')
    done = run('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', tmp_path/'script.py', tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = [json.loads((tmp_path/f'{r}.json').read_text()) for r in range(2)]
    assert a['first'] == b['first'] == 'made'
    assert len(a['told']) == 1 and 'restarts=, checkpoint= has no effect' in a['told'][0] and not b['told']
    for k in 'check', 'bench': assert a[k] == b[k] and f'distrib_{k} starts workers of its own' in a[k]
    for o in a, b:
        assert all('0.weight has shape (5, 8) on rank 1, and (4, 8) on rank 0' in text for text in o['differ'])



@pytest.mark.full
def test_fastai_distributed_imported_afterwards(tmp_path):
    "It puts its own `distrib_ctx` in the place of ours; the other methods don't depend on that"
    pytest.importorskip('accelerate')
    (tmp_path/'train.py').write_text("import fastddp.all\nimport fastai.distributed\n" + SCRIPT)
    done = run(tmp_path/'train.py')
    assert done.returncode == 0 and 'TRAINED 1' in done.stdout, done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize('module', ['fastddp', 'fastddp.process.workers', 'fastddp.launch.local'])
def test_low_floors_import_no_fastai(module):
    done = run('-c', f"import sys, {module}; assert not [m for m in sys.modules if m.split('.')[0] in ('fastai', "
                     f"'accelerate')]")
    assert done.returncode == 0, done.stderr
