"""Ray's machines: a head on this one and a node in a network namespace, two ranks on each. What holds on one machine
holds there; what becomes of a lost one: test_ray_losses.py."""
import builtins, json, os, re, signal, subprocess, sys, threading, time, warnings
from pathlib import Path
import psutil, pytest, torch
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import SaveModelCallback
from fastai.metrics import accuracy
from faults import OneFault, Slow
from parity import assert_same, fit_both, learner, seed, alone_like
from ray_cluster import (Cluster, WarmRay, as_it_was, connected, gone, groups, needs_ray, ours, shared,
                         skip_without_ray, wait_until, wait_until_free)
from test_interrupt import AfterThat, number, wait_for
from two_hosts import leaves_nothing, leaves_nothing_at_last, net
from fastddp.all import CantDistribute, GroupTimeout, Local, RankDied, RankRaised, Ray
from fastddp.base import board, group
from fastddp.launch.engine import Job
from fastddp.machines import ray as launch_ray
from fastddp.payload.sending import dump_with_patches
from fastddp.process import helper
from fastddp.process.helper import sweep

pytestmark = pytest.mark.timeout(600)


# Without a cluster

@pytest.mark.parametrize('environ', [{}, pytest.param(dict(RAY_ADDRESS='ray://head:10001'), marks=skip_without_ray)])
def test_a_client_is_refused(environ, monkeypatch):
    for k, v in environ.items(): monkeypatch.setenv(k, v)
    with pytest.raises(CantDistribute, match='ray://head:10001: a Ray client is outside the cluster') as caught:
        learner().distrib_fit(1, launcher=Ray(None if environ else 'ray://head:10001'))
    assert '\n' not in str(caught.value)


def test_ray_is_not_there(monkeypatch):
    "One sentence says how to install it"
    real = builtins.__import__
    def without(name, *args, **kwargs):
        if name.split('.')[0] == 'ray' and not (args and args[0].get('__package__') == 'ray'): raise ImportError(name)
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', without)
    with pytest.raises(CantDistribute, match=r"^Ray\(\) needs Ray: pip install 'fastddp\[ray\]'.$"): Ray().place()


@skip_without_ray
@pytest.mark.parametrize('address', ['nobody-listens:1', 'no address'])
def test_no_cluster(address):
    "One line, and nothing of Ray's stays"
    import ray
    with pytest.raises(CantDistribute, match='^Ray has no cluster to connect to: .*names one.$') as caught:
        learner().distrib_fit(1, launcher=Ray(address))
    assert '\n' not in str(caught.value) and not ray.is_initialized()


@pytest.mark.full
def test_fastddp_does_not_import_ray():
    code = "import sys, fastddp.all; fastddp.all.Ray; assert not [o for o in sys.modules if o.split('.')[0] == 'ray']"
    subprocess.run([sys.executable, '-c', code], check=True, timeout=200)


def has_ray(ctx, obj): return 'ray' in sys.modules


@skip_without_ray
def test_workers_of_a_notebook_that_has_imported_ray_do_not():
    "Ray's filters of warnings have classes of its own"
    with as_it_was(), warnings.catch_warnings():
        from ray.util.annotations import RayDeprecationWarning
        # as the first import of Ray in a process does
        warnings.filterwarnings('default', category=RayDeprecationWarning)
        with Local(gpus=[]) as local: assert local.run(Job.of(has_ray, None), 2).results == [False, False]


# With one

@pytest.fixture(scope='module')
def cluster(net, leaves_nothing_at_last):
    cluster = Cluster(net)
    try:
        cluster.start(resources=dict(there=1))
        with connected(cluster): yield cluster
    finally: cluster.stop()


@pytest.fixture(scope='module')
def machines(cluster):
    launcher = WarmRay(per_node=2, link_timeout=60., start_timeout=240.)
    try:
        learner(train=8, valid=1).distrib_fit(1, nprocs=4, launcher=launcher)
        yield launcher
    finally: launcher.end()


@needs_ray
def test_a_fit_equals_one_process(machines, cluster, capsys):
    assert_same(*fit_both(learner(), 4, machines, 2))
    said = capsys.readouterr().out
    assert said.startswith('4 workers (2 machines x 2 on the CPU, gloo over '), said


@needs_ray
def test_a_block(machines):
    "A fit, a validation and predictions on the same workers"
    learn = learner()
    one = alone_like(learn, 4)
    for o, ctx in (learn, learn.distrib_ctx(nprocs=4, launcher=machines)), (one, one.no_bar()):
        seed(1)
        with ctx:
            o.fit(1)
            o.found = o.validate(), o.get_preds()[0]
    assert_same(learn, one)
    assert list(learn.found[0]) == pytest.approx(list(one.found[0]), abs=1e-5)
    assert torch.allclose(learn.found[1], one.found[1], atol=1e-5)


