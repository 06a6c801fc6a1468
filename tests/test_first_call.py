"""The first call in a kernel: it says at once what it waits for, the stop button ends it, and the next call is fine.

The helper's imports last until the test wants them to end, so no clock is asked."""
import json, os, textwrap
from pathlib import Path
import pytest
from jupyter_client.manager import KernelManager

HERE = Path(__file__).resolve().parent
IMPORTS = '''
import time
from pathlib import Path
end = time.monotonic()+200
while not Path({go!r}).exists() and time.monotonic() < end: time.sleep(.02)
'''
SETUP = '''
import os, sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, {here!r})
os.environ['PYTHONPATH'] = os.pathsep.join([{folder!r}, os.environ.get('PYTHONPATH', '')])
from fastddp.process import workers
workers.preload('imports_for_long')
from fastddp.all import *
from learners import make_learner
learn = make_learner()
'''
WHO = '''
import json, psutil
procs = psutil.Process().children(recursive=True)
print(json.dumps(dict(of_group=sum(os.getpgid(p.pid) == os.getpgrp() for p in procs), all=len(procs))))
'''


class Kernel:
    "A kernel that the test talks to, cell by cell"
    def __init__(self):
        self.km = KernelManager(kernel_name='python3')
        self.km.start_kernel(extra_arguments=['--HistoryManager.hist_file=:memory:', '--log-level=CRITICAL'])
        self.client = self.km.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
    def run(self, code, when_starting=lambda: None):
        "`(lines of stdout, states of the status line, error's name)`; calls `when_starting` when that line appears"
        out, status = [], []
        def hook(msg):
            kind, content = msg['msg_type'], msg['content']
            if kind == 'stream' and content['name'] == 'stdout': out.append(content['text'])
            if 'fastddp-status' not in str(content.get('transient')): return
            status.append(content['data']['text/plain'])
            if kind == 'display_data': when_starting()
        reply = self.client.execute_interactive(textwrap.dedent(code), timeout=240, output_hook=hook)
        return ''.join(out).splitlines(), status, reply['content'].get('ename')
    def close(self):
        self.client.stop_channels()
        self.km.shutdown_kernel(now=True)
        self.km.cleanup_resources()


@pytest.fixture
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.mark.timeout(500)
def test_stopped_while_the_helper_imports(kernel, tmp_path):
    go = tmp_path/'go'
    (tmp_path/'imports_for_long.py').write_text(IMPORTS.format(go=str(go)))
    assert kernel.run(SETUP.format(here=str(HERE), folder=str(tmp_path)))[2] is None
    said = 'starting 2 workers (first time in this kernel: importing torch and fastai) ...'
    for _ in range(2):
        _, status, error = kernel.run('learn.distrib_fit(1, nprocs=2)', kernel.km.interrupt_kernel)
        assert error == 'KeyboardInterrupt' and not go.exists()      # nobody waited for the helper
        assert status[0] == said and status[-1] == '' and all(o.startswith(said) for o in status[:-1])
    out, status, error = kernel.run('learn.distrib_fit(1, nprocs=2)', go.touch)
    assert error is None and status[0] == said and status[-1] == '' and out[-1].startswith('1 epoch in'), (out, error)
    out, status, error = kernel.run('preds = learn.distrib_get_preds(nprocs=2)')
    assert error is None and not any('first time' in o for o in status)
    # A kernel that shuts down ends all children of its own group first, and waits for them.
    out, *_ = kernel.run(WHO)
    assert json.loads(out[-1]) == dict(of_group=0, all=2), 'the helper and the resource tracker, apart; and no worker'
