"""The watch over every test is awake: each thing left behind fails the test that left it, and only that."""
import shutil, subprocess, sys
from pathlib import Path
import pytest

LEAKS = {
    'processes': "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    'files': "import tempfile; tempfile.mkdtemp(prefix='fastddp-')",
    'memory': "import os; os.memfd_create('fastddp')",
    'environment': "import os; os.environ['RANK'] = '1'",
    'signal handlers': "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"}


@pytest.mark.parametrize('what', LEAKS)
def test_leak_is_noticed(what, tmp_path):
    shutil.copy(Path(__file__).with_name('conftest.py'), tmp_path)
    (tmp_path/'test_it.py').write_text(f'def test_leaks():\n    {LEAKS[what]}\n\ndef test_after_it(): pass\n')
    r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(tmp_path)], cwd=tmp_path,
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 1 and f"left behind: {{'{what}'" in r.stdout, r.stdout
    assert '2 passed, 1 error' in r.stdout


def test_helper_process_may_stay(tmp_path):
    "The fork server does, its workers don't"
    shutil.copy(Path(__file__).with_name('conftest.py'), tmp_path)
    (tmp_path/'test_it.py').write_text('''
import multiprocess, os, time
ctx = multiprocess.get_context('forkserver')
def test_done():
    p = ctx.Process(target=os.getpid); p.start(); p.join()
def test_running(): ctx.Process(target=time.sleep, args=(60,), daemon=True).start()
''')
    r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(tmp_path)], cwd=tmp_path,
                       capture_output=True, text=True, timeout=60)
    assert '2 passed, 1 error' in r.stdout and 'ERROR test_it.py::test_running' in r.stdout, r.stdout
