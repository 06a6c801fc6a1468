"""Ctrl-C: all ranks stop at the same batch, what they have comes back, nothing is left, and the next fit works.

No clock is asked: what an interrupt cuts off would go on for long, or for ever, and says how far it came."""
import os, re, signal, subprocess, sys, threading, time
from functools import partial
from pathlib import Path
import pytest
from torch import nn
from jupyter_client.manager import KernelManager
import fastddp.all
from faults import OneFault, Slow
from fastddp.base.errors import CantDistribute
from fastddp.base.scoped import delay_interrupts
from fastddp.launch.local import Local
from learners import make_learner, mlp

HERE = Path(__file__).resolve().parent


def wait_for(path, least=1, limit=200):
    "Waits until the number in the file at `path` is `least`"
    end = time.monotonic()+limit
    while time.monotonic() < end:
        if path.exists() and int(path.read_text() or 0) >= least: return
        time.sleep(.01)
    raise TimeoutError(str(path))


def shell_wait(path, least):
    "The same in a shell, where only what ends the shell ends it: a number that passes by isn't missed"
    return f'until [ "$(cat {path} 2>/dev/null)" -ge {least} ] 2>/dev/null; do sleep .01; done'


class AfterThat(threading.Thread):
    "Interrupts this process, as Ctrl-C does, when the file at `path` says `least`; `times` times in all"
    def __init__(self, path, least=1, times=1):
        super().__init__(daemon=True)
        self.path, self.least, self.times, self.sent = path, least, times, 0
        self.start()
    def run(self):
        wait_for(self.path, self.least)
        for _ in range(self.times):
            if self.sent: time.sleep(.3)
            self.sent += 1
            os.kill(os.getpid(), signal.SIGINT)


class SlowModel(nn.Sequential):
    "Says in a file how many batches rank 0 has seen"
    def __init__(self, file):
        super().__init__(mlp())
        self.file, self.seen = file, 0
    def forward(self, x):
        time.sleep(.05)
        self.seen += 1
        if os.environ.get('RANK') == '0': self.file.write_text(str(self.seen))
        return super().forward(x)


def number(path): return int(path.read_text())
def steps(folder): return [number(folder/f'done{r}') for r in range(2)]
def history(learn): return learn.recorder.lrs, [p.tolist() for p in learn.model.parameters()]


def test_signal_waits_for_what_must_not_be_cut():
    reached = []
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append('all of it')
    assert reached == ['all of it']


def test_while_workers_are_prepared(monkeypatch):
    "Also one that came before, and was delayed"
    pressed = [lambda *_: signal.raise_signal(signal.SIGINT), lambda *_: None]
    for inside in pressed:
        monkeypatch.setattr(Local, '_ensure_workers', inside)
        with pytest.raises(KeyboardInterrupt), delay_interrupts():
            if inside is pressed[1]: signal.raise_signal(signal.SIGINT)
            Local(gpus=[]).prepare(2)
            pytest.fail('it went on')


def test_while_a_block_waits_for_the_job_of_another_thread():
    "That job goes on"
    launcher, has_it, ends = Local(gpus=[]), threading.Event(), threading.Event()
    def other():
        with launcher._lock:
            has_it.set()
            ends.wait(30)
    thread = threading.Thread(target=other)
    thread.start()
    has_it.wait()
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        signal.raise_signal(signal.SIGINT)
        launcher.leave()
    assert thread.is_alive()
    ends.set()
    thread.join()


def test_in_training_keeps_the_last_batch(tmp_path, capsys):
    """Both ranks stop after the same batch, and the learner has exactly these batches: as in one process that stops
    there"""
    learn = make_learner(cbs=[Slow(.05, tmp_path)], metrics=[])
    AfterThat(tmp_path/'done0', 9)
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(50, nprocs=2, batch='global')
    goes_on = (r'learn holds the last finished batch; learn\.distrib_resume\(\) begins with the first batch of '
               r'epoch \1\.')
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf'Stopped in epoch (\d+), (validation, )?batch \d+\. {goes_on}', said), said
    n0, n1 = steps(tmp_path)
    assert 9 <= n0 == n1 == len(learn.recorder.lrs) == learn.train_iter < 50*13
    alone = make_learner(cbs=[OneFault('interrupt', 'before_batch/train', 0, n0//13, n0%13,
                                       marker=str(tmp_path/'there'))], metrics=[])
    with pytest.raises(KeyboardInterrupt): alone.fit(50)
    for a, b in zip(learn.model.parameters(), alone.model.parameters()): assert (a-b).abs().max() < 1e-4
    learn.remove_cb(learn.slow)
    learn.distrib_fit(1, nprocs=2)
    assert len(learn.recorder.values) == 1


