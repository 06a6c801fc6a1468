"""Every notebook runs from top to bottom: `nbdev-test` on each, in a process of its own (notebook_runner.py); the
tutorials in a Jupyter kernel, as readers run them. (The lesson: test_demo.py; fastai v1: v1.)"""
import importlib.util, json, re, subprocess, sys
from pathlib import Path
import nbformat, pytest, torch

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tools'))
import demo


def of_v1(path):
    "Does the notebook at `path` need fastai v1? Then tests/v1 runs it"
    return path.parent.name in ('fastai1', 'v1')


NOTEBOOKS = [o.relative_to(root).as_posix() for o in sorted((root/'nbs').glob('**/*.ipynb'))
             if o.name != 'lesson.ipynb' and not of_v1(o)
             and not any(p.startswith(('.', '_')) for p in o.relative_to(root).parts)]
# These start helper processes, or train for long: they run with the long tests, and after a change of theirs.
LONG = {*'''900_early 901_ranch 902_magics 904_doctor 905_all payload/112_pieces launch/506_local
fastai2/726_jobs fastai2/727_session fastai2/730_learner fastai2/731_check fastai2/732_bench
launch/503_monitor launch/514_functions cluster/651_cluster machines/611_ray
output/203_capture process/404_helper tutorials/collab tutorials/ddp_from_scratch tutorials/dip
tutorials/kaggle tutorials/large_model tutorials/night tutorials/ranch tutorials/segmentation
tutorials/tabular tutorials/text
tutorials/time_series tutorials/transformers tutorials/vision tutorials/worth_it'''.split()}
FLAGS = 'cuda' if torch.cuda.is_available() else ''
# Cells that need a library that is not installed are skipped
MISSING = [o for o in ('transformers',) if not importlib.util.find_spec(o)]


@pytest.fixture(scope='module')
def nbdev_test():
    "Runs one notebook's cells as `nbdev-test --n-workers 0` does: `(exit code, what it printed)`"
    cmd = [sys.executable, root/'tests'/'notebook_runner.py', FLAGS]
    with subprocess.Popen(cmd, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        def run(path):
            print(path, file=runner.stdin, flush=True)
            answer = json.loads(runner.stdout.readline())
            return answer['code'], answer['text']
        yield run
        runner.stdin.close()


TUTORIALS = [o for o in NOTEBOOKS if 'tutorials/' in o]
SKIPPED = re.compile(rf"#\| *({'|'.join(['slow', 'ray', *['cuda']*(not FLAGS), *MISSING])})\b")


def marked(paths): return [pytest.param(o, marks=pytest.mark.full) if o[4:-6] in LONG else o for o in paths]


@pytest.mark.parametrize('path', marked(TUTORIALS))
def test_tutorial(path, tmp_path):
    "As it ran, it goes into build/executed, for the site"
    nb = nbformat.read(root/path, 4)
    cells, nb.cells = nb.cells, [o for o in nb.cells if not SKIPPED.match(o.source)]
    demo.execute(nb, tmp_path, 200)
    ran = [o for o in nb.cells if o.cell_type == 'code']
    assert all(o.execution_count for o in ran)
    said = [o.text for cell in ran for o in cell.outputs if o.output_type == 'stream' and o.name == 'stderr']
    assert 'Warning: fastddp' not in ''.join(said), said
    nb.cells = cells
    kept = root/'build'/'executed'/path
    kept.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, kept)


@pytest.mark.parametrize('path', marked(o for o in NOTEBOOKS if o not in TUTORIALS))
def test_notebook(nbdev_test, path):
    code, text = nbdev_test(path)
    assert code == 0 and 'Success.' in text, text


def test_long_ones_are_there(): assert LONG <= {o[4:-6] for o in NOTEBOOKS}


def test_a_failing_cell_is_noticed(nbdev_test, tmp_path):
    "A notebook outside the tree, with nbdev's settings beside it"
    (tmp_path/'pyproject.toml').write_text((root/'pyproject.toml').read_text())
    cell = dict(cell_type='code', id='a', metadata={}, source='assert 1 == 2', outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name='python3', display_name='python3', language='python'))
    path = tmp_path/'bad.ipynb'
    path.write_text(json.dumps(dict(cells=[cell], metadata=kernel, nbformat=4, nbformat_minor=5)))
    code, text = nbdev_test(path)
    assert code == 1 and 'bad.ipynb' in text
