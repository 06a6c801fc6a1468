"""Machines of a Ray cluster that are lost during a fit: an actor or a node that dies, freezes or is slow, a link that
goes down."""
import contextlib, os, re, signal, subprocess, threading, time
from pathlib import Path
import psutil, pytest, torch
from fastai.callback.core import Callback
from faults import OneFault, Slow
from namespaces import ip
from parity import assert_same, fit_both, learner
from ray_cluster import Cluster, WarmRay, connected, gone, needs_ray, ours, shared
from test_interrupt import shell_wait
from two_hosts import leaves_nothing, leaves_nothing_at_last, net
from fastddp.all import RankDied
from fastddp.machines.ray import RemoteWorkers

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope='module')
def cluster(net, leaves_nothing_at_last):
    cluster = Cluster(net)
    try:
        cluster.start()
        with connected(cluster): yield cluster
    finally: cluster.stop()


@pytest.fixture(scope='module')
def machines(cluster):
    launcher = WarmRay(per_node=2, link_timeout=6., start_timeout=240.)
    try:
        learner(train=8, valid=1).distrib_fit(1, nprocs=4, launcher=launcher)
        yield launcher
    finally: launcher.end()


@contextlib.contextmanager
def once(path, least, do):
    "Inside, a shell does something when the file at `path` says `least`"
    with subprocess.Popen(['sh', '-c', f'{shell_wait(path, least)}; {do}']) as p:
        try: yield
        finally: p.kill()


@needs_ray
def test_an_actor_dies(machines, cluster, shared):
    "All of its workers end, and the next fit starts a new one"
    machines.place(4)
    learn, (actor, *workers) = learner(train=4000, cbs=[Slow(.01, shared)]), ours(cluster.nodes[1])
    with once(shared/'done3', 1, f'kill -9 {actor.pid}'):
        with pytest.raises(RankDied, match=f'on {cluster.other} died: {cluster.other} was lost: '):
            learn.distrib_fit(50, nprocs=4, launcher=machines)
    assert gone([actor, *workers], 10) == []
    assert_same(*fit_both(learner(), 4, machines, 1))


@needs_ray
def test_a_machine_freezes(machines, cluster, shared):
    "As one that is suspended: nothing of it answers, and nothing ends. When it wakes up, its processes end"
    learn = learner(train=4000, cbs=[Slow(.01, shared)])
    machines.place(4)
    there = ours(cluster.nodes[1])
    with once(shared/'done3', 1, f'kill -STOP {" ".join(str(o.pid) for o in there)}'):
        try:
            with pytest.raises(RankDied, match=f'on {cluster.other} died: no message from {cluster.other} for 6 s'):
                learn.distrib_fit(50, nprocs=4, launcher=machines)
        finally:
            for o in there:
                with contextlib.suppress(psutil.NoSuchProcess): o.resume()
    assert there and gone(there, 60) == []
    assert_same(*fit_both(learner(), 4, machines, 1))


@needs_ray
def test_a_machine_is_slow(machines, cluster, shared):
    "Its actor stands still for a while, shorter than `link_timeout`: nothing is lost"
    learn = learner(train=400, cbs=[Slow(.01, shared)])
    machines.place(4)
    actor, *_ = ours(cluster.nodes[1])
    with once(shared/'done3', 1, f'kill -STOP {actor.pid}; sleep 3; kill -CONT {actor.pid}'):
        learn.distrib_fit(6, nprocs=4, launcher=machines)
        actor.resume()
    assert len(learn.recorder.values) == 6 and len(learn.recorder.losses) == 150


class Ballast(Callback):
    "Takes long to send"
    def __init__(self): self.much = torch.zeros(100_000_000)


@needs_ray
@pytest.mark.parametrize('how', ['the actor dies', 'Ctrl-C'])
def test_while_data_is_sent(machines, cluster, monkeypatch, how):
    "The call ends in time, and the next fit works"
    machines.place(4)
    actor, sent, send = ours(cluster.nodes[1])[0], [], RemoteWorkers.submit
    def act():
        time.sleep(.3)
        if how == 'Ctrl-C': os.kill(os.getpid(), signal.SIGINT)
        else: actor.kill()
    def sends(self, *args):
        if not sent:
            sent.append(threading.Thread(target=act))
            sent[0].start()
        return send(self, *args)
    learn = learner(cbs=[Ballast()])
    with monkeypatch.context() as m:
        m.setattr(RemoteWorkers, 'submit', sends)
        with pytest.raises(KeyboardInterrupt if how == 'Ctrl-C' else RankDied):
            learn.distrib_fit(1, nprocs=4, launcher=machines)
    sent[0].join()
    assert_same(*fit_both(learner(), 4, machines, 1))


class CutsTheLink(OneFault):
    "Says when it is time to cut the link, and goes on"
    def _go(self): Path(self.marker).write_text('1')


class LateOnTheOtherMachine(Callback):
    "Lets the ranks of the first machine wait for those of the second one in each meeting"
    def before_batch(self): time.sleep(.3*(int(os.environ['RANK']) >= 2))


@needs_ray
@pytest.mark.parametrize('late', [[], [LateOnTheOtherMachine()]], ids=['in a step', 'in a meeting'])
def test_the_link_goes_down(machines, cluster, net, shared, late):
    "The ranks wait for each other in vain, and no process ends by itself; also in the first fit of new workers"
    machines.end()
    sign = CutsTheLink('', 'before_batch/train', 0, 0, 3, marker=str(shared/'cut'))
    learn = learner(train=4000, cbs=[sign, *late])
    try:
        with once(shared/'cut', 1, f'ip link set {net.here} down'):
            with pytest.raises(RankDied) as caught: learn.distrib_fit(50, nprocs=4, launcher=machines)
    finally:
        ip('link', 'set', net.here, 'up')
        cluster.replace_other()
    assert caught.value.remedy and caught.value.host == cluster.other
    assert_same(*fit_both(learner(), 4, machines, 1))


@needs_ray
def test_a_machine_dies(machines, cluster, shared, capsys):
    "The error names it, and a restart goes on from the last complete epoch with the machine that is there"
    learn = learner(train=400, cbs=[Slow(.01, shared)])
    raylet = next(o for o in psutil.Process(cluster.nodes[1].pid).children() if 'raylet/raylet' in o.cmdline()[0])
    machines.end()
    with once(shared/'done3', 60, f'kill -9 {raylet.pid}'):     # Ray notices a dead node after seconds
        learn.distrib_fit(30, launcher=machines, restarts=1)
    said = capsys.readouterr().out
    found = re.search(rf'on {cluster.other} died: .*Going on with epoch (\d+) on fresh workers \(0 restarts', said)
    assert found, said
    assert '2 workers (1 machine x 2 on the CPU' in said
    first = int(found[1])
    assert 0 < first < 30
    assert len(learn.recorder.values) == 30 and len(learn.recorder.losses) == first*25+(30-first)*50
