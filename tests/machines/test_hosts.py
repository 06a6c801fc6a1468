"""Several machines: two hosts made of network namespaces, two ranks on each. What holds on one machine holds there."""
import contextlib, json, os, re, shutil, subprocess, sys, tempfile, threading, time
from importlib.metadata import version
from pathlib import Path
import psutil, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import SaveModelCallback
from fastai.metrics import accuracy
from faults import OneFault, Slow
from parity import assert_same, fit_both, learner, seed, alone_like
from test_interrupt import AfterThat, number, shell_wait, wait_for
from traces import running
from two_hosts import Hosts, leaves_nothing, leaves_nothing_at_last, net
import fastddp
from fastddp.all import CantDistribute, RankDied, RankRaised
from fastddp.base import board, group
from fastddp.base.errors import GroupTimeout
from fastddp.launch.engine import Job
from fastddp.process import helper
from fastddp.process.helper import sweep

# agents import torch and fastai twice each: long on a busy machine
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


class WarmHosts(Hosts):
    "Agents and workers stay from test to test, until `end`"
    def __exit__(self, *_): pass
    def end(self): self.leave()


@pytest.fixture(scope='module')
def hosts(net, leaves_nothing_at_last):
    launcher = net.hosts(cls=WarmHosts, link_timeout=6.)
    try:
        # agents, workers and memory for results are there by then
        for _ in range(2): learner(train=8, valid=1).distrib_fit(1, nprocs=4, launcher=launcher)
        yield launcher
    finally: launcher.end()


@pytest.fixture
def shared():
    "A folder that both hosts see, which have a /tmp of their own"
    path = Path(tempfile.mkdtemp(dir='/var/tmp'))
    yield path
    shutil.rmtree(path)


def agent_of(launcher, i): return psutil.Process(launcher.machines[i].conn.proc.pid)


def gone(procs, seconds):
    "Waits until the processes have ended; those that didn't"
    end = time.monotonic()+seconds
    while (left := [o for o in procs if running(o)]) and time.monotonic() < end: time.sleep(.05)
    return left


# What holds on one machine

def test_a_fit_equals_one_process(hosts, capsys):
    learn, one = fit_both(learner(), 4, hosts, 2)
    assert_same(learn, one)
    said = capsys.readouterr().out
    assert said.startswith('4 workers (2 machines x 2 on the CPU, gloo over eth0) x batch 4 = 16 per step, 3 steps per '
                           'epoch'), said


def where(ctx, obj):
    return {o: os.environ.get(o) for o in ('RANK','LOCAL_RANK','LOCAL_WORLD_SIZE','MINE','TMPDIR')} | dict(
        local=ctx.local_rank, cwd=os.getcwd(), net=os.readlink('/proc/self/ns/net'), shm=os.listdir('/dev/shm'),
        total=float(obj.sum()))


def test_ranks_know_where_they_are(hosts, monkeypatch):
    "Two ranks on each host, whose network and shared memory are its own; folder and variables are the notebook's"
    monkeypatch.setenv('MINE', 'yes')
    res = hosts.run(Job.of(where, torch.ones(100_000)), 4).results
    assert [o['RANK'] for o in res] == list('0123') and [o['LOCAL_RANK'] for o in res] == list('0101')
    assert [o['local'] for o in res] == [0, 1, 0, 1]
    assert {(o['LOCAL_WORLD_SIZE'], o['MINE'], o['cwd'], o['total']) for o in res} == {('2', 'yes', os.getcwd(), 1e5)}
    nets = [o['net'] for o in res]
    assert nets[0] == nets[1] != nets[2] == nets[3] and os.readlink('/proc/self/ns/net') not in nets


def at_the_board(ctx, _):
    b = board.group_board()
    return [*b.on_host], b.between_hosts is not None, [row[:2] for row in b.meet([ctx.rank, .5])]


def secrets_here(): return {k: os.environ.get(k) for k in ('MY_API_KEY', 'DB', 'HF_TOKEN')}


