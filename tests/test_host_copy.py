"""The state at the end of an epoch is copied from a GPU while the next one runs, and is that of the end all the same.

There is no GPU here: streams that are late on purpose stand for one (late_streams.py).
"""
import pytest, torch
from fastai.callback.core import Callback
from fastai.optimizer import Adam
from torch import nn
from fastddp.all import *
from fastddp.payload.host_copy import host_bytes
from fastddp.payload.pickling import Payload, dump, load
from fastddp.payload.state import opt_tensors
from late_streams import LateCopies, LateStates
from parity import learner

ROOM, NO_ROOM = 10**9, 10


@pytest.mark.parametrize('free,waits', [(ROOM, ['side']), (NO_ROOM, ['side', 'training'])])
def test_what_is_copied_late_is_as_it_was(free, waits):
    "Either the device has a copy of its own, or the stream that trains waits"
    t = torch.arange(3.)
    with LateCopies(free) as copies: here = host_bytes(t.untyped_storage())
    assert copies.module.waits == waits
    t += 1
    copies.wait()
    assert here.view(torch.float32).tolist() == [0, 1, 2]


def test_a_dump_has_its_bytes_after_waiting():
    "Also those that lie on the host and change: they are copied at once"
    class Host(LateCopies):
        def takes(self, s): return s.nbytes() == 12
    there, here = torch.arange(3.), torch.arange(4.)
    with Host(ROOM) as copies: p = dump([there, here, torch.empty(0)])
    p = copies.with_own(p)
    there += 1
    here += 1
    copies.wait()
    assert isinstance(p, Payload) and p.nbytes > 28
    a, b, empty = load(p.meta, [bytearray(o) for o in p.buffers])
    assert (a.tolist(), b.tolist(), len(empty)) == ([0, 1, 2], [0, 1, 2, 3], 0)


class Fails(Callback):
    "In the third batch of the second epoch"
    run_valid = False
    def before_batch(self):
        if (self.epoch, self.iter) == (1, 2): 1/0


def new_learner(**kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return learner(model=model, opt_func=Adam, train=40, **kwargs)


def fitted(epochs, cbs=(), fails=False):
    learn = new_learner()
    with learn.no_bar(), learn.no_logging():
        if not fails: learn.distrib_fit(epochs, 1e-2, cbs=cbs, launcher=InProcess())
        else:
            with pytest.raises(ZeroDivisionError): learn.distrib_fit(epochs, 1e-2, cbs=cbs, launcher=InProcess())
    return learn


@pytest.mark.parametrize('free', [None, ROOM, NO_ROOM])
def test_a_fit_that_fails_leaves_the_last_complete_epoch(free, monkeypatch):
    "None: as on the CPU, where it is copied at once"
    if free is not None:
        monkeypatch.setattr('fastddp.fastai2.jobs.EpochStates', LateStates)
        monkeypatch.setattr(LateStates, 'free', free)
        monkeypatch.setattr(LateStates, 'made', [])
    expected, learn = fitted(1), fitted(3, Fails(), fails=True)
    assert learn.recorder.values == expected.recorder.values
    for k, v in expected.model.state_dict().items(): assert torch.equal(learn.model.state_dict()[k], v), k
    tensors = [opt_tensors(o.opt) for o in (expected, learn)]
    assert len(tensors[0]) and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    if free is not None: assert LateStates.made and ('training' in LateStates.made[-1]) == (free is NO_ROOM)


def test_what_goes_wrong_on_the_way_is_raised(monkeypatch):
    class Broken(LateStates):
        def _send(self, copies, payload): raise RuntimeError('on the way')
    monkeypatch.setattr('fastddp.fastai2.jobs.EpochStates', Broken)
    with pytest.raises(RuntimeError, match='on the way'): fitted(2)