@needs_ray
@pytest.mark.full
def test_a_job(machines):
    "In the background as in the foreground"
    one, learn = learner(), learner()
    seed(1)
    one.distrib_fit(2, nprocs=4, launcher=machines)
    seed(1)
    learn.distrib_fit(2, nprocs=4, launcher=machines, wait=False).result(120)
    assert_same(learn, one)


def where(ctx, obj):
    return {o: os.environ.get(o) for o in ('RANK','LOCAL_RANK','LOCAL_WORLD_SIZE','MINE')} | dict(
        local=ctx.local_rank, cwd=os.getcwd(), net=os.readlink('/proc/self/ns/net'), total=float(obj.sum()),
        path=os.environ['PATH'])


@needs_ray
@pytest.mark.full
def test_ranks_know_where_they_are(machines, monkeypatch):
    "Two at home and two on the other machine, with much data; folder and variables are the notebook's"
    monkeypatch.setenv('MINE', 'yes')
    monkeypatch.chdir('/')
    res = machines.run(Job.of(where, torch.ones(10_000_000)), 4).results
    assert [o['RANK'] for o in res] == list('0123') and [o['LOCAL_RANK'] for o in res] == list('0101')
    assert [o['local'] for o in res] == [0, 1, 0, 1]
    assert {(o['LOCAL_WORLD_SIZE'], o['MINE'], o['cwd'], o['total']) for o in res} == {('2', 'yes', '/', 1e7)}
    nets = [o['net'] for o in res]
    assert nets[0] == nets[1] == os.readlink('/proc/self/ns/net') != nets[2] == nets[3]


def at_the_board(ctx, _):
    b = board.group_board()
    return [*b.on_host], b.between_hosts is not None, [row[:2] for row in b.meet([ctx.rank, .5])]


@needs_ray
@pytest.mark.full
def test_the_ranks_meet_over_one_page_per_machine_and_one_exchange(machines):
    ranks = machines.run(Job.of(at_the_board, None), 4).results
    assert [here for here, *_ in ranks] == [[0, 1]]*2 + [[2, 3]]*2
    assert [leads for _, leads, _ in ranks] == [True, False, True, False]
    assert all(said == [(r, .5) for r in range(4)] for *_, said in ranks)


def secrets_here(ctx, obj): return {k: os.environ.get(k) for k in ('MY_API_KEY', 'DB', 'HF_TOKEN')}


@needs_ray
def test_what_the_notebook_was_started_with_stays_there(monkeypatch):
    "What a cell has set goes, and what libraries read: a list of what goes, not of what doesn't"
    started = dict(DB_PASS='a', MY_DSN='b', NETRC='c', DATA='d', OMP_NUM_THREADS='2', HF_HOME='/data', HF_TOKEN='e')
    for k, v in started.items(): monkeypatch.setenv(k, v)
    monkeypatch.setattr(helper, 'env_at_start', lambda: dict(started, DATA='before'))
    found = launch_ray.surroundings(False, ['MY_DSN'])[0]
    goes = dict(MY_DSN='b', DATA='d', OMP_NUM_THREADS='2', HF_HOME='/data')
    assert {k: found[k] for k in started if k in found} == goes
    assert started.items() <= launch_ray.surroundings(True, [])[0].items()


@needs_ray
def test_secrets_stay_on_the_notebooks_machine(machines, monkeypatch):
    "Apart from those that are named"
    secrets = dict(MY_API_KEY='a', DB='postgres://me:b@host', HF_TOKEN='c')
    for k, v in secrets.items(): monkeypatch.setenv(k, v)
    machines.place(4)
    for m in machines.machines: monkeypatch.setattr(m, 'secrets', ['HF_TOKEN'])
    found = machines.run(Job.of(secrets_here, None), 4).results
    assert found == [secrets]*2 + [dict(MY_API_KEY=None, DB=None, HF_TOKEN='c')]*2


def listening(ctx, obj):
    return {o.laddr.ip for o in psutil.Process().net_connections('tcp') if o.status == psutil.CONN_LISTEN}