def test_secrets_stay_in_the_notebook(hosts, monkeypatch):
    "Apart from those that are named"
    for k, v in dict(MY_API_KEY='a', DB='postgres://me:b@host', HF_TOKEN='c').items(): monkeypatch.setenv(k, v)
    for m in hosts.machines: monkeypatch.setattr(m, 'secrets', ['HF_TOKEN'])
    def seen(ctx, obj): return secrets_here()
    found = hosts.run(Job.of(seen, None), 4).results
    assert found == [dict(MY_API_KEY=None, DB=None, HF_TOKEN='c')]*4


def test_the_ranks_meet_over_one_page_per_host_and_one_exchange(hosts):
    ranks = hosts.run(Job.of(at_the_board, None), 4).results
    assert [here for here, *_ in ranks] == [[0, 1]]*2 + [[2, 3]]*2
    assert [leads for _, leads, _ in ranks] == [True, False, True, False]
    assert all(said == [(r, .5) for r in range(4)] for *_, said in ranks)


def test_a_block(hosts):
    "Two fits, a validation and predictions, and the finder, on the same workers"
    learn = learner()
    one = alone_like(learn, 4)
    for o, ctx in (learn, learn.distrib_ctx(nprocs=4, launcher=hosts)), (one, one.no_bar()):
        seed(1)
        with ctx:
            o.fit(1)
            o.fit_one_cycle(1, .1)
            o.found = o.validate(), o.get_preds()[0]
    assert_same(learn, one)
    assert list(learn.found[0]) == pytest.approx(list(one.found[0]), abs=1e-5)
    assert torch.allclose(learn.found[1], one.found[1], atol=1e-5)


@pytest.mark.full
def test_lr_find(hosts, tmp_path):
    learn = learner(train=200)
    one = alone_like(learn, 4)
    for o in learn, one: o.path, o.found = tmp_path, []
    seed(1)
    a = learn.distrib_lr_find(num_it=20, show_plot=False, nprocs=4, launcher=hosts)
    seed(1)
    assert a.valley == pytest.approx(one.lr_find(num_it=20, show_plot=False).valley)


def test_stop_and_resume(hosts, shared):
    "Ctrl-C stops all four ranks after the same batch, and the fit goes on"
    learn = learner(train=160, cbs=[Slow(.02, shared)])
    AfterThat(shared/'done3', 12)
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(30, nprocs=4, launcher=hosts)
    assert len({number(shared/f'done{r}') for r in range(4)}) == 1
    assert 12 <= len(learn.recorder.lrs) < 300


def test_a_job(hosts, shared, capsys):
    "In the background as in the foreground; it can be pulled and stopped"
    one, learn = learner(), learner()
    seed(1)
    one.distrib_fit(2, nprocs=4, launcher=hosts)
    capsys.readouterr()
    seed(1)
    job = learn.distrib_fit(2, nprocs=4, launcher=hosts, wait=False)
    job.result(120)
    assert_same(learn, one)
    assert '2 epochs in' in job.log and capsys.readouterr().out == ''
    slow = learner(train=160, cbs=[Slow(.02, shared)])
    job = slow.distrib_fit(30, nprocs=4, launcher=hosts, wait=False)
    wait_for(shared/'done0', 25)
    end = time.monotonic()+60       # on a busy machine an epoch's state arrives some batches later
    while job.epoch is None and time.monotonic() < end: time.sleep(.05)
    job.pull()
    assert len(slow.recorder.values) >= 1
    job.stop()
    assert job.result(120) is None and job.state == 'stopped'
    assert len({number(shared/f'done{r}') for r in range(4)}) == 1


class Says(Slow):
    "A callback that prints while it trains"
    def before_epoch(self): print(f'epoch {self.epoch} of {os.environ["RANK"]}')


def test_live_output(hosts, shared, capsys):
    learner(cbs=[Says(0, shared)]).distrib_fit(2, nprocs=4, launcher=hosts)
    said = capsys.readouterr().out
    assert 'epoch 0 of 0\nepoch 1 of 0' in said and 'of 3' not in said


