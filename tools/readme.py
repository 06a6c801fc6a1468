"""Render nbs/index.ipynb as README.md: text as it is, code in fences, hidden cells left out.

nbdev's own `nbdev-readme` does more, and needs quarto for it.
"""
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
head = '<!-- Rendered from nbs/index.ipynb by `make readme`: edit that. -->\n\n'


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


def render(path=root/'nbs'/'index.ipynb'):
    "The README that the notebook at `path` stands for"
    cells = json.loads(Path(path).read_text(encoding='utf-8'))['cells']
    # links in the notebook are seen from nbs/, in the README from the root
    return head + '\n\n'.join(filter(None, map(block, cells))).replace('](../', '](') + '\n'


if __name__ == '__main__': (root/'README.md').write_text(render(), encoding='utf-8')
