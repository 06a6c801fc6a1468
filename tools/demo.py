"""Run nbs/lesson.ipynb in a Jupyter kernel, keep it as build/demo/lesson.html, and say what it measured."""
import ast, base64, os, sys
from pathlib import Path
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

root = Path(__file__).resolve().parent.parent


# fastai's own layers ask for it when they are imported, under torch 2.15: nothing that a reader could do about
IGNORED = 'ignore:`torch.jit.script` is deprecated:FutureWarning'


def execute(nb, folder, timeout=900):
    "Run all cells of `nb` with `folder` as their working directory"
    warnings = ','.join(filter(None, [os.environ.get('PYTHONWARNINGS'), IGNORED]))
    NotebookClient(nb, timeout=timeout, kernel_name='python3', extra_arguments=['--log-level=ERROR'],
                   resources={'metadata': {'path': str(folder)}}).execute(
                       env={**os.environ, 'PYTHONWARNINGS': warnings})


def keep(nb, folder):
    "Write `nb` as it is now, as a notebook and as HTML, and return where the HTML lies"
    nbformat.write(nb, folder/'lesson.ipynb')
    html = folder/'lesson.html'
    html.write_text(HTMLExporter().from_notebook_node(nb)[0], encoding='utf-8')
    return html


def picture(nb, folder):
    "Write the picture of the losses, and return where it lies; None if there is none"
    images = [o.data['image/png'] for c in nb.cells if 'plot_loss' in c.source for o in c.get('outputs', [])
              if 'image/png' in o.get('data', {})]
    if not images: return None
    path = folder/'losses.png'
    path.write_bytes(base64.b64decode(images[0]))
    return path


def measured(nb):
    "The dictionary that the lesson's last code cell shows"
    cell = [o for o in nb.cells if o.cell_type == 'code'][-1]
    result, = [o for o in cell.outputs if o.output_type == 'execute_result']
    return ast.literal_eval(result.data['text/plain'])


def main(folder=root/'build'/'demo', source=root/'nbs'/'lesson.ipynb', least=0.95):
    "The exit status: 0 if the lesson ran to its end and was accurate enough"
    folder.mkdir(parents=True, exist_ok=True)
    nb = nbformat.read(source, as_version=4)
    print(f'Running {source.name} in a Jupyter kernel ...', flush=True)
    try: execute(nb, folder)
    except CellExecutionError as e:
        print(f'The lesson failed with {e.ename}: {e.evalue}\nAs far as it came: {keep(nb, folder)}')
        return 1
    html, m = keep(nb, folder), measured(nb)
    print(f"accuracy {m['accuracy']:.4f} on the validation set, {m['workers']} workers ({m['device']}), "
          f"{m['seconds']} s with their start\nThe executed notebook, with its table and plots: {html}")
    if path := picture(nb, folder): print(f'The picture of its losses: {path}')
    if m['accuracy'] >= least: return 0
    print(f'This is less than the {least} that the lesson promises.')
    return 1


if __name__ == '__main__': sys.exit(main())
