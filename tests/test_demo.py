"""The lesson runs in a real Jupyter kernel and `make demo` says what it measured."""
import runpy
from pathlib import Path
import nbformat, pytest, torch

root = Path(__file__).resolve().parent.parent
demo = runpy.run_path(str(root/'tools'/'demo.py'))


@pytest.mark.timeout(600)
def test_lesson(tmp_path, capsys):
    "Distributed training in the middle, local use of the same learner after it"
    assert demo['main'](tmp_path) == 0
    said = capsys.readouterr().out
    nb = nbformat.read(tmp_path/'lesson.ipynb', as_version=4)
    m = demo['measured'](nb)
    assert m['accuracy'] >= 0.95 and f"{m['accuracy']:.4f}" in said and str(tmp_path/'lesson.html') in said
    assert m['workers'] == max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else m['workers'] == 2
    page = (tmp_path/'lesson.html').read_text(encoding='utf-8')
    assert page.count('<th>epoch</th>') >= 2 and page.count('data:image/png;base64') >= 3
    if m['workers'] > 1:
        text = ''.join(o.get('text', '') for c in nb.cells for o in c.get('outputs', []))
        assert f"{m['workers']} workers" in text


SHORT = dict(
    inaccurate=('dict(accuracy=0.5, seconds=1.0, workers=2, device="cpu")', 'less than the 0.95'),
    failing=('1/0', 'ZeroDivisionError'))


@pytest.mark.parametrize('case', SHORT)
def test_failure_is_told(case, tmp_path, capsys):
    cell, words = SHORT[case]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nb.metadata['kernelspec'] = dict(name='python3', display_name='python3', language='python')
    nbformat.write(nb, tmp_path/'short.ipynb')
    assert demo['main'](tmp_path/'out', tmp_path/'short.ipynb') == 1
    assert words in capsys.readouterr().out and (tmp_path/'out'/'lesson.html').exists()
