"""The notebooks of fastai v1, and the lessons in a real kernel."""
import json, subprocess, sys
from pathlib import Path
import nbformat, pytest
from nbclient import NotebookClient
from spread import long_but

root = Path(__file__).resolve().parent.parent.parent
ROOMS, LESSONS = (sorted((root/'nbs'/o).glob('*.ipynb')) for o in ('fastai1', 'tutorials/v1'))
# Code from a line of JSON, in a fork of a process that has imported fastai; answers with a line of JSON
RUNNER = '''
import atexit, gc, json, os, sys, tempfile, traceback, types
import fastai.vision, fastai.text, fastai.tabular, fastai.collab
gc.collect()
gc.freeze()
for line in iter(sys.stdin.readline, ''):
    with tempfile.TemporaryFile('w+') as out:
        if not (pid := os.fork()):
            code = 1
            try:
                nothing = os.open(os.devnull, os.O_RDONLY)
                for fd, to in enumerate((nothing, out.fileno(), out.fileno())): os.dup2(to, fd)
                main = sys.modules['__main__'] = types.ModuleType('__main__')
                exec(json.loads(line), vars(main))
                atexit._run_exitfuncs()     # the helper goes as it does at the end of any process
                code = 0
            except BaseException: traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        print(json.dumps([code, out.read()]), flush=True)
'''


@pytest.fixture(scope='module')
def run():
    "Runs code in a process of its own: `(exit code, what it printed)`"
    with subprocess.Popen([sys.executable, '-c', RUNNER], cwd=root, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as runner:
        def run(code):
            print(json.dumps(code), file=runner.stdin, flush=True)
            return json.loads(runner.stdout.readline())
        yield run
        runner.stdin.close()


@pytest.mark.parametrize('path', ROOMS, ids=lambda p: p.stem)
def test_room(path, run):
    cells = [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells']
             if c['cell_type'] == 'code']
    code, text = run('\n'.join(c for c in cells if 'nbdev_export' not in c))
    assert code == 0, text


def test_a_failing_cell_is_noticed(run):
    code, text = run('assert 1 == 2')
    assert code == 1 and 'AssertionError' in text


@pytest.mark.parametrize('path', long_but(LESSONS, *LESSONS[:1]), ids=lambda p: p.stem)
def test_lesson(path, tmp_path):
    "As it ran, the lesson goes into build/executed, for the site"
    nb = nbformat.read(path, 4)
    nb.metadata['kernelspec'] = dict(name='python3', display_name='python3', language='python')
    NotebookClient(nb, timeout=200, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    assert any('epochs in' in o.get('text', '') for c in nb.cells if c.cell_type == 'code' for o in c.outputs)
    kept = root/'build'/'executed'/path.relative_to(root)
    kept.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, kept)


def test_there_are_lessons(): assert len(LESSONS) == 3 and len(ROOMS) >= 4
