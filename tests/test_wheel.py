"""The wheel has all modules, and works where nothing else of the tree is: imported and run from an empty folder."""
import os, re, shutil, site, subprocess, sys, tarfile, zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent


def setuptools_version():
    try: return tuple(int(o) for o in version('setuptools').split('.')[:1])
    except PackageNotFoundError: return (0,)


pytestmark = [pytest.mark.full,
              pytest.mark.skipif(setuptools_version() < (77,), reason='setuptools 77 or newer is not installed')]
MODULES = sorted(o.relative_to(root).as_posix() for o in (root/'fastddp').rglob('*.py'))
FOR_EDITORS = ['fastddp/all.pyi', 'fastddp/py.typed']


def done(*cmd, cwd, **env):
    "What a command in `cwd` says, without anything of the tree on Python's path"
    env = {**{k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}, **env}
    r = subprocess.run([sys.executable, *map(str, cmd)], cwd=cwd, env=env, capture_output=True, text=True, timeout=250)
    assert r.returncode == 0, r.stdout[-3000:]+r.stderr[-3000:]
    return r.stdout


def pip(*args, cwd): return done('-m', 'pip', '--disable-pip-version-check', *args, cwd=cwd)


DOCS = 'README.md', 'LICENSE', 'CHANGELOG.md', 'CITATION.cff', 'SECURITY.md'


def copy_of_tree(tree):
    tree.mkdir(exist_ok=True)
    for o in 'settings.ini', 'pyproject.toml', 'setup.py', 'MANIFEST.in', 'Makefile', *DOCS: shutil.copy(root/o, tree)
    shutil.copytree(root/'fastddp', tree/'fastddp', ignore=shutil.ignore_patterns('__pycache__'))
    return tree


def built(tree):
    "The wheel of `tree`, built without a network"
    pip('wheel', '--no-deps', '--no-build-isolation', '--no-index', '--wheel-dir', tree/'dist', tree, cwd=tree)
    [path] = (tree/'dist').glob('*.whl')
    return path


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "Built from a copy of the tree: a build leaves things beside `setup.py`"
    return built(copy_of_tree(tmp_path_factory.mktemp('tree')))


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    "A folder with the wheel's content, and nothing else"
    folder = tmp_path_factory.mktemp('installed')
    pip('install', '--no-deps', '--no-index', '--target', folder, wheel, cwd=folder)
    return folder


def metadata(wheel):
    with zipfile.ZipFile(wheel) as z: return z.read(next(o for o in z.namelist() if o.endswith('/METADATA'))).decode()


def dead_ends(text): return [o for o in re.findall(r'\]\(([^)\s]+)\)', text) if not re.match(r'[a-z]+:|#', o)]


def test_the_readme_has_no_links_into_nowhere(wheel):
    assert dead_ends((root/'README.md').read_text(encoding='utf-8')) and dead_ends(metadata(wheel)) == []


def test_an_address_gives_urls_and_links(tmp_path):
    tree = copy_of_tree(tmp_path/'tree')
    settings = (tree/'settings.ini').read_text(encoding='utf-8')
    (tree/'settings.ini').write_text(re.sub('(?m)^git_url =.*$', 'git_url = https://example.org/a/b', settings))
    said = metadata(built(tree))
    assert 'Project-URL: Source, https://example.org/a/b' in said
    assert 'https://example.org/a/b/blob/main/LICENSE' in said
    assert 'https://example.org/a/b/raw/main/docs/lesson.png' in said and dead_ends(said) == []


def test_all_modules_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as z: names = [o for o in z.namelist() if '.dist-info/' not in o]
    assert sorted(names) == sorted(MODULES+FOR_EDITORS)


def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    "It has what setup.py reads"
    tree = copy_of_tree(tmp_path/'tree')
    done('-c', f'from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})', cwd=tree)
    [sdist] = tmp_path.glob('*.tar.gz')
    with tarfile.open(sdist) as t: t.extractall(tmp_path/'out')
    [unpacked] = (tmp_path/'out').iterdir()
    assert metadata(built(unpacked)) == metadata(wheel)
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(next((unpacked/'dist').glob('*.whl'))) as b:
        assert sorted(a.namelist()) == sorted(b.namelist())
    pytest.importorskip('twine', reason='twine is not installed')
    assert done('-m', 'twine', 'check', '--strict', sdist, wheel, cwd=tmp_path).count('PASSED') == 2


def install_lines(path):
    "The lines of the first block of shell commands of `path` that install"
    block = re.search(r'```sh\n(.*?)```', (root/path).read_text(encoding='utf-8'), re.S)[1]
    return [o.split('  #')[0] for o in block.split('\n') if 'pip install' in o]


