"""Make docs/lesson.png, the README's picture: the lesson's training cell and its losses, executed, in a browser.

Needs what tests/test_browser.py needs: Debian's chromium.
"""
import shutil, subprocess, sys, tempfile
from pathlib import Path
import nbformat
from nbconvert import HTMLExporter
from PIL import Image, ImageChops

root = Path(__file__).resolve().parent.parent
SHOWN = 'distrib_fit_one_cycle', 'plot_loss'


def part(nb):
    "The notebook's cells that train and draw, as HTML"
    shown = [c for c in nb.cells if c.cell_type == 'code' and any(o in c.source for o in SHOWN)]
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    return exporter.from_notebook_node(nbformat.v4.new_notebook(cells=shown, metadata=nb.metadata))[0]


def cropped(path, margin=16):
    "The picture at `path` without its empty margins"
    im = Image.open(path).convert('RGB')
    left, top, right, bottom = ImageChops.difference(im, Image.new('RGB', im.size, im.getpixel((2, 2)))).getbbox()
    return im.crop((max(left-margin, 0), max(top-margin, 0), right+margin, bottom+margin))


def main(source=root/'build'/'demo'/'lesson.ipynb', target=root/'docs'/'lesson.png'):
    browser = shutil.which('chromium') or sys.exit('chromium not found: apt-get install chromium')
    with tempfile.TemporaryDirectory() as d:
        page, shot = Path(d)/'lesson.html', Path(d)/'lesson.png'
        page.write_text(part(nbformat.read(source, as_version=4)), encoding='utf-8')
        subprocess.run([browser, '--headless=new', '--no-sandbox', '--disable-gpu', '--hide-scrollbars',
                        '--window-size=860,1400', f'--user-data-dir={d}/profile', f'--screenshot={shot}',
                        page.as_uri()], check=True, capture_output=True, timeout=120)
        cropped(shot).save(target, optimize=True)
    print(f'The lesson as one sees it: {target}')


if __name__ == '__main__': main()
