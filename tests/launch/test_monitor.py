"""`launch.monitor` over workers that are played: which ranks ended, how and when, and what the notebook raises then."""
import time
from types import SimpleNamespace
import pytest
from fastddp.process.workers import Heartbeat
from fastddp.base.errors import GroupTimeout, RankDied, RankRaised
from fastddp.base.failure import Failure
from fastddp.base.scoped import Interrupts
from fastddp.launch.monitor import Monitor

STACK = 'Thread 0x1 (most recent call first):\n  File "{}", line 9 in {}\n  File "worker.py", line 5 in worker_main\n'


class Played:
    "Workers that say what they are told to: a list of news for each `poll`"
    def __init__(self, folder, *news, n=2):
        self.folder, self.news, self.ranks, self.latest = folder, [*news], [*range(n)], {}
        self.beats, self.stacks, self.silent, self.asked = {}, {}, 0, False
    def log_path(self, r): return str(self.folder/f'rank{r}.log')
    def write(self, r, text):
        with open(self.log_path(r), 'a') as f: f.write(text)
    def beat(self, r): return self.beats.get(r, Heartbeat())
    def host(self, r): return ''
    def ask_stop(self): self.asked = True
    def ask_stacks(self, ranks):
        for r in ranks: self.write(r, self.stacks[r])
    def poll(self, timeout):
        if self.news: return self.news.pop(0)
        time.sleep(.01)
        self.silent += 1
        assert self.silent < 300, 'the monitor waits for more'
        return []


def monitor(workers, **kwargs):
    local = SimpleNamespace(**dict(workers=workers, see=(0,), live=True, interrupt_grace=1.,
                                   backend=None, timeout=None) | kwargs)
    return Monitor(local, lambda *_: None, Interrupts())


def failed(rank, kind='ValueError', message='', frames=(('cell.py', 1, 'f'),)):
    return rank, 'failed', Failure(rank, kind, message, '', frames, '', 1.)


class Late(Played):
    "Rank 0 fails, too, after .8 s"
    def poll(self, timeout):
        if self.silent != 80: return super().poll(timeout)
        self.silent += 1
        return [failed(0)]


@pytest.mark.parametrize('waits_for', [-1, 1])
def test_what_another_rank_may_raise_is_waited_for(tmp_path, waits_for):
    "But not while it waits at the board for the one that has failed"
    workers = Late(tmp_path, [failed(1)])
    workers.beats[0] = Heartbeat(waits_for=waits_for)
    with pytest.raises(RankRaised) as e: monitor(workers).wait()
    assert len(e.value.others) == (waits_for == -1)


def test_a_rank_that_failed_and_then_died_has_failed(tmp_path):
    with pytest.raises(RankRaised, match='ValueError: no'):
        monitor(Played(tmp_path, [failed(0, message='no'), (0, 'died', -11)])).wait()


ECHO = dict(kind='RuntimeError', message='gloo: Connection closed by peer', frames=())


def test_a_death_is_told_before_its_echo(tmp_path):
    with pytest.raises(RankDied) as e:
        monitor(Played(tmp_path, [failed(0, **ECHO)], [(1, 'died', -9)])).wait()
    assert (e.value.rank, e.value.signal) == (1, 'SIGKILL')
    # and no death before a failure of the user's code
    with pytest.raises(RankRaised, match='mine'):
        monitor(Played(tmp_path, [(1, 'died', -9)], [failed(0, message='mine')])).wait()


def test_an_interrupt_for_which_nothing_asked_is_a_failure(tmp_path):
    with pytest.raises(RankRaised, match='KeyboardInterrupt'):
        monitor(Played(tmp_path, [failed(0, 'KeyboardInterrupt')])).wait()