def test_files_of_a_fit_come_home(hosts, tmp_path):
    "The hosts have a /tmp of their own; rank 0 is on one of them"
    learn = learner(path=tmp_path, model_dir='best', metrics=[accuracy])
    learn.logger = print
    (tmp_path/'mine.csv').write_text('as before')
    learn.distrib_fit(2, nprocs=4, launcher=hosts, cbs=[SaveModelCallback(every_epoch=True), CSVLogger()])
    assert sorted(o.name for o in (tmp_path/'best').iterdir()) == ['model_0.pth', 'model_1.pth']
    assert len((tmp_path/'history.csv').read_text().splitlines()) == 3
    assert (tmp_path/'mine.csv').read_text() == 'as before'
    weights = [p.tolist() for p in learn.model.parameters()]
    assert [p.tolist() for p in learn.load('model_1').model.parameters()] == weights


def test_modules_of_ones_own_go_along(hosts, tmp_path, monkeypatch):
    "From a folder that the other machines don't have; they work in one of their own"
    (tmp_path/'my_own_words.py').write_text('def double(x): return 2*x')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    from my_own_words import double
    try: res = hosts.run(Job.of(call_it, double), 4).results
    finally: del sys.modules['my_own_words']
    assert [o[0] for o in res] == [42]*4 and str(tmp_path) not in {o[1] for o in res}


def call_it(ctx, fn): return fn(21), os.getcwd()


# What goes wrong

def faulty(what, rank, folder, event='before_batch/train', epoch=1, batch=1):
    return learner(cbs=[OneFault(what, event, rank, epoch, batch, marker=str(folder/'fired'))])


def test_a_rank_raises(hosts, shared):
    learn = faulty('library', 3, shared)
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(3, nprocs=4, launcher=hosts)
    assert caught.value.rank == 3 and 'wrong on purpose' in str(caught.value) and 'faults.py' in str(caught.value)
    assert 'a library complains' in str(caught.value) and len(learn.recorder.values) == 1


def test_a_rank_dies(hosts, net, shared):
    "The error names the machine, the last complete epoch is kept, the next fit works"
    learn = faulty('SIGKILL', 2, shared)
    with pytest.raises(RankDied) as caught: learn.distrib_fit(3, nprocs=4, launcher=hosts)
    assert f'rank 2 on {net.b} died: killed by SIGKILL (epoch 1, batch 1)' in str(caught.value)
    assert len(learn.recorder.values) == 1 and 'the end of epoch 0' in str(caught.value)
    assert_same(*fit_both(learner(), 4, hosts, 1))


def test_a_restart_goes_on(hosts, shared, capsys):
    learn = faulty('SIGKILL', 1, shared)
    learn.distrib_fit(3, nprocs=4, launcher=hosts, restarts=1)
    assert 'Going on with epoch 1' in capsys.readouterr().out and len(learn.recorder.values) == 3


@pytest.mark.full
def test_a_rank_hangs(hosts, shared):
    "Heartbeats and stacks come by message"
    learn, hosts.timeout = faulty('SIGSTOP', 3, shared), 20.
    try:
        with pytest.raises(GroupTimeout) as caught: learn.distrib_fit(3, nprocs=4, launcher=hosts)
    finally: hosts.timeout = None
    assert caught.value.rank == 3 and 'does not react' in str(caught.value)
    assert re.search(r'Rank 0, epoch 1, batch 1:\n  (\.\.\.|File)', str(caught.value))


class CutsTheLink(OneFault):
    "Says when it is time to cut the link, and goes on"
    def _go(self): Path(self.marker).touch()


class LateOnTheOtherHost(Callback):
    "Lets the ranks of the first host wait for those of the second one in each meeting"
    def before_batch(self): time.sleep(.3*(int(os.environ['RANK']) >= 2))