@needs_ray
def test_ranks_listen_at_rays_address_only(machines, cluster):
    "And so does the store at which they meet, in the first machine's actor, whose other ports are Ray's"
    found = machines.run(Job.of(listening, None), 4).results
    assert set().union(*found[:2]) == {cluster.head} and set().union(*found[2:]) == {cluster.other}
    _, port = machines._rendezvous.rsplit(':', 1)
    actor = ours(cluster.nodes[0])[0]
    assert [o.laddr.ip for o in actor.net_connections('tcp') if o.status == psutil.CONN_LISTEN
            and o.laddr.port == int(port)] == [cluster.head]


def call_it(ctx, obj): return obj['fn'](21), os.getcwd()


@needs_ray
def test_modules_of_ones_own_go_along(machines, tmp_path, monkeypatch):
    "From a folder that the other machine doesn't have, whose ranks work in one of their own; an edit in a block counts"
    file = tmp_path/'my_own_words.py'
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text('def double(x): return 2*x')
    from my_own_words import double
    try: res = machines.run(Job.of(call_it, dump_with_patches(dict(fn=double), {})), 4).results
    finally: del sys.modules['my_own_words']
    assert [o[0] for o in res] == [42]*4 and [o[1] == str(tmp_path) for o in res] == [True, True, False, False]


class Says(Slow):
    "A callback that prints while it trains"
    def before_epoch(self): print(f'epoch {self.epoch} of {os.environ["RANK"]}')


@needs_ray
@pytest.mark.full
def test_live_output(machines, shared, capsys):
    learner(cbs=[Says(0, shared)]).distrib_fit(2, nprocs=4, launcher=machines)
    said = capsys.readouterr().out
    assert [o for o in said.splitlines() if ' of 0' in o] == ['epoch 0 of 0', 'epoch 1 of 0'] and 'of 3' not in said


@needs_ray
@pytest.mark.full
def test_lr_find(machines, tmp_path):
    learn = learner(train=200)
    one = alone_like(learn, 4)
    for o in learn, one: o.path, o.found = tmp_path, []
    seed(1)
    a = learn.distrib_lr_find(num_it=20, show_plot=False, nprocs=4, launcher=machines)
    seed(1)
    assert a.valley == pytest.approx(one.lr_find(num_it=20, show_plot=False).valley)


@needs_ray
@pytest.mark.full
def test_stop_and_resume(machines, shared):
    "Ctrl-C stops all four ranks after the same batch, and the fit goes on"
    learn = learner(train=160, cbs=[Slow(.02, shared)])
    AfterThat(shared/'done3', 12)
    with pytest.raises(KeyboardInterrupt): learn.distrib_fit(3, nprocs=4, launcher=machines)
    assert len({number(shared/f'done{r}') for r in range(4)}) == 1
    assert 12 <= len(learn.recorder.lrs) < 30
    learn.distrib_resume()
    assert len(learn.recorder.values) == 3


@needs_ray
@pytest.mark.full
def test_files_that_a_machine_does_not_have(machines, cluster, tmp_path, shared):
    "The items of the loaders name them; each machine has a /tmp of its own"
    for folder in tmp_path, shared: (folder/'a.pt').touch()
    learn = learner()
    learn.dls.train.dataset = Named(learn.dls.train.dataset, shared/'a.pt')
    learn.distrib_fit(1, nprocs=4, launcher=machines)
    learn.dls.train.dataset = Named(learn.dls.train.dataset, tmp_path/'a.pt')
    with pytest.raises(CantDistribute, match=f"^{cluster.other} doesn't have {tmp_path}/a.pt"):
        learn.distrib_fit(1, nprocs=4, launcher=machines)


class Named(list):
    "A data set with `items`, as fastai's have"
    def __init__(self, data, path):
        super().__init__(data)
        self.items = [(path, 'cat')]*len(data)


def faulty(what, rank, folder):
    return learner(cbs=[OneFault(what, 'before_batch/train', rank, 1, 1, marker=str(folder/'fired'))])


@needs_ray
def test_a_rank_raises(machines, shared):
    "On the other machine: its own traceback, and the last complete epoch"
    learn = faulty('library', 3, shared)
    with pytest.raises(RankRaised) as caught: learn.distrib_fit(3, nprocs=4, launcher=machines)
    assert caught.value.rank == 3 and 'wrong on purpose' in str(caught.value) and 'faults.py' in str(caught.value)
    assert len(learn.recorder.values) == 1


@needs_ray
@pytest.mark.full
def test_a_rank_dies(machines, cluster, shared):
    "The error names the machine, the last complete epoch is kept, the next fit works"
    learn = faulty('SIGKILL', 2, shared)
    with pytest.raises(RankDied) as caught: learn.distrib_fit(3, nprocs=4, launcher=machines)
    assert f'rank 2 on {cluster.other} died: killed by SIGKILL (epoch 1, batch 1)' in str(caught.value)
    assert len(learn.recorder.values) == 1 and 'the end of epoch 0' in str(caught.value)
    assert_same(*fit_both(learner(), 4, machines, 1))