def test_ranks_that_were_asked_to_stop_are_waited_for(tmp_path):
    workers = Played(tmp_path, [], [failed(0, 'KeyboardInterrupt')], [], [failed(1, 'KeyboardInterrupt')])
    m = monitor(workers)
    m.interrupts.count = 1
    with pytest.raises(KeyboardInterrupt): m.wait()
    assert workers.asked and not m.running_ranks


def gives_up(m):
    "Does the monitor end the run after an interrupt?"
    try: m._interrupted()
    except KeyboardInterrupt: return True


def test_after_an_interrupt_a_rank_has_as_long_as_its_longest_batch(tmp_path):
    workers = Played(tmp_path)
    m = monitor(workers)
    m.interrupts.count, m.stop_asked_at = 1, time.monotonic()-100
    workers.beats[1] = Heartbeat(longest=1000.)
    assert not gives_up(m)
    workers.beats[1] = Heartbeat(longest=1., leaving=True)      # it hands over what it has
    assert not gives_up(m)
    workers.beats[1] = Heartbeat(longest=1.)
    assert gives_up(m)


def test_the_second_interrupt_ends_it_at_once(tmp_path):
    m = monitor(Played(tmp_path), interrupt_grace=1000.)
    m.interrupts.count = 1
    assert not gives_up(m)
    m.interrupts.count = 2
    assert gives_up(m)


def test_what_an_earlier_job_wrote_is_no_output_of_this_one(tmp_path):
    workers = Played(tmp_path, [(0, 'died', 1)])
    workers.write(0, 'of the earlier job\n')
    m = monitor(workers)
    workers.write(0, 'of this one\n')
    with pytest.raises(RankDied) as e: m.wait()
    assert e.value.log == 'of this one\n'


def test_the_rank_that_others_wait_for_keeps_them_waiting(tmp_path):
    workers = Played(tmp_path, n=3)
    workers.beats = {0: Heartbeat(waits_for=1), 1: Heartbeat(where='epoch 0, batch 2'), 2: Heartbeat(waits_for=1)}
    waits = STACK.format('fastddp/base/board.py', 'meet')
    workers.stacks = {0: waits, 1: STACK.format('cell', 'f'), 2: waits}
    with pytest.raises(GroupTimeout) as e: monitor(workers, timeout=.01).wait()
    assert (e.value.rank, e.value.where) == (1, 'epoch 0, batch 2')
    assert [o.split(',')[0] for o in e.value.stacks] == ['Rank 1', 'Rank 0', 'Rank 2']


def test_ranks_that_make_steps_do_not_hang(tmp_path):
    "However long ago the job began"
    workers = Played(tmp_path, [], [(0, 'died', 3)])
    workers.beats[1] = Heartbeat(at=time.monotonic()+1000)
    m = monitor(workers, timeout=10.)
    m.began -= 1000
    with pytest.raises(RankDied): m.wait()


def test_what_was_kept_for_the_end_is_shown_after_a_failure(tmp_path, capsys):
    said = 0, 'event', ('show', ('stream', 'stdout', 'the last words\n'))
    with pytest.raises(RankRaised): monitor(Played(tmp_path, [said, failed(1)]), live=False).wait()
    assert capsys.readouterr().out == 'the last words\n'


def test_what_ranks_show_while_they_become_idle_is_shown(tmp_path, capsys):
    "Also if output is shown at the end"
    late = 0, 'event', ('show', ('stream', 'stdout', 'late\n'))
    workers = Played(tmp_path, [failed(1)])
    m = monitor(workers, live=False)
    with pytest.raises(RankRaised): m.wait()
    workers.news = [[late], [(0, 'done')]]
    assert m.become_idle(5.) and workers.asked
    assert capsys.readouterr().out == 'late\n'


def test_a_rank_that_dies_does_not_become_idle(tmp_path):
    workers = Played(tmp_path, [failed(1)])
    m = monitor(workers)
    with pytest.raises(RankRaised): m.wait()
    workers.news = [[(0, 'died', 3)]]
    assert not m.become_idle(5.)
