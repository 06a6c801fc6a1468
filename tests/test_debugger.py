"""`%debug` after an error of a worker and after `launcher=InProcess()`, and `pdb.set_trace()` under it, in a real
kernel asked at its keyboard."""
import os, re
import pytest
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.full

SETUP = '''
import torch
from fastai.vision.all import *
from fastddp.all import *
x = torch.randn(16, 3)
dls = DataLoaders(*(DataLoader(list(zip(x, x.sum(1, keepdim=True))), bs=4, num_workers=0) for _ in range(2)))
class Fails(Callback):
    def before_batch(self):
        answer, batch = 6*7, torch.zeros(2, 3)
        if self.iter == 1 and self.training: {line}
learn = Learner(dls, nn.Linear(3, 1), loss_func=nn.MSELoss(), cbs=Fails())
'''


@pytest.fixture
def client():
    km = KernelManager(kernel_name='python3')
    km.start_kernel(env=dict(os.environ))
    kc = km.client()
    kc.start_channels()
    kc.wait_for_ready(timeout=120)
    yield kc
    kc.stop_channels()
    km.shutdown_kernel(now=True)


def typed(kc, code, answers=(), seconds=120):
    "What a cell shows, prompts and errors included, where someone types one answer after the other"
    said, answers = [], iter(answers)
    def hook(msg):
        c = msg['content']
        said.append(c.get('text') or '\n'.join(c.get('traceback', ())))
    def stdin(msg):
        said.append(msg['content']['prompt'])
        kc.input(next(answers))
    kc.execute_interactive(code, allow_stdin=True, output_hook=hook, stdin_hook=stdin, timeout=seconds)
    return re.sub('\x1b\\[[0-9;]*m', '', ''.join(said))


def test_debug_stands_in_the_users_frame(client):
    assert 'Error' not in typed(client, SETUP.format(line='raise ValueError("here")'))
    assert 'ValueError: ' in typed(client, 'learn.distrib_fit(1, launcher=InProcess())')
    said = typed(client, '%debug', ['p answer + 1', 'q'])
    assert 'ipdb> ' in said and 'raise ValueError("here")' in said and '43' in said, said


def test_debug_shows_the_recorded_frames_of_a_worker(client):
    typed(client, SETUP.format(line='raise ValueError("here")'))
    assert 'RankRaised: ' in typed(client, 'learn.distrib_fit(1, nprocs=2)')
    said = typed(client, '%debug', ['p answer', 'p batch.mean()', 'q'])
    assert 'raise ValueError("here")' in said and '42' in said, said
    assert 'AttributeError: recorded as text: Tensor (2, 3) torch.float32 on cpu' in said, said


def test_a_stop_of_a_function_is_short(client):
    wait = 'import os, signal, threading, time\nfrom fastddp.ranch import *\ndef wait(*_): time.sleep(60)\n'
    press = 'threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n'
    for call in ('ranch(2, wait)', 'spawn(wait, nprocs=2)'):
        said = typed(client, wait+press+call)
        assert 'KeyboardInterrupt' in said and len(said.split('\n')) < 20, said


def test_pdb_asks_in_the_notebook(client):
    assert 'Error' not in typed(client, SETUP.format(line='__import__("pdb").set_trace()'))
    said = typed(client, 'learn.distrib_fit(1, launcher=InProcess())', ['p answer + 1', 'c'])
    assert '43' in said and '1 epoch in ' in said, said
