"""The notebooks of fastai v1, and the lessons in a real kernel."""
import json, subprocess, sys
from pathlib import Path
import nbformat, pytest
from nbclient import NotebookClient

root = Path(__file__).resolve().parent.parent.parent
ROOMS, LESSONS = sorted((root/'nbs'/'fastai1').glob('*.ipynb')), sorted((root/'nbs'/'tutorials'/'v1').glob('*.ipynb'))


@pytest.mark.parametrize('path', ROOMS, ids=lambda p: p.stem)
def test_room(path):
    cells = [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells']
             if c['cell_type'] == 'code']
    code = '\n'.join(c for c in cells if 'nbdev_export' not in c)
    r = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stdout + r.stderr


@pytest.mark.parametrize('path', LESSONS, ids=lambda p: p.stem)
def test_lesson(path, tmp_path):
    nb = nbformat.read(path, 4)
    nb.metadata['kernelspec'] = dict(name='python3', display_name='python3', language='python')
    NotebookClient(nb, timeout=200, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    assert any('epochs in' in o.get('text', '') for c in nb.cells if c.cell_type == 'code' for o in c.outputs)


def test_there_are_lessons(): assert len(LESSONS) == 3 and len(ROOMS) >= 8