@needs_ray
@pytest.mark.full
def test_a_restart_goes_on(machines, shared, capsys):
    learn = faulty('SIGKILL', 1, shared)
    learn.distrib_fit(3, nprocs=4, launcher=machines, restarts=1)
    assert 'Going on with epoch 1' in capsys.readouterr().out and len(learn.recorder.values) == 3


@needs_ray
@pytest.mark.full
def test_a_rank_hangs(machines, shared):
    "Heartbeats and stacks come by calls"
    learn, machines.timeout = faulty('SIGSTOP', 3, shared), 20.
    try:
        with pytest.raises(GroupTimeout) as caught: learn.distrib_fit(3, nprocs=4, launcher=machines)
    finally: machines.timeout = None
    assert caught.value.rank == 3 and 'does not react' in str(caught.value)
    assert re.search(r'Rank 0, epoch 1, batch 1:\n  (\.\.\.|File)', str(caught.value))


def connects(ctx, obj):
    if ctx.rank == 3: raise ConnectionResetError(104, 'Connection reset by peer')
    group.all_sum([1.])


@needs_ray
@pytest.mark.full
def test_a_connection_of_ones_own(machines):
    "It broke on one rank, and is not the network between the machines"
    with pytest.raises(RankRaised, match='rank 3 raised ConnectionResetError'): machines.run(Job.of(connects, None), 4)


@needs_ray
@pytest.mark.full
def test_another_version(machines, cluster, monkeypatch):
    "Another clone with the same version, and a line more"
    machines.end()
    monkeypatch.setattr(launch_ray, 'versions', lambda: dict(fastddp='1.0+00000000'))
    with pytest.raises(CantDistribute) as caught: machines.place(4)
    lines = str(caught.value).splitlines()
    assert [o.split(':')[0] for o in lines] == ['localhost', cluster.other]
    says = r'has fastddp [^ ]+\+\w{8}, the notebook 1.0\+0{8}; they have to be the same'
    assert all(re.search(says, o) for o in lines)


@needs_ray
@pytest.mark.full
def test_ctrl_c_while_workers_start(machines, cluster, monkeypatch):
    "The helper process there never gets ready"
    machines.end()
    monkeypatch.setattr(helper, '_preload', [*helper._preload, 'signal:pause'])
    wait_until_free(CPU=4)
    with Ray(per_node=2, start_timeout=240.) as launcher:
        launcher.place()
        actors = ours(cluster.nodes[0])[:1] + ours(cluster.nodes[1])[:1]
        threading.Timer(8, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt): launcher.run(Job.of(where, torch.ones(1)), 4)
        assert len(actors) == 2 and gone(actors, 20) == []
    wait_until_free(CPU=4)


@needs_ray
@pytest.mark.full
def test_files_of_a_fit_come_home(machines, cluster, tmp_path):
    "The notebook's machine hasn't what is asked for, so rank 0 is on the other one, which has a /tmp of its own"
    machines.end()
    wait_until_free(CPU=4)
    # models needn't lie below the path
    run = tmp_path/'run'
    run.mkdir()
    learn = learner(path=run, model_dir=tmp_path/'best', metrics=[accuracy])
    learn.logger = print
    (run/'mine.csv').write_text('as before')
    learn.distrib_fit(2, launcher=Ray(nodes=1, per_node=2, resources=dict(there=1), start_timeout=240.),
                      cbs=[SaveModelCallback(every_epoch=True), CSVLogger()])
    assert sorted(o.name for o in (tmp_path/'best').iterdir()) == ['model_0.pth', 'model_1.pth']
    assert len((run/'history.csv').read_text().splitlines()) == 3
    assert (run/'mine.csv').read_text() == 'as before'
    weights = [p.tolist() for p in learn.model.parameters()]
    assert [p.tolist() for p in learn.load('model_1').model.parameters()] == weights


@needs_ray
@pytest.mark.full
def test_what_others_use(machines):
    "The cluster is all ours: another one is told what is free, and more than there is can't be"
    machines.place(4)
    says = 'asked for 2 machines with 2 CPU each, and others use them: free are 0 CPU'
    with pytest.raises(CantDistribute, match=says):
        Ray(per_node=2).place()
    says = r'0 machines of the cluster have what Ray was asked for \(3 CPU on at least 1'
    with pytest.raises(CantDistribute, match=says):
        Ray(per_node=3).place()


