"""A page beside the notebook: its threads stop a call, and go on with a block"""
import threading, time
import pytest
from fastai.callback.core import Callback
from fastddp.all import *
from parity import learner

pytestmark = pytest.mark.timeout(180)


class Long(Callback):
    "Tells the notebook by a file that it trains"
    def __init__(self, path): self.path = path
    def after_batch(self):
        if not self.training: return
        self.path.touch()
        time.sleep(.1)


def stops(learn, path, stopped):
    "Call `distrib_stop` in a thread once the fit trains"
    def wait():
        while not path.exists(): time.sleep(.05)
        stopped.append(learn.distrib_stop())
    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize('where', ['main', 'thread', 'job'])
def test_another_thread_stops_a_call(where, tmp_path):
    path, stopped, ended = tmp_path/'trains', [], []
    learn = learner(train=32, valid=8, cbs=Long(path))
    assert learn.distrib_stop() is False
    stops(learn, path, stopped)
    def fit():
        try: learn.distrib_fit(500, nprocs=2)
        except KeyboardInterrupt: ended.append(where)
    if where == 'main': fit()
    elif where == 'thread':
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join(60)
    else:
        job = learn.distrib_fit(500, nprocs=2, wait=False)
        job.exception(60)
        ended.append(job.state == 'stopped' and where)
    assert ended == [where] and stopped == [True] and learn.distrib_stop() is False


def test_a_block_goes_on_in_another_thread():
    "As servers of pages run a generator: each step in a thread of a pool"
    learn, result = learner(train=16, valid=8), []
    def steps():
        with learn.distrib_ctx(nprocs=2):
            for _ in range(3):
                learn.fit(1)
                yield len(learn.recorder.values)
    generator = steps()
    def step(): result.append(next(generator, 'end'))
    for _ in range(4):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(60)
    assert result == [1, 1, 1, 'end']
