"A message that was read already wakes the waits for the descriptor it came from, on which nothing more comes."
import os, threading
import cloudpickle, pytest
from fastcore.basics import noop
from fastddp.machines import agent, machine
from fastddp.machines.stream import GREETING, ByteStream, _frame


@pytest.fixture
def pipe():
    "A descriptor to read from, with one message on it, and the one to write to; no heartbeats follow"
    read_fd, write_fd = os.pipe()
    def put(*msg): os.write(write_fd, GREETING+_frame(cloudpickle.dumps((msg, 0))))
    yield read_fd, put
    os.close(write_fd)      # which ends a wait


def in_thread(fn): threading.Thread(target=fn).start()


def test_the_notebook(pipe):
    read_fd, put = pipe
    class Connected:
        is_local, stream = True, ByteStream(read_fd, noop, noop)
        def why_lost(self): pass
    m, news, returned = Connected(), [], threading.Event()
    workers = machine.RemoteWorkers([m], [1], False)
    put('news', 0, 'ready', True)
    while not m.stream.has_messages: m.stream.seconds_silent()
    def poll():
        news.extend(workers.poll(None))
        returned.set()
    in_thread(poll)
    assert returned.wait(20) and news == [(0, 'ready', True)]
    workers.stop()


def test_the_agent(pipe, monkeypatch):
    read_fd, put = pipe
    monkeypatch.setattr(agent, '_REPORT_SECONDS', None)       # it waits until something comes
    a, handled = agent.Agent(read_fd, os.open(os.devnull, os.O_WRONLY), own_names=()), threading.Event()
    def on_hello():
        handled.set()
        a.link_timeout = -1      # the notebook counts as gone
    monkeypatch.setattr(a, 'on_hello', on_hello, raising=False)
    put('hello')
    while not a.stream.has_messages: a.stream.seconds_silent()
    in_thread(a.run)
    assert handled.wait(20)
