"""Render docs/modules.md: each module, what it does, and the tests that name it.

    python tools/modules.py

The sentence is the `>` line of the module's notebook. A test that imports or names the module is listed, the one that
does so most often; every module is tested by its notebook as well.
"""
import json, re
from pathlib import Path

root = Path(__file__).resolve().parent.parent
HEAD = '''# Modules

Made by `make modules` from the notebooks. Each module is exported from the notebook of the same name and number, \
which is its first test; the last column is the file in [tests](../tests) that names it most often.
'''


def numbered(nbs=root/'nbs'):
    "The numbered notebooks, in reading order"
    return sorted(nbs.glob('**/[0-9]*_*.ipynb'), key=lambda o: int(o.name.split('_')[0]))


def sentence(path):
    "The `>` line of a notebook"
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    lines = [o for c in cells if c['cell_type'] == 'markdown' for o in ''.join(c['source']).split('\n')]
    return next((o[2:] for o in lines if o.startswith('> ')), '')


def mentions(text, folder, name):
    "How often `text` names the module"
    dotted = re.escape(f'{folder}.{name}' if folder else name)
    found = len(re.findall(rf'fastddp\.{dotted}\b|`{dotted.replace(chr(92)+".", "/")}`', text))
    package = re.escape(f'fastddp.{folder}' if folder else 'fastddp')
    return found + len(re.findall(rf'from {package} import [^\n]*\b{name}\b', text))


def test_of(folder, name, tests):
    "The test file that names the module most often, '' if none does"
    counts = {path: mentions(text, folder, name) for path, text in tests.items()}
    best = max(counts, key=counts.get)
    return best if counts[best] else ''


def render():
    tests = {o.relative_to(root/'tests').as_posix(): o.read_text(encoding='utf-8')
             for o in sorted((root/'tests').rglob('test_*.py'))}
    parts, last = [HEAD], None
    for path in numbered():
        folder = path.relative_to(root/'nbs').parent.as_posix().strip('.')
        name = path.stem.partition('_')[2]
        if folder != last: parts.append(f'\n## {folder or "front doors"}\n\n| module | | test |\n|---|---|---|\n')
        last = folder
        page = f'[{name}](../{path.relative_to(root).as_posix()})'
        parts.append(f'| {page} | {sentence(path)} | {test_of(folder, name, tests)} |\n')
    return ''.join(parts)


if __name__ == '__main__': (root/'docs'/'modules.md').write_text(render(), encoding='utf-8')