@pytest.mark.parametrize('late', [[], [LateOnTheOtherHost()]], ids=['in a step', 'in a meeting'])
def test_the_link_goes_down(hosts, net, shared, late):
    "The ranks wait for each other in vain, and no process ends by itself; also in the first fit of new workers"
    hosts.close(0)
    sign = CutsTheLink('', 'before_batch/train', 0, 0, 3, marker=str(shared/'cut'))
    learn = learner(train=4000, cbs=[sign, *late])
    cut = subprocess.Popen(['sh', '-c', f'until [ -e {shared}/cut ]; do sleep .01; done; '
                                        f'ip -n {net.a} link set eth0 down'])
    try:
        with pytest.raises(RankDied, match='the network between the machines seems to have failed') as caught:
            learn.distrib_fit(50, nprocs=4, launcher=hosts)
    finally:
        cut.kill()
        cut.wait()
        net.link('up')
    assert caught.value.remedy and caught.value.host in (net.a, net.b)
    assert_same(*fit_both(learner(), 4, hosts, 1))


def test_a_machine_dies(hosts, net, shared):
    "Its agent is killed: all of its workers end, and the next fit starts a new one"
    hosts.place(4)
    learn, agent = learner(train=4000, cbs=[Slow(.01, shared)]), agent_of(hosts, 1)
    there = [agent, *agent.children(recursive=True)]
    killer = subprocess.Popen(['sh', '-c', f'until [ -e {shared}/done3 ]; do sleep .01; done; kill -9 {agent.pid}'])
    try:
        with pytest.raises(RankDied, match=f'on {net.b} died: the connection to {net.b} ended'):
            learn.distrib_fit(50, nprocs=4, launcher=hosts)
    finally:
        killer.kill()
        killer.wait()
    assert gone(there, 10) == []
    assert_same(*fit_both(learner(), 4, hosts, 1))


def test_a_machine_freezes(hosts, net, shared):
    "As one that is suspended: nothing of it answers, and nothing ends. When it wakes up, its processes end"
    hosts.place(4)
    learn, agent = learner(train=4000, cbs=[Slow(.01, shared)]), agent_of(hosts, 1)
    learn.distrib_fit(1, nprocs=4, launcher=hosts)
    there = [agent, *agent.children(recursive=True)]
    (shared/'done3').unlink(missing_ok=True)
    stop = f'until [ -e {shared}/done3 ]; do sleep .01; done; kill -STOP {" ".join(str(o.pid) for o in there)}'
    with subprocess.Popen(['sh', '-c', stop]) as freezer:
        try:
            with pytest.raises(RankDied, match=f'on {net.b} died: no message from {net.b} for 6 s'):
                learn.distrib_fit(50, nprocs=4, launcher=hosts)
        finally:
            freezer.kill()
            for o in there:
                with contextlib.suppress(psutil.NoSuchProcess): o.resume()
    assert gone(there, 60) == []
    assert_same(*fit_both(learner(), 4, hosts, 1))


class Ballast(Callback):
    "Takes long to send"
    def __init__(self): self.much = torch.zeros(100_000_000)


def kill_midway(launcher, agent, much=2e8):
    "Kills the agent soon after there is much to send to it"
    end = time.monotonic()+300
    while not launcher._payload_block or os.fstat(launcher._payload_block.fd).st_size < much:
        if time.monotonic() > end: return
        time.sleep(.002)
    time.sleep(.2)
    agent.kill()


@pytest.mark.full
def test_a_machine_dies_while_data_is_sent(hosts, net):
    hosts.place(4)
    agent = agent_of(hosts, 1)
    killer = threading.Thread(target=kill_midway, args=(hosts, agent))
    killer.start()
    with pytest.raises(RankDied, match=f'on {net.b} died: the connection to {net.b} ended'):
        learner(cbs=[Ballast()]).distrib_fit(1, nprocs=4, launcher=hosts)
    killer.join()
    assert_same(*fit_both(learner(), 4, hosts, 1))


