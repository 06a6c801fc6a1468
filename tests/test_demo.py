"""The lesson runs in a real Jupyter kernel and `make demo` says what it measured."""
import runpy
from importlib.util import find_spec
from pathlib import Path
import matplotlib.pyplot as plt, nbformat, numpy as np, pytest, torch
from PIL import Image

root = Path(__file__).resolve().parent.parent
demo = runpy.run_path(str(root/'tools'/'demo.py'))


def assert_plots_have_data(nb, losses):
    "Each cell that draws has drawn something: an empty picture of that size has fewer colours, and fewer bytes"
    drawn = {k: [o.data['image/png'] for c in nb.cells if k in c.source for o in c.get('outputs', [])
                 if 'image/png' in o.get('data', {})] for k in ('show_batch', 'plot_loss', 'show_results')}
    assert all(len(v) == 1 for v in drawn.values()), drawn.keys()
    assert len(blue_columns(losses)) > 200, 'the curve of the training losses goes through the picture'


def blue_columns(path):
    "Columns of a picture in which matplotlib's first colour is"
    pixels = np.asarray(Image.open(path).convert('RGB')).astype(int)
    return np.flatnonzero((abs(pixels-[31, 119, 180]).sum(2) < 30).any(0))


def test_an_empty_plot_is_noticed(tmp_path):
    for n, values in enumerate(([], [3, 2, 1])):
        fig, ax = plt.subplots()
        ax.plot(values, label='train')
        ax.legend()
        fig.savefig(tmp_path/f'{n}.png')
        plt.close(fig)
    assert len(blue_columns(tmp_path/'0.png')) < 50 and len(blue_columns(tmp_path/'1.png')) > 200


@pytest.mark.full
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
    if find_spec('ipywidgets'):      # tqdm asks for it
        assert not [o.text for c in nb.cells for o in c.get('outputs', []) if o.get('name') == 'stderr']
    assert_plots_have_data(nb, str(tmp_path/'losses.png') in said and (tmp_path/'losses.png'))
    if m['workers'] > 1:
        text = ''.join(o.get('text', '') for c in nb.cells for o in c.get('outputs', []))
        assert f"{m['workers']} workers" in text


SHORT = dict(
    inaccurate=('dict(accuracy=0.5, seconds=1.0, workers=2, device="cpu")', 'less than the 0.95'),
    failing=('1/0', 'ZeroDivisionError'))


@pytest.mark.full
@pytest.mark.parametrize('case', SHORT)
def test_failure_is_told(case, tmp_path, capsys):
    cell, words = SHORT[case]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nb.metadata['kernelspec'] = dict(name='python3', display_name='python3', language='python')
    nbformat.write(nb, tmp_path/'short.ipynb')
    assert demo['main'](tmp_path/'out', tmp_path/'short.ipynb') == 1
    assert words in capsys.readouterr().out and (tmp_path/'out'/'lesson.html').exists()