@needs_ray
@pytest.mark.full
def test_all_is_given_back(machines, cluster, shared):
    "After a block, and after a call that fails"
    machines.end()
    wait_until_free(CPU=4)
    with pytest.raises(RankRaised): faulty('library', 3, shared).distrib_fit(3, launcher=Ray(per_node=2))
    wait_until_free(CPU=4)


@pytest.fixture
def others(cluster, monkeypatch):
    "Somebody else has all cores; Ray has a second to say that there is room"
    import ray
    monkeypatch.setattr(launch_ray, '_SOON', 1.)
    wait_until_free(CPU=4)
    group = ray.util.placement_group([{'CPU': 2}]*2, 'STRICT_SPREAD')
    assert group.wait(60)
    yield group
    ray.util.remove_placement_group(group)
    wait_until_free(CPU=4)


def when_it_waits(do):
    "Calls `do` when a call has waited for longer than one that doesn't want to wait would"
    def run():
        wait_until(lambda: groups('PENDING'))
        time.sleep(4)
        do()
    thread = threading.Thread(target=run)
    thread.start()
    return thread


@needs_ray
@pytest.mark.full
def test_waits_for_what_others_use(others, monkeypatch):
    "A line says so meanwhile"
    import ray
    said = []
    monkeypatch.setattr(launch_ray.StatusLine, 'show', lambda self, text: said.append(text))
    with pytest.raises(CantDistribute, match='others use them: free are 0 CPU.* wait= says for how many seconds'):
        Ray(per_node=2).place()
    wait_until(lambda: not groups('PENDING'))
    thread = when_it_waits(lambda: ray.util.remove_placement_group(others))
    learn = learner(train=16, valid=4)
    learn.distrib_fit(1, launcher=Ray(per_node=2, wait=120, start_timeout=240.))
    thread.join()
    assert len(learn.recorder.values) == 1 and said[-1] == ''
    assert 'asked for 2 machines with 2 CPU each. Waiting' in said[1]


@needs_ray
@pytest.mark.full
def test_an_interrupt_while_it_waits(others):
    "What is asked for isn't asked for any more"
    thread = when_it_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt): learner().distrib_fit(1, launcher=Ray(per_node=2, wait=120))
    thread.join()
    wait_until(lambda: not groups('PENDING'))
    assert len(groups('CREATED')) == 1


@needs_ray
@pytest.mark.full
def test_the_notebook_connects_by_itself_and_dies(cluster, shared):
    """`Ray(address)` connects, and disconnects at the end of the call; so does Ray() with RAY_ADDRESS. Nothing of Ray's
    appears in the notebook. When it is killed, nothing is left anywhere, and the cluster has its resources again"""
    wait_until_free(CPU=4)
    argv = [sys.executable, '-Wignore', Path(__file__).parent.with_name('script_ray.py'), cluster.address, shared]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        try:
            said = [p.stdout.readline() for _ in range(4)]
            assert said[0].startswith('2 workers (1 machine x 2 on the CPU, gloo over '), said+[p.stdout.readline()]
            assert said[2] == 'as before\n' and said[3].startswith('4 workers (2 machines x 2 on the CPU, '), said
            wait_for(shared/'done3')
            at_home, there = ours(cluster.nodes[0]), ours(cluster.nodes[1])
            assert len(at_home) >= 3 and len(there) >= 3
        finally: p.kill()
        assert gone([*at_home, *there], 30) == []
        assert p.stdout.read() == ''
    wait_until_free(CPU=4)
    sweep()     # a worker that the system ends with its helper leaves a folder, which goes with the next start


@needs_ray
@pytest.mark.full
def test_the_tutorial(cluster):
    "Its cells, in a new process of this machine"
    wait_until_free(CPU=4)
    nb = json.loads((Path(__file__).parents[2]/'nbs/tutorials/two_machines.ipynb').read_text(encoding='utf-8'))
    cells = [''.join(o['source']) for o in nb['cells'] if o['cell_type'] == 'code']
    r = subprocess.run([sys.executable, '-Wignore', '-c', '\n'.join([*cells, 'print(len(preds))'])], cwd='/',
                       env=os.environ | dict(RAY_ADDRESS=cluster.address), capture_output=True, text=True, timeout=240)
    assert r.returncode == 0, r.stderr[-3000:]
    assert '2 workers (2 machines x 1 on the CPU, gloo over ' in r.stdout and r.stdout.endswith('\n512\n'), r.stdout
    wait_until_free(CPU=4)
