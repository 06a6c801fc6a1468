"""The repository around the code: links, licence, the two commands and what they say where something is missing."""
import json, os, re, runpy, shutil, subprocess, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
TEXTS = [*root.glob('*.md'), *root.glob('nbs/**/*.md'), *root.glob('docs/**/*.md'), *root.glob('benchmarks/*.md')]


def broken_links(text, folder):
    "Relative link targets of Markdown `text` that lead nowhere from `folder`"
    text = re.sub(r'```.*?```', '', text, flags=re.S)
    links = re.findall(r'\]\(([^)\s]+)\)', text)
    return [o for o in links if not re.match(r'[a-z]+:|#', o) and not (folder/o.split('#')[0]).exists()]


@pytest.mark.parametrize('path', TEXTS, ids=lambda o: o.relative_to(root).as_posix())
def test_relative_links_lead_somewhere(path): assert broken_links(path.read_text(encoding='utf-8'), path.parent) == []


def test_a_broken_link_is_noticed():
    text = '[a](Makefile) [b](https://x.y) [c](nowhere.md) [d](#part) [e](LICENSE#top) ```[f](code.md)```'
    assert broken_links(text, root) == ['nowhere.md']


CONTRIBUTING = (root/'CONTRIBUTING.md').read_text(encoding='utf-8')


def modules():
    "Folder -> the modules that are there, in the order of their notebooks' numbers"
    found = {}
    for o in sorted((root/'nbs').glob('**/[0-9]*_*.ipynb'), key=lambda o: int(o.name.split('_')[0])):
        found.setdefault('' if o.parent == root/'nbs' else o.parent.name, []).append(o.stem.partition('_')[2])
    return found


def test_contributing_names_each_folder():
    rows = re.findall(r'^\| (front doors|`.*?`) \|', CONTRIBUTING.partition('## The house')[2], re.M)
    named = {o for row in rows for o in re.findall(r'`(\w+)`', row)}
    assert {*modules()} - {''} <= named and any(o == 'front doors' for o in rows)


def test_each_module_has_a_test_file():
    tool = runpy.run_path(str(root/'tools'/'modules.py'))
    assert [o for o in tool['TESTS'].values() if not (root/'tests'/o).exists()] == []
    listed = re.findall(r'\]\(\.\./nbs/([\w/]+)\.ipynb\)', tool['render']())
    there = {f'{folder}/{name}'.strip('/') for folder, names in modules().items() for name in names}
    assert {re.sub(r'\d{3}_', '', o) for o in listed} == there and len(listed) == len(there)


DOCS = [o.relative_to(root).as_posix() for o in root.glob('docs/**/*.md')]


@pytest.mark.parametrize('path', ['CONTRIBUTING.md', 'README.md', *DOCS])
def test_modules_that_are_named_exist(path):
    text = (root/path).read_text(encoding='utf-8')
    folder = '|'.join(filter(None, modules()))
    named = re.findall(rf"`(?:fastddp[./])?((?:{folder})[./]\w+)(?:\.py|\.[A-Z]\w*)?`", text)
    assert [o for o in named if not (root/'fastddp'/(o.replace('.', '/')+'.py')).exists()] == []
    assert [o for o in re.findall(r'nbs/[\w/]+\.ipynb', text) if not (root/o).exists()] == []


def files_to_read():
    "What is to be changed -> the files that CONTRIBUTING says to read before it, and the number of their lines"
    text = CONTRIBUTING.partition('## What to read before a change')[2].partition('\n## ')[0]
    found = {}
    for head, n, lines, rest in re.findall(r'### (.*?) \((\d) files, ([\d,]+) lines\)\n(.*?)\nLook at', text, re.S):
        found[head] = re.findall(r'^\d\. `(\w+/\w+)`', rest, re.M), lines
        assert len(found[head][0]) == int(n), head
    for change, files, lines in re.findall(r'^\| (.*?) \| (.*?) \| ([\d,]+) \|', text, re.M):
        found[change] = re.findall(r'`(\w+/\w+)`', files), lines
    return {k: (files, int(lines.replace(',', ''))) for k, (files, lines) in found.items()}


def test_changes_have_files_to_read(): assert len(files_to_read()) == 11


@pytest.mark.parametrize('change', files_to_read())
def test_what_to_read_before_a_change_has_about_as_many_lines_as_it_says(change):
    "Within a fifth: if the code is further from it than that, the way is to be walked again"
    files, said = files_to_read()[change]
    lines = sum(len((root/'fastddp'/f'{o}.py').read_text(encoding='utf-8').split('\n')) for o in files)
    assert files and .8*said < lines < 1.2*said, f'{lines} lines'


def test_licence():
    text = (root/'LICENSE').read_text(encoding='utf-8')
    assert 'Apache License' in text and 'Version 2.0, January 2004' in text and 'fastddp contributors' in text


def test_changelog_starts_with_what_is_in_development():
    headings = re.findall(r'^## (.*)$', (root/'CHANGELOG.md').read_text(encoding='utf-8'), re.M)
    assert 'in development' in headings[0]


def test_ci_runs_what_the_readme_says():
    script = root/'.ci'/'run'
    lines = [l for l in script.read_text().split('\n') if l and not l.startswith('#')]
    assert os.access(script, os.X_OK)
    assert lines[:2] == ['set -eu', 'cd "$(dirname "$0")/.."'] and lines[-1] == 'exec make test-v1'
    assert [l for l in lines if l.startswith('make') and not l.endswith('&')] == ['make venv', 'make test']