def test_a_machine_is_slow(hosts, shared):
    "Its agent stands still for a while, shorter than `link_timeout`: nothing is lost"
    hosts.place(4)
    learn, agent = learner(train=400, cbs=[Slow(.01, shared)]), agent_of(hosts, 1)
    wait = f'until [ -e {shared}/done3 ]; do sleep .01; done'
    stops = subprocess.Popen(['sh', '-c', f'{wait}; kill -STOP {agent.pid}; sleep 3; kill -CONT {agent.pid}'])
    try: learn.distrib_fit(2, nprocs=4, launcher=hosts)
    finally: assert stops.wait() == 0
    assert len(learn.recorder.values) == 2 and len(learn.recorder.losses) == 50


@pytest.mark.full
def test_a_restart_goes_on_with_the_machines_that_are_there(hosts, net, shared, capsys):
    "The agent of one dies: the other goes on from the last complete epoch, with as many ranks as it had"
    hosts.place(4)
    learn, agent = learner(train=400, cbs=[Slow(.01, shared)]), agent_of(hosts, 1)
    killer = subprocess.Popen(['sh', '-c', f'{shell_wait(shared/"done3", 60)}; kill -9 {agent.pid}'])
    try: learn.distrib_fit(8, nprocs=4, launcher=hosts, restarts=1)
    finally:
        killer.kill()
        killer.wait()
    said = capsys.readouterr().out
    found = re.search(rf'on {net.b} died: .*Going on with epoch ([1-7]) on fresh workers \(0 restarts left\)', said)
    assert found, said
    assert '2 workers (1 machine x 2 on the CPU, gloo over lo) x batch 4 = 8 per step, 50 steps per epoch' in said
    first = int(found[1])
    assert len(learn.recorder.values) == 8 and len(learn.recorder.losses) == first*25+(8-first)*50
    hosts.end()
    assert_same(*fit_both(learner(), 4, hosts, 1))      # both are asked again


# What isn't there

def test_files_that_a_machine_does_not_have(hosts, tmp_path, shared):
    "The items of the loaders name them; each host has a /tmp of its own"
    for folder in tmp_path, shared: (folder/'a.pt').touch()
    learn = learner()
    learn.dls.train.dataset = Named(learn.dls.train.dataset, shared/'a.pt')
    learn.distrib_fit(1, nprocs=4, launcher=hosts)
    learn.dls.train.dataset = Named(learn.dls.train.dataset, tmp_path/'a.pt')
    with pytest.raises(CantDistribute, match=f"{hosts.hosts[1]} doesn't have {tmp_path}/a.pt"):
        learn.distrib_fit(1, nprocs=4, launcher=hosts)


class Named(list):
    "A data set with `items`, as fastai's have"
    def __init__(self, data, path):
        super().__init__(data)
        self.items = [(path, 'cat')]*len(data)


def test_preflight(hosts):
    "What the machines have"
    lines = hosts.preflight().splitlines()
    assert lines[0].startswith('2 machines x 2 on the CPU') and f"torch {version('torch')}" in lines[0], lines
    assert [o.split(':')[0] for o in lines[1:3]] == hosts.hosts and all('card eth0' in o for o in lines[1:3]), lines
    assert len(lines) == 3, lines



@pytest.mark.parametrize('command,says', [
    ('ip netns exec {host}-not-there {run}', "can't be reached"),
    ('env -C / -u PYTHONPATH PYTHONNOUSERSITE=1 /usr/bin/env python3 -I -S -m fastddp.machines.agent',
     'has no fastddp'),
    ('env no-such-program {run}', 'has no such program'), ('no-such-program {run}', 'has no such program'),
    (f'env {__file__} {{run}}', "can't run that program"), (f'{__file__} {{run}}', "can't run that program"),
    ('sh -c "echo Permission denied \\(publickey,password\\). >&2; exit 255"', 'wants a password')])
def test_a_host_that_has_no_agent(command, says):
    "One line for each, and nothing is started"
    learn = learner()
    with pytest.raises(CantDistribute) as caught:
        learn.distrib_fit(1, launcher=Hosts(['one', 'two'], per_node=1, command=command))
    lines = str(caught.value).splitlines()
    assert [o.split(':')[0] for o in lines] == ['one', 'two'] and all(says in o for o in lines), lines


