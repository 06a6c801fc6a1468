"""Write nbs/sidebar.yml, the order of the site: the reading order, which is that of the notebooks' numbers.

nbdev's own sidebar sorts folders by name; `custom_sidebar = true` in pyproject.toml leaves ours alone.
"""
import re
from pathlib import Path

root = Path(__file__).resolve().parent.parent
DOORS = 'front doors'               # the numbered notebooks that lie in no folder
TUTORIALS = ('lesson', 'vision', 'text', 'tabular', 'time_series', 'transformers', 'large_model', 'collab',
             'segmentation', 'night', 'ranch', 'dip', 'ddp_from_scratch', 'kaggle', 'two_machines', 'worth_it')
PAGES = ('troubles', 'security')
HEAD = '''\
# Made by `make sidebar` from the numbers of the notebooks
website:
  sidebar:
    contents:
      - index.ipynb
'''


def number(path):
    "The number that a notebook's name begins with, None if it has none"
    found = re.match(r'(\d+)_', path.name)
    return int(found[1]) if found else None


def folders(nbs=root/'nbs'):
    "Folder -> its numbered notebooks, from the ground up: paths within `nbs`, in reading order"
    numbered = sorted((o.relative_to(nbs) for o in nbs.glob('**/*.ipynb') if number(o) is not None), key=number)
    found = {}
    for o in numbered: found.setdefault(DOORS if o.parent == Path() else o.parent.as_posix(), []).append(o)
    return found


def listed_first(paths, names):
    "`paths` in the order of `names`; who isn't named comes last, by name"
    place = {o: i for i, o in enumerate(names)}
    return sorted(paths, key=lambda o: (place.get(o.stem, len(place)), o.stem))


def sections(nbs=root/'nbs'):
    "Title -> notebooks of everything below the index, in reading order"
    rest = [o.relative_to(nbs) for o in nbs.glob('**/*.ipynb') if number(o) is None and o.stem != 'index']
    v1 = [o for o in rest if o.parent == Path('tutorials/v1')]
    tutorials = [o for o in rest if o.parent == Path('tutorials') or o.stem in TUTORIALS and o not in v1]
    pages = [o for o in rest if o not in v1 + tutorials]
    return {**folders(nbs), 'tutorials': listed_first(tutorials, TUTORIALS),
            'tutorials for fastai v1': listed_first(v1, TUTORIALS), 'pages': listed_first(pages, PAGES)}


def render(nbs=root/'nbs'):
    "The sidebar's YAML"
    lines = []
    for title, paths in sections(nbs).items():
        lines += [f'      - section: {title}', '        contents:', *(f'          - {o.as_posix()}' for o in paths)]
    return HEAD + '\n'.join(lines) + '\n'


if __name__ == '__main__': (root/'nbs'/'sidebar.yml').write_text(render(), encoding='utf-8')
