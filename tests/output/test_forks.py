"""What a fork of a rank prints arrives, such as the lines of a `DataLoader` worker."""
import base64, contextlib, os, pickle, time
import pytest
from fastddp.base.scoped import with_attrs
from fastddp.output import streams
from fastddp.output.streams import EventQueue, use_streams


def in_forks(*prints, meanwhile=lambda: None):
    "What the notebook gets of forks of this process in which `prints` are called"
    got, pids = [], []
    with contextlib.ExitStack() as undo:
        queue = EventQueue(got.append)
        undo.callback(queue.close)
        use_streams(undo, queue, tty=False)
        for f in prints:
            pid = os.fork()
            if not pid:
                try: f()
                finally: os._exit(0)
            pids.append(pid)
        meanwhile()
        for pid in pids: os.waitpid(pid, 0)
    return ''.join(e[2] for e in got)


def test_a_fork_that_prints_more_than_a_pipe_holds():
    lines = [f'{i} {"x"*100}' for i in range(5000)]
    assert in_forks(lambda: [print(o) for o in lines]).splitlines() == lines


def test_what_a_fork_prints_is_never_unpickled():
    "Text may come from data; a line of it that looks like an event stays text"
    line = streams._EVENT.decode()+base64.b64encode(pickle.dumps(('stream', 'stdout', 'from a pickle'))).decode()
    assert in_forks(lambda: print(line)) == f'{line[1:]}\n'


def test_lines_longer_than_a_pipe_holds_stay_whole():
    "Each letter has two bytes, so that a line cut anywhere would show"
    lines = [f'{i} {"ü"*90_000}' for i in range(4)]
    assert in_forks(lambda: [print(o) for o in lines]).splitlines() == lines


def test_lines_of_several_forks_and_of_the_rank_dont_mix():
    def printing(name): return lambda: [print(f'{name}{"ü"*500}{i}') for i in range(1000)]
    def of_rank():
        for i in range(20):
            print('rank', i)
            time.sleep(.01)
    got = in_forks(printing('a'), printing('b'), meanwhile=of_rank).splitlines()
    for name in 'ab': assert [o for o in got if o[0] == name] == [f'{name}{"ü"*500}{i}' for i in range(1000)]
    assert [o for o in got if o[0] == 'r'] == [f'rank {i}' for i in range(20)]


def test_a_fork_goes_on_when_nobody_reads():
    "Then its lines are lost; and it doesn't wait for each of them"
    with with_attrs(streams, PATIENCE=.1):
        pipe = streams.ForkPipe()
        for i in range(5000): pipe.write(f'{i} {"x"*100}\n')
        first, *_ = pipe.read()
        pipe.write('once more\n')
        assert first[-1].startswith('0 x') and pipe.read() == [('stream', 'stdout', 'once more\n')]
        pipe.close()