def test_two_clones_with_one_version(tmp_path):
    "Another machine's fastddp has the same version, and a line more"
    shutil.copytree(Path(fastddp.__file__).parent, tmp_path/'fastddp')
    with open(tmp_path/'fastddp'/'all.py', 'a') as f: f.write('\n')
    there = Hosts(['there'], command=f"env -C / PYTHONPATH={tmp_path} {{run}}", start_timeout=240.)
    with pytest.raises(CantDistribute, match=r'^there: has fastddp [^ ]+\+\w{8}, the notebook [^ ]+\+\w{8}; they have'):
        there.place()


def test_ctrl_c_while_agents_start_workers(tmp_path, monkeypatch):
    "The helper process there imports a module that takes for ever"
    slow = f"import time\nopen('{tmp_path}/begun', 'w').write('1')\ntime.sleep(1000)"
    (tmp_path/'slow_to_import.py').write_text(slow)
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}{os.pathsep}{os.environ.get("PYTHONPATH", "")}')
    monkeypatch.setattr(helper, '_preload', [*helper._preload, 'slow_to_import'])
    with Hosts(['localhost'], per_node=2, start_timeout=240.) as home:
        home.place()
        agent = agent_of(home, 0)
        AfterThat(tmp_path/'begun')
        with pytest.raises(KeyboardInterrupt): home.run(Job.of(where, torch.ones(1)), 2)
        assert gone([agent], 10) == []


def test_an_agent_that_is_asked_to_end_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    with Hosts(['localhost'], per_node=2, start_timeout=240.) as home:
        home.run(Job.of(where, torch.ones(1)), 2)
        agent, of_agent = agent_of(home, 0), {*tmp_path.glob('fastddp-*')}
        agent.terminate()
        assert of_agent and gone([agent], 30) == [] and not {*tmp_path.glob('fastddp-*')}


def connects(ctx, obj):
    if ctx.rank == 3: raise ConnectionResetError(104, 'Connection reset by peer')
    group.all_sum([1.])


def test_a_connection_of_ones_own(hosts):
    "It broke on one rank, and is not the network between the machines"
    with pytest.raises(RankRaised, match='rank 3 raised ConnectionResetError'): hosts.run(Job.of(connects, None), 4)


@pytest.mark.full
def test_the_notebook_takes_part_and_dies(net, shared):
    "Two ranks at home and two on the other machine; when the notebook is killed, nothing is left anywhere"
    script = Path(__file__).parent.with_name('script_hosts.py')
    with subprocess.Popen([sys.executable, script, net.command, net.b, shared], stdout=subprocess.PIPE, text=True) as p:
        try:
            said = [p.stdout.readline() for _ in range(3)]
            assert said[0].startswith(f'4 workers (2 machines x 2 on the CPU, gloo over {net.here})'), said
            assert said[2] == 'same as in one process\n'
            wait_for(shared/'done3')
            procs = psutil.Process(p.pid).children(recursive=True)
            running = [o for o in procs if o.status() != psutil.STATUS_ZOMBIE]
            assert [o for o in running if 'fastddp.machines.agent' in ' '.join(o.cmdline())]
        finally: p.kill()
    assert gone(procs, 30) == []
    sweep()     # a worker that the system ends with its helper leaves a folder, which goes with the next start


@pytest.mark.full
def test_the_same_code_under_torchrun_on_two_hosts(net, shared):
    here = Path(__file__).parent.parent
    env = dict(PYTHONPATH=f'{here}{os.pathsep}{here.parent}')
    said = net.torchrun(here/'script_fit.py', shared, env=env)
    assert [o[2] for o in said] == [0, 0], said[0][1][:6000]+said[1][1][:6000]
    ranks = [json.loads((shared/f'rank{r}.json').read_text()) for r in range(4)]
    assert all(o['world'] == '4' and o['weights'] == ranks[0]['weights'] for o in ranks)
    assert '4 workers (torchrun, gloo) x batch 16 = 64 per step' in said[0][0] and 'workers (' not in said[1][0]