@pytest.fixture
def empty(tmp_path):
    """A new environment that has torch and fastai from this one's folder, and no fastddp; runs a line of a shell there.
    Nothing is downloaded"""
    folder, tree = tmp_path/'env', copy_of_tree(tmp_path/'tree')
    done('-m', 'venv', folder, cwd=tmp_path)
    [packages] = folder.glob('lib/python*/site-packages')
    for o in packages.glob('setuptools*'): shutil.rmtree(o)     # an old one, before Python 3.12
    # .pth files of that folder are not read, so an editable fastddp there is not found
    (packages/'others.pth').write_text('\n'.join(site.getsitepackages()))
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'PYTHONHOME')}
    env |= dict(PATH=f"{folder/'bin'}:{env['PATH']}", PIP_NO_INDEX='1', PIP_NO_BUILD_ISOLATION='0',
                PIP_DISABLE_PIP_VERSION_CHECK='1', PIP_FIND_LINKS='')
    def run(line):
        r = subprocess.run(['sh', '-ec', line], cwd=tree, env=env, capture_output=True, text=True, timeout=250)
        assert r.returncode == 0, r.stdout[-3000:]+r.stderr[-3000:]
        return r.stdout
    return run


WHICH = ("python -W ignore -c \"import torch, fastai; print(torch.__file__, torch.__version__, fastai.__file__, "
         "fastai.__version__)\"")
TRAINS = "cd / && python -W ignore -c \"import fastddp; print(fastddp.__file__); from fastddp.ranch import ranch; " \
         "print(ranch(2, len, 'abc', caller_rank=None))\""


@pytest.mark.parametrize('line', [*install_lines('README.md'), 'make wheel && mkdir -p input/mine && mv dist/*.whl '
                                  'input/mine && pip install -q input/*/fastddp-*.whl'])
def test_the_lines_that_install(empty, line):
    "As the README and the page on Kaggle have them: torch and fastai stay what they are"
    before = empty(WHICH)
    empty(line)
    assert empty(WHICH) == before
    path, results = empty(TRAINS).splitlines()
    assert '/env/lib/' in path and results == '[3, 3]'


# Python's path begins with the folder of the wheel; an editable install adds a finder of its own, which would help out
# where the
# wheel has gaps.
ALONE = """
import sys
sys.meta_path[:] = [o for o in sys.meta_path if 'editable' not in getattr(o, '__module__', '')]
FOLDER = {folder!r}
def strangers():
    return [m.__name__ for k, m in list(sys.modules.items()) if k.split('.')[0] == 'fastddp'
            and not (m.__file__ or '').startswith(FOLDER)]
"""
IMPORTS = """
import fastddp, importlib
for o in {modules!r}: importlib.import_module(o)
assert fastddp.__file__.startswith(FOLDER), fastddp.__file__
loaded = [k for k in sys.modules if k.split('.')[0] == 'fastddp']
print(len(loaded), strangers())
"""


def alone(code, folder, elsewhere):
    "Runs `code` as a script in the folder `elsewhere`"
    (elsewhere/'script.py').write_text(ALONE.format(folder=str(folder)) + code, encoding='utf-8')
    return done('-W', 'ignore', 'script.py', cwd=elsewhere, PYTHONPATH=str(folder))


def dotted(path): return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def test_everything_can_be_imported_from_elsewhere(installed, tmp_path):
    "The front doors and all that is behind them; fastai v1's modules import where that is installed"
    modules = [dotted(o) for o in MODULES if not o.startswith('fastddp/fastai1/')]
    assert {'fastddp', 'fastddp.all', 'fastddp.ranch', 'fastddp.magics'} < {*modules}
    said = alone(IMPORTS.format(modules=modules), installed, tmp_path)
    assert said == f'{len(modules)} []\n'


RUNS = """
from fastddp.ranch import ranch
def where():
    import fastddp, os
    return os.environ['LOCAL_RANK'], fastddp.__file__, strangers()
for rank, path, others in ranch(2, where, caller_rank=None): print('ranch', rank, path.startswith(FOLDER), others)
"""
FITS = """
from fastai.basics import *
from fastddp.all import *
class Where(Callback):
    def after_fit(self): self.told = fastddp.__file__.startswith(FOLDER), strangers()
import fastddp
items = [(torch.randn(3), torch.randn(1)) for _ in range(16)]
dls = DataLoaders.from_dsets(items, items, bs=4, device='cpu')
learn = Learner(dls, nn.Linear(3, 1), loss_func=MSELossFlat(), cbs=Where())
with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, nprocs=2)
print('fit', len(learn.recorder.values), *learn.where.told)
"""


def test_workers_run_from_there(installed, tmp_path):
    "`ranch`, and a fit: notebook and workers know only the folder"
    lines = alone(RUNS+FITS, installed, tmp_path).splitlines()
    assert [o for o in lines if o.startswith('ranch')] == ['ranch 0 True []', 'ranch 1 True []']
    assert lines[-1] == 'fit 1 True []'


def test_a_gap_is_noticed(installed, tmp_path):
    "A module that the folder doesn't have comes from nowhere else, neither from the tree nor by an editable install"
    folder = tmp_path/'gap'
    shutil.copytree(installed, folder)
    (folder/'fastddp'/'ranch.py').unlink()
    with pytest.raises(AssertionError, match="No module named 'fastddp.ranch'"):
        alone('import fastddp.ranch', folder, tmp_path)
