"Things that go wrong on purpose, at a chosen place and on a chosen rank; imported by the workers, too."
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
from fastai.callback.core import Callback


class OneFault(Callback):
    "Does `what` once: at the first call of `event` for which epoch, batch and rank are those given (None: any)"
    order = 30
    def __init__(self, what, event, rank, epoch=None, batch=None, marker=None):
        self.what, self.event, self.rank, self.when, self.marker = what, event, rank, (epoch, batch), marker
    def __call__(self, event_name):
        super().__call__(event_name)
        if event_name == self.event.split('/')[0] and self._is_now(): self._go()
    def _is_now(self):
        if int(os.environ.get('RANK', 0)) != self.rank or os.path.exists(self.marker): return False
        if '/' in self.event and self.training != (self.event.split('/')[1] == 'train'): return False
        epoch, batch = self.when
        return epoch in (None, getattr(self.learn, 'epoch', 0)) and batch in (None, getattr(self.learn, 'iter', 0))
    def after_fit(self):
        "What can't be sent back: `when_done` says which"
        kind = getattr(self, 'when_done', None)
        if kind == 'generator': self.generator = (i for i in range(3))
        if kind == 'fussy': self.fussy = Fussy(1, 2)
    def _go(self):
        Path(self.marker).touch()
        do(self.what)


class Slow(Callback):
    "Takes `secs` a batch; says in a file of each rank how many training batches are complete"
    order = 90
    def __init__(self, secs, folder): self.secs, self.folder, self.done, self.seen = secs, str(folder), 0, 0
    def before_batch(self):
        time.sleep(self.secs)
        self.seen += 1
        if not self.training: Path(self.folder, f'valid{os.environ.get("RANK", 0)}').write_text(str(self.seen))
    def after_batch(self):
        if not self.training: return
        self.done += 1
        Path(self.folder, f'done{os.environ.get("RANK", 0)}').write_text(str(self.done))


class SlowLayer(torch.nn.Module):
    "Takes `secs` a batch of a validation; says in a file of each rank that it is at it"
    def __init__(self, secs, folder):
        super().__init__()
        self.secs, self.folder = secs, str(folder)
    def forward(self, x):
        if self.training: return x
        time.sleep(self.secs)
        Path(self.folder, f'valid{os.environ.get("RANK", 0)}').write_text('1')
        return x


class OnLoad:
    "Does `what` on `rank` when it is unpickled there"
    def __init__(self, what, rank, marker=None): self.args = what, rank, marker
    def __reduce__(self): return _on_load, self.args


def _on_load(what, rank, marker):
    if int(os.environ.get('RANK', -1)) != rank: return OnLoad(what, rank, marker)
    Path(marker).touch()
    do(what)


class OnDump:
    "Does `what` on `rank` when it is pickled there, which happens when the result goes back"
    def __init__(self, what, rank, marker=None): self.args = what, rank, marker
    def __reduce__(self):
        what, rank, marker = self.args
        if int(os.environ.get('RANK', -1)) == rank and not os.path.exists(marker):
            Path(marker).touch()
            do(what)
        return OnDump, self.args


class Silent(Exception): pass


class Fussy(Exception):
    "As many libraries' own: plain pickle can't load it"
    def __init__(self, a, b): super().__init__(f'{a} and {b}')


def do(what):
    if what == 'library': os.write(2, b'a library complains\n')     # as compiled code does, past Python's streams
    if what in ('exception', 'library'): raise ValueError('wrong on purpose')
    if what == 'silent exception': raise Silent
    if what == 'interrupt': raise KeyboardInterrupt
    if what == 'sys.exit': sys.exit(3)
    if what == 'os._exit': os._exit(4)
    if what == 'segfault': ctypes.string_at(0)
    if what == 'SIGKILL': os.kill(os.getpid(), signal.SIGKILL)
    if what == 'SIGSTOP': os.kill(os.getpid(), signal.SIGSTOP)
    if what == 'out of memory': raise MemoryError('wrong on purpose')
    if what == 'loop':
        while True: time.sleep(.05)
    if what == 'connect': torch.distributed.init_process_group = cant_connect


def cant_connect(*args, **kwargs):
    raise RuntimeError('Gloo connectFullMesh failed with [pair.cc:144] no error')


class Broken:
    "A dataset with one bad item"
    def __init__(self, items, bad, what, marker):
        self.items, self.bad, self.what, self.marker = items, bad, what, marker
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        if i == self.bad and not os.path.exists(self.marker):
            Path(self.marker).touch()
            do(self.what)
        return self.items[i]
