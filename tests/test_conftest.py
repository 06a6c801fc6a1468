"""The watch over every test is awake: each thing left behind fails the test that left it, and only that."""
import mmap, shutil, subprocess, sys, time
from pathlib import Path
import pytest

LEAKS = {
    'processes': "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    'files': "import tempfile; tempfile.mkdtemp(prefix='fastddp-')",
    'memory': "import os; os.memfd_create('fastddp')",
    'environment': "import os; os.environ['RANK'] = '1'",
    'signal handlers': "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"}


def copy_conftest(folder):
    "With little patience: what leaks here leaks on purpose"
    for o in 'conftest.py', 'spread.py': shutil.copy(Path(__file__).with_name(o), folder)
    traces = Path(__file__).with_name('traces.py').read_text(encoding='utf-8')
    assert 'GRACE = 15.' in traces
    (folder/'traces.py').write_text(traces.replace('GRACE = 15.', 'GRACE = 1.'), encoding='utf-8')


@pytest.mark.full
def test_leaks_are_noticed(tmp_path):
    copy_conftest(tmp_path)
    tests = [f'def test_{i}():\n    {leak}\n\ndef test_after_{i}(): pass\n' for i, leak in enumerate(LEAKS.values())]
    (tmp_path/'test_it.py').write_text('\n'.join(tests))
    r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(tmp_path)], cwd=tmp_path,
                       capture_output=True, text=True, timeout=200)
    assert r.returncode == 1
    for i, what in enumerate(LEAKS):
        assert f"ERROR test_it.py::test_{i} - AssertionError: left behind: {{'{what}'" in r.stdout, r.stdout
    assert f'{2*len(LEAKS)} passed, {len(LEAKS)} errors' in r.stdout, r.stdout


@pytest.mark.full
def test_helper_process_may_stay(tmp_path):
    "The fork server does, its workers don't"
    copy_conftest(tmp_path)
    (tmp_path/'test_it.py').write_text('''
import multiprocessing, os, time
ctx = multiprocessing.get_context('forkserver')
def test_done():
    p = ctx.Process(target=os.getpid); p.start(); p.join()
def test_running(): ctx.Process(target=time.sleep, args=(60,), daemon=True).start()
''')
    r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(tmp_path)], cwd=tmp_path,
                       capture_output=True, text=True, timeout=200)
    assert '2 passed, 1 error' in r.stdout and 'ERROR test_it.py::test_running' in r.stdout, r.stdout


@pytest.mark.full
def test_file_of_another_run_is_not_blamed(tmp_path):
    """Made in shared memory while a test runs: by this run, which is told so, and by a process that it didn't start,
    which is not"""
    copy_conftest(tmp_path)
    (tmp_path/'test_it.py').write_text('''
import sys, time
from pathlib import Path
def wait_for(path):
    end = time.monotonic()+30
    while not path.exists() and time.monotonic() < end: time.sleep(.02)
def test_others():
    Path('begun').touch()
    wait_for(Path('made'))
def test_ours(): Path('/dev/shm', f'fastddp-test-{Path.cwd().parent.name}-{Path.cwd().name}-ours').touch()
''')
    paths = [Path('/dev/shm', f'fastddp-test-{tmp_path.parent.name}-{tmp_path.name}-{o}') for o in ('others', 'ours')]
    r = subprocess.Popen([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '.'], cwd=tmp_path,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not (tmp_path/'begun').exists() and r.poll() is None: time.sleep(.02)
        with open(paths[0], 'wb+') as f:
            f.write(b'0'*mmap.PAGESIZE)
            f.flush()
            with mmap.mmap(f.fileno(), 0):
                (tmp_path/'made').touch()
                out = r.communicate(timeout=200)[0]
    finally:
        r.kill()
        for o in paths: o.unlink(missing_ok=True)
    assert '2 passed, 1 error' in out and 'ERROR test_it.py::test_ours' in out and 'ours' in out, out


def test_nothing_imports_conftest():
    "There are two of that name, and a worker imports by name: it would get either"
    tests = Path(__file__).parent
    guilty = [p.name for p in tests.rglob('*.py') for line in p.read_text(encoding='utf-8').splitlines()
              if line.startswith(('from conftest', 'import conftest'))]
    assert not guilty