def test_in_validation(tmp_path):
    learn = make_learner(n=64, n_valid=6400, cbs=[Slow(.02, tmp_path)])
    AfterThat(tmp_path/'valid0')
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(5, nprocs=2)
    begun = [number(p) for r in range(2) if (p := tmp_path/f'valid{r}').exists()]    # rank 1 may not have begun
    assert begun and max(begun) < 2+200     # of the first validation
    assert steps(tmp_path) == [2, 2] and len(learn.recorder.lrs) == 2 and learn.recorder.values == []


class AtOnce:
    "A value whose loading in a worker takes long; says 1 when it has begun, 2 when it is there"
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return _slowly, (self.path,)


def _slowly(path):
    Path(path).write_text('1')
    time.sleep(60)
    Path(path).write_text('2')


def test_while_starting(tmp_path):
    "Nothing is trained yet, so ranks that don't answer are ended, and the learner is as it was"
    learn = make_learner()
    before = [p.tolist() for p in learn.model.parameters()]
    learn.heavy = AtOnce(tmp_path/'loading')
    AfterThat(tmp_path/'loading')
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(1, nprocs=2)
    assert number(tmp_path/'loading') == 1 and [p.tolist() for p in learn.model.parameters()] == before
    del learn.heavy
    learn.distrib_fit(1, nprocs=2)


def test_second_interrupt_ends_at_once(tmp_path):
    "A batch that takes for ever: the first interrupt would wait for it as long as `interrupt_grace` says"
    learn = make_learner(cbs=[OneFault('loop', 'before_batch/train', 1, 1, 2, marker=str(tmp_path/'stuck'))])
    hit = AfterThat(tmp_path/'stuck', 0, times=2)
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(3, nprocs=2, launcher=Local(interrupt_grace=10_000))
    assert hit.sent == 2
    assert len(learn.recorder.values) == 1      # the last complete epoch
    learn.distrib_resume()
    assert len(learn.recorder.values) == 3


@pytest.mark.parametrize('rank', [0, 1])
@pytest.mark.parametrize('event',
                         ['before_fit', 'before_batch/train', 'after_step', 'before_batch/valid', 'after_epoch',
                          'after_fit'])
def test_raised_in_a_callback(event, rank, tmp_path):
    "No rank is left waiting in a collective"
    learn = make_learner(cbs=[OneFault('interrupt', event, rank, marker=str(tmp_path/'there')), Slow(0, tmp_path)],
                         n=64)
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(2, nprocs=2, timeout=60)     # not GroupTimeout
    assert (tmp_path/'there').exists()
    if event != 'after_step' and (tmp_path/'done0').exists(): assert len(set(steps(tmp_path))) == 1


def test_lr_find_and_get_preds(tmp_path, capsys):
    "Afterwards the learner is as it was before, and a line says so"
    learn = make_learner(n_valid=6400, cbs=[Slow(.05, tmp_path)], path=tmp_path)
    before = [p.tolist() for p in learn.model.parameters()]
    AfterThat(tmp_path/'done0', 3)
    with pytest.raises(KeyboardInterrupt): learn.distrib_lr_find(nprocs=2, show_plot=False, stop_div=False)
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r'Stopped in iteration \d+ of lr_find\. learn is unchanged\.', said), said
    assert [p.tolist() for p in learn.model.parameters()] == before
    assert max(steps(tmp_path)) < 100 and 'fit' not in vars(learn)
    with pytest.raises(CantDistribute): learn.distrib_resume()
    learn = make_learner(n_valid=6400, model=partial(SlowModel, tmp_path/'seen'), path=tmp_path)
    AfterThat(tmp_path/'seen', 2)
    with pytest.raises(KeyboardInterrupt): learn.distrib_get_preds(nprocs=2)
    assert number(tmp_path/'seen') < 200
    assert capsys.readouterr().out.splitlines()[-1] == 'Stopped. learn is unchanged.'


SCRIPT = '''
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from faults import Slow, SlowLayer
from torch import nn
from fastddp.all import *
from learners import make_learner
if __name__ == '__main__':
    folder = Path({folder!r})
    learn = make_learner(cbs=[Slow(.05, folder)])
    try: learn.distrib_fit(100, nprocs=2)
    except KeyboardInterrupt: print('interrupted after', len(learn.recorder.lrs), 'of', (folder/'done1').read_text())
    learn.remove_cb(learn.slow)
    learn.distrib_fit(1, nprocs=2)
    print('and on:', len(learn.recorder.values))
'''


