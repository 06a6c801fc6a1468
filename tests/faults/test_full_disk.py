"""A full temporary folder: what fails because of it names it, whether the system refuses a write or kills a process."""
import os, shutil, subprocess, sys, tempfile
from pathlib import Path
import pytest

HERE = Path(__file__).resolve().parent.parent
MOUNT = '''
mount -t tmpfs -o size=1m tmpfs "$1" || exit 77
export TMPDIR="$1"
shift
exec "$@"
'''
FULL = '''
import mmap, os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.base.errors import CantDistribute
from learners import make_learner
temp = Path(os.environ['TMPDIR'])

def fill():
    fd = os.open(temp/'all', os.O_WRONLY|os.O_CREAT)
    try:
        while True: os.write(fd, bytes(4096))
    except OSError: os.close(fd)

class Maps(Callback):
    "Writes into a file that has no room"
    def before_batch(self):
        if os.environ['RANK'] != '1': return
        fill()
        with open(temp/'hole', 'wb') as f: f.truncate(8192)
        with open(temp/'hole', 'r+b') as f: mmap.mmap(f.fileno(), 8192)[:5] = b'bytes'

def told(what, learn):
    try: learn.fit(1) if 'distrib_session' in vars(learn) else learn.distrib_fit(1, nprocs=2)
    except WorkerError as e: print(f'\\n{{what}}: {{e._headline()}} | {{e.remedy}}')
    except CantDistribute as e: print(f'\\n{{what}}: {{e}}')
    (temp/'all').unlink(missing_ok=True)
    (temp/'hole').unlink(missing_ok=True)

if __name__ == '__main__':
    told('killed', make_learner(n=64, cbs=[Maps()]))
    fill()
    told('before', make_learner(n=64))
    learn = make_learner(n=64)
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        fill()
        told('in a block', learn)
        learn.fit(1)
    print('trained', len(learn.recorder.values))
'''


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which('unshare'), reason='needs root and unshare, to mount')
def test_the_folder_is_named(tmp_path):
    "And when there is room again all goes on"
    folder, script = Path(tempfile.mkdtemp(prefix='t')), tmp_path/'full.py'     # a short path, for sockets
    script.write_text(FULL.format(here=str(HERE)), encoding='utf-8')
    argv = ['unshare', '-m', 'sh', '-c', MOUNT, 'sh', str(folder), sys.executable, '-W', 'ignore', str(script)]
    r = subprocess.run(argv, timeout=200, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder.rmdir()
    if r.returncode == 77: pytest.skip('mounting is not allowed here')
    said = {k: v for k, _, v in (o.partition(': ') for o in r.stdout.splitlines())}
    assert 'killed by SIGBUS' in said['killed'], r.stdout
    assert 'No space left on device' in said['before'], r.stdout
    # a second fit of a block may need no room
    for o in ('killed', 'before', 'in a block'): assert 'TMPDIR' in said.get(o, 'TMPDIR'), r.stdout
    assert 'trained 1' in r.stdout, r.stdout
