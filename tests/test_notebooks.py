"""Every notebook runs from top to bottom: `nbdev-test` on each, in a process of its own. (The lesson: test_demo.py.)"""
import json, subprocess, sys
from pathlib import Path
import pytest, torch

root = Path(__file__).resolve().parent.parent
NOTEBOOKS = [o.relative_to(root).as_posix() for o in sorted((root/'nbs').glob('**/*.ipynb'))
             if o.name != 'lesson.ipynb' and not any(p.startswith(('.', '_')) for p in o.relative_to(root).parts)]
FLAGS = 'cuda' if torch.cuda.is_available() else ''


def nbdev_test(path):
    "Run one notebook's cells as `nbdev-test --n-workers 0` does"
    options = f'{str(path)!r}, flags={FLAGS!r}, n_workers=0, cell_timeout=200'
    code = f'from nbdev.test import nbdev_test; nbdev_test({options})'
    return subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize('path', NOTEBOOKS)
def test_notebook(path):
    r = nbdev_test(path)
    assert r.returncode == 0 and 'Success.' in r.stdout, r.stdout + r.stderr


def test_a_failing_cell_is_noticed(tmp_path):
    "A notebook outside the tree, with nbdev's settings beside it"
    (tmp_path/'pyproject.toml').write_text((root/'pyproject.toml').read_text())
    cell = dict(cell_type='code', id='a', metadata={}, source='assert 1 == 2', outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name='python3', display_name='python3', language='python'))
    path = tmp_path/'bad.ipynb'
    path.write_text(json.dumps(dict(cells=[cell], metadata=kernel, nbformat=4, nbformat_minor=5)))
    r = nbdev_test(path)
    assert r.returncode == 1 and 'bad.ipynb' in r.stderr
