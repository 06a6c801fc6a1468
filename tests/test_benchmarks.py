"""The benchmarks can be imported, and the tables on the pages are those of the results."""
import ast, importlib, re, runpy, shutil, subprocess, sys
from pathlib import Path
import pytest
import fastddp.all
from ray_cluster import skip_without_ray
from two_hosts import net

root = Path(__file__).resolve().parent.parent
BENCHES = root/'benchmarks'


@pytest.mark.full
def test_scripts_import():
    names = sorted(p.stem for p in BENCHES.glob('*.py'))
    assert {'background', 'launch', 'shapes', 'memory', 'sync', 'inference', 'machines', 'model', 'peers'} <= {*names}
    r = subprocess.run([sys.executable, '-W', 'ignore', '-c', f'import {", ".join(names)}'], cwd=BENCHES,
                       capture_output=True, text=True, timeout=120)
    assert (r.returncode, r.stdout) == (0, ''), r.stderr


@pytest.mark.parametrize('path', sorted(BENCHES.rglob('*.py')), ids=lambda o: o.stem)
def test_what_they_import_of_the_package_is_there(path):
    for o in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if not (isinstance(o, ast.ImportFrom) and (o.module or '').startswith('fastddp')): continue
        module = importlib.import_module(o.module)
        for name in {a.name for a in o.names} - {'*'}:
            assert hasattr(module, name) or importlib.util.find_spec(f'{o.module}.{name}'), (o.module, name)


@pytest.mark.full
@skip_without_ray
def test_two_hosts(net):
    "All parts of `machines.py` with little data, which each machine gets once, whatever runs there"
    r = subprocess.run([sys.executable, BENCHES/'machines.py', '--small'], capture_output=True, text=True, timeout=280)
    assert r.returncode == 0, r.stderr[-3000:]
    received = re.search(r'32 MB, first fit +(\S+)', r.stdout)
    assert 1 < float(received[1]) < 1.05, r.stdout
    for o in 'two hosts', 'script', 'as it is', '64 machines, 400 Gbit/s', 'Assumed': assert o in r.stdout


def page(folder): return (folder/'benchmarks'/'README.md').read_text(encoding='utf-8')


def test_tables_are_those_of_the_results(tmp_path):
    shutil.copytree(BENCHES, tmp_path/'benchmarks', ignore=shutil.ignore_patterns('__pycache__'))
    run = [sys.executable, str(tmp_path/'benchmarks'/'render.py')]
    subprocess.run(run, check=True, timeout=60)
    assert page(tmp_path) == page(root), 'python benchmarks/render.py'
    shutil.rmtree(tmp_path/'benchmarks'/'results')      # without results the tables say so
    subprocess.run(run, check=True, timeout=60)
    assert page(tmp_path) != page(root) and 'not measured' in page(tmp_path)


def test_a_figure_is_found_or_called_missing():
    render = runpy.run_path(str(BENCHES/'render.py'))
    results = dict(launch=dict(rows=[dict(case='a', median=.1234)]))
    assert render['said'](results, ('launch', 'rows', 'a', 'median'), 's') == '0.123 s'
    assert render['said'](results, ('launch', 'rows', 'b', 'median'), 's') == 'not measured'