@pytest.mark.full
def test_script_in_a_terminal(tmp_path):
    "Ctrl-C in a terminal goes to the whole foreground group; only the script itself acts on it"
    (tmp_path/'script.py').write_text(SCRIPT.format(here=str(HERE), folder=str(tmp_path)))
    p = subprocess.Popen([sys.executable, '-W', 'ignore', str(tmp_path/'script.py')], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT,
                         text=True, start_new_session=True)
    try:
        wait_for(tmp_path/'done0', 5)
        os.killpg(p.pid, signal.SIGINT)
        out = p.communicate(timeout=120)[0]
    finally: p.kill()
    n = out.split('interrupted after ')[1].split()
    assert n[0] == n[2] and 'and on: 1' in out and 'Traceback' not in out, out


@pytest.fixture
def kernel():
    km = KernelManager(kernel_name='python3')
    km.start_kernel(extra_arguments=['--HistoryManager.hist_file=:memory:', '--log-level=ERROR'])
    client = km.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield km, client
    client.stop_channels()
    km.shutdown_kernel(now=True)


def run(client, code, timeout=120):
    "`(text shown, error's name or None)` of a cell; a KeyboardInterrupt shows the cell's own frame, none of ours"
    told = []
    def hook(msg): told.append(msg)
    reply = client.execute_interactive(code, timeout=timeout, output_hook=hook)
    text = ''.join(m['content'].get('text', '') for m in told if m['msg_type'] == 'stream')
    if reply['content'].get('ename') == 'KeyboardInterrupt':
        shown = '\n'.join(reply['content']['traceback'])
        assert 'In[' in re.sub(r'\x1b\[[\d;]*m', '', shown) and 'fastddp' not in shown and 'fastai' not in shown, shown
        assert 'Stopped' in text.splitlines()[-1]
    return text, reply['content'].get('ename')


# what the interrupt button cuts off: cell, file in which a worker says that it is at it
IN_KERNEL = {
    'starting': ('learn.heavy = AtOnce(folder/"loading"); learn.distrib_fit(1, nprocs=2)', 'loading'),
    'validation': ('learn.distrib_fit(5, nprocs=2)', 'valid0'),
    'lr_find': ('learn.distrib_lr_find(nprocs=2, show_plot=False)', 'done0'),
    # on workers, since no callback handles its batches
    'get_preds': ('learn.remove_cb(learn.slow); learn.model = nn.Sequential(SlowLayer(.05, folder), learn.model); '
                  'learn.distrib_get_preds(nprocs=2)', 'valid0')}


@pytest.mark.full
def test_in_a_kernel(kernel, tmp_path):
    """The interrupt button: the cell ends with KeyboardInterrupt, the learner is there, nothing is left, the next
    fit works"""
    km, client = kernel
    setup = f'''
import sys, psutil
sys.path.insert(0, {str(HERE)!r})
from faults import Slow, SlowLayer
from torch import nn
from fastddp.all import *
from learners import make_learner
from pathlib import Path
folder = Path({str(tmp_path)!r})
learn = make_learner(cbs=[Slow(.05, folder)])
'''
    assert run(client, setup)[1] is None
    def press(file='done0', least=5):
        wait_for(tmp_path/file, least)
        km.interrupt_kernel()
    threading.Thread(target=press, daemon=True).start()
    _, error = run(client, 'learn.distrib_fit(100, nprocs=2)')
    assert error == 'KeyboardInterrupt'
    text, error = run(client, '''
print(len(learn.recorder.lrs), (folder/'done0').read_text(), (folder/'done1').read_text())
print([p.name() for p in psutil.Process().children(recursive=True) if 'fastddp-' in ' '.join(p.cmdline())])
''')
    n = text.split()
    assert n[0] == n[1] == n[2] and n[3] == '[]', text
    _, error = run(client, 'learn.remove_cb(learn.slow); learn.distrib_fit(1, nprocs=2); assert '
                           'len(learn.recorder.values) == 1')
    assert error is None
    for cell, file in IN_KERNEL.values():
        for o in tmp_path.iterdir(): o.unlink()
        setup = 'from test_interrupt import AtOnce\nlearn = make_learner(n=64, n_valid=1600, cbs=[Slow(.05, folder)])'
        assert run(client, f'{setup}\nlearn.path = folder.parent')[1] is None
        threading.Thread(target=press, args=(file, 1), daemon=True).start()
        assert run(client, cell)[1] == 'KeyboardInterrupt', cell
    _, error = run(client, 'assert "fit" not in vars(learn); learn.distrib_fit(1, nprocs=2)')
    assert error is None
