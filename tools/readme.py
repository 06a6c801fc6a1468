"""Render nbs/index.ipynb as README.md: text as it is, code in fences, hidden cells left out, measured speed filled in.

nbdev's own `nbdev-readme` does more, and needs quarto for it.
"""
import json, runpy
from pathlib import Path

root = Path(__file__).resolve().parent.parent
head = '<!-- Rendered from nbs/index.ipynb by `make readme`: edit that. -->\n\n'
mark = '<!-- speed: rendered by tools/readme.py -->'


def directives(lines):
    "The `#|` words at the top of a cell, and the lines below them"
    n = next((i for i, o in enumerate(lines) if not o.startswith('#|')), len(lines))
    return {o[2:].split(':')[0].strip() for o in lines[:n]}, lines[n:]


def block(cell):
    "One cell as Markdown, empty if it is hidden"
    flags, lines = directives(''.join(cell['source']).strip().split('\n'))
    text = '\n'.join(lines).strip()
    if not text or 'hide' in flags: return ''
    return f'```python\n{text}\n```' if cell['cell_type'] == 'code' else text


def speed(machine='cpu-2core'):
    "The table of measured speed, from the benchmarks' results on `machine`"
    render = runpy.run_path(str(root/'benchmarks'/'render.py'))
    results = render['read'](machine)
    def said(path, unit=''): return render['said'](results, path, unit)
    def ratio(model, name): return said(('throughput', model, 'ratios', name))
    start = [said(render['rows']('launch', o), 's') for o in ('first fit', 'torch spawn', 'second fit in a block')]
    lines = ['| on two CPU cores | fastddp | others |', '|---|---|---|',
             f"| from the call to the first training step | {start[0]} | torch's `spawn`: {start[1]} |",
             f'| a second fit in a block, all but training | {start[2]} | |']
    lines += [f"| items per second, two workers over one: {what} | {ratio(model, 'speed_up')} | a DDP script: "
              f"{ratio(model, 'speed_up_of_script')} |"
              for model, what in dict(convnet='a convnet', mlp='a tiny MLP').items()]
    about = results.get('throughput', {}).get('about', {})
    return '\n'.join(lines)+(f"\n\nMeasured with torch {about.get('torch')}, {about.get('date')}; "
                             '[the benchmarks](../benchmarks/README.md) have the rest.')


def render(path=root/'nbs'/'index.ipynb'):
    "The README that the notebook at `path` stands for"
    cells = json.loads(Path(path).read_text(encoding='utf-8'))['cells']
    text = '\n\n'.join(filter(None, map(block, cells))).replace(mark, speed())
    # links in the notebook are seen from nbs/, in the README from the root
    return head + text.replace('](../', '](') + '\n'


if __name__ == '__main__': (root/'README.md').write_text(render(), encoding='utf-8')