IMPORTS = r'^(?:from fastai[\w.]* import \*\n)+from fastddp\.all import \*$'      # the other way round than advised


@pytest.mark.parametrize('path', [*TEXTS, *root.glob('nbs/*.ipynb'), *root.glob('nbs/tutorials/**/*.ipynb')],
                         ids=lambda o: o.relative_to(root).as_posix())
def test_examples_import_fastddp_first(path):
    "As docs/guide.md advises: the helper then imports fastai while the notebook does"
    text = path.read_text(encoding='utf-8')
    parts = [''.join(o['source']) for o in json.loads(text)['cells']] if path.suffix == '.ipynb' else [text]
    assert [o for o in parts if re.search(IMPORTS, o, re.M) and '#| hide' not in o] == []


def test_the_workflow_is_make():
    "A service runs what anyone can run: only targets that exist"
    text = (root/'.github'/'workflows'/'test.yml').read_text(encoding='utf-8')
    targets = re.findall(r'^ *- run: (.*)$', text, re.M)
    there = {f'make {o}' for o in re.findall(r'^([\w-]+):', (root/'Makefile').read_text(encoding='utf-8'), re.M)}
    assert targets and {*targets} <= there and 'make test' in targets


# What make says: a fake interpreter in front of the real one, in a tree where nothing is installed yet.

needs_make = pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')


@pytest.fixture
def tree(tmp_path):
    for o in 'Makefile', 'settings.ini', 'setup.py', 'pyproject.toml': shutil.copy(root/o, tmp_path)
    shutil.copytree(root/'tools', tmp_path/'tools')
    return tmp_path


def fake_python(tree, patch):
    "An interpreter that runs `patch` before the script it is given"
    (tree/'fake.py').write_text(f'import sys, runpy\n{patch}\nsys.argv = sys.argv[1:]\n'
                                'runpy.run_path(sys.argv[0], run_name="__main__")\n')
    python = tree/'fakepython'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tree}/fake.py "$@"\n')
    python.chmod(0o755)
    return python


def make(tree, *args, **env):
    env = {**{k: v for k, v in os.environ.items() if not k.startswith(('MAKE', 'PYTHON', 'VENV'))}, **env}
    r = subprocess.run([shutil.which('make'), *args], cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    return r.returncode, r.stdout.splitlines() + r.stderr.splitlines()


def one_line(tree, *args, **env):
    "What `make` stops with: it must be a single line"
    code, lines = make(tree, 'demo', *args, **env)
    assert code == 2 and len(lines) == 1, lines
    assert not (tree/'.venv').exists() or (tree/'.venv'/'bin').exists()
    return lines[0]


MISSING = {
    'sys.version_info = (3, 9, 18, "final", 0)': 'Python 3.10 or newer is needed',
    'sys.modules["ensurepip"] = None': 'apt-get install python3-venv',
    'import shutil; shutil.disk_usage = lambda p: shutil._ntuple_diskusage(9e9, 7e9, 2*2**30)': '2.0 GB are free'}


@needs_make
@pytest.mark.parametrize('patch', MISSING)
def test_one_line_where_something_is_missing(tree, patch):
    assert MISSING[patch] in one_line(tree, f'PYTHON={fake_python(tree, patch)}')


@needs_make
def test_one_line_without_any_python(tree):
    "PATH leads only to a shell"
    (tree/'bin').mkdir()
    for o in 'sh', 'cat': (tree/'bin'/o).symlink_to(shutil.which(o))
    assert 'python3 not found' in one_line(tree, PATH=str(tree/'bin'))


@needs_make
def test_python_is_respected_for_an_environment_that_exists(tree):
    "The environment is another version's: say so. Without PYTHON= it is used as it is"
    (tree/'.venv'/'bin').mkdir(parents=True)
    (tree/'.venv'/'bin'/'python').symlink_to(sys.executable)
    other = fake_python(tree, 'sys.version_info = (3, 99, 0, "final", 0)')
    assert 'PYTHON is 3.99' in one_line(tree, f'PYTHON={other}')
    assert 'PYTHON is 3.99' in one_line(tree, PYTHON=str(other))
    (tree/'.venv'/'.installed').write_text(f'{tree}\n')
    assert make(tree, 'venv')[0] == 0


@needs_make
def test_installs_once(tree):
    "A stamp says what is installed and where; new settings or another folder mean installing again"
    (tree/'.venv'/'bin').mkdir(parents=True)
    python = tree/'.venv'/'bin'/'python'
    python.write_text('#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" >> pip.log; elif [ "$1" = -c ]; then echo '
                      f'{sys.version_info[0]}.{sys.version_info[1]}; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    def installs():
        code, lines = make(tree, 'venv')
        assert code == 0, lines
        return len((tree/'pip.log').read_text().splitlines())
    assert [installs(), installs()] == [1, 1]
    os.utime(tree/'.venv'/'.installed', (1, 1))   # settings.ini is newer
    assert [installs(), installs()] == [2, 2]
    (tree/'.venv'/'.installed').write_text('/somewhere/else\n')
    assert installs() == 3
    assert '.[dev]' in (tree/'pip.log').read_text() and 'torchvision fastai' in (tree/'pip.log').read_text()
