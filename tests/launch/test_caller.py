"""The notebook as a rank of `ranch` and `in_torchddp`: what it keeps, a table of faults, Ctrl-C at any moment. After
each call the process is as before, and the next call works. Limits are bounds of tests that wait: nothing is timed."""
import collections, gc, json, logging, os, random, resource, signal, subprocess, sys, threading, time
from pathlib import Path
import psutil, pytest, torch, torch.distributed as dist
from fastddp.all import CantDistribute, RankDied, RankRaised, TorchDDPCtx, in_torchddp, ranch
from fastddp.base import group
from fastddp.base.errors import GroupTimeout
from fastddp.launch import caller
from learners import make_learner
from spread import long_but
from traces import handlers

CPU = dict(use_gpu=False)
root = Path(__file__).resolve().parent.parent.parent


def me(): return int(os.environ['LOCAL_RANK'])


def total(x=1.):
    t = torch.tensor([float(x)])
    dist.all_reduce(t)
    return t.item()


def state():
    "What a call must not change in this process. A collection of garbage is no excuse: descriptors go at once"
    env = {k: v for k, v in os.environ.items() if k != 'PYTEST_CURRENT_TEST'}
    return dict(env=env, cwd=os.getcwd(), threads=torch.get_num_threads(),
                handlers=handlers(), group=group.in_group(),
                hooks=[sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook],
                logging=[*logging.getLogger().handlers], listeners=listeners(),
                names=sorted(t.name for t in threading.enumerate() if t.name.startswith('fastddp')),
                sockets=sorted(o for o in map(target, os.listdir('/proc/self/fd')) if o.startswith('socket:')),
                others=collections.Counter(target(o).split(':')[0] for o in os.listdir('/proc/self/fd')
                                           if not target(o).startswith(('socket:', '/proc/'))))


def listeners():
    "Ports on which this process listens"
    return {o.laddr.port for o in psutil.Process().net_connections('tcp') if o.status == psutil.CONN_LISTEN}


def target(fd):
    try: return os.readlink(f'/proc/self/fd/{fd}')
    except OSError: return ''


def averaged(model):
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.ones(1, 2)).sum().backward()


@pytest.fixture
def as_before():
    ranch(2, me)        # the helper has its connections
    gc.collect()
    before = state()
    gc.disable()
    yield
    # one that was killed while gloo connected is waited for in a thread, for a while
    for thread in threading.enumerate():
        if thread.name == 'fastddp-join': thread.join(60)
    after = state()
    gc.enable()
    assert {k: (before[k], after[k]) for k in before if before[k] != after[k]} == {}
    assert signal.set_wakeup_fd(-1) == -1
    assert in_torchddp(2, total, **CPU) == 2. and ranch(2, me) == [0, 1]


# What the notebook's rank keeps

def test_its_result_needs_no_pickle(as_before):
    lock, made = threading.Lock(), []
    def work():
        if me(): return 'of the worker'
        made.append(lambda: lock)
        return lock, made[0]
    res = ranch(2, work)
    assert res[0] == (lock, made[0]) and res[0][0] is lock and res[1] == 'of the worker'
    assert ranch(2, lambda: lock if me() == 1 else None, caller_rank=1, gather=False) is lock


def test_what_it_changes_has_changed(as_before):
    model, seen = torch.nn.Linear(2, 1), {}
    def train(model):
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        opt = torch.optim.SGD(model.parameters(), lr=.1)
        for _ in range(3):
            ddp(torch.full((4, 2), me()+1.)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        seen[me()] = dist.get_rank()
        return model
    before = [p.clone() for p in model.parameters()]
    assert in_torchddp(2, train, model, **CPU) is model and seen == {0: 0}
    assert any((a != b).any() for a, b in zip(before, model.parameters()))


def test_a_name_that_it_defines_is_there(as_before):
    def work():
        global defined_by_the_function
        defined_by_the_function = os.getpid()
    try:
        ranch(2, work)
        assert defined_by_the_function == os.getpid()
    finally: globals().pop('defined_by_the_function', None)


def test_imports_are_the_notebooks_too(as_before):
    main = vars(sys.modules['__main__'])
    try:
        assert ranch(2, eval, 'Frac(1, 2).denominator', main, imports='from fractions import Fraction as Frac',
                     gather=False) == 2
        assert main['Frac'](1, 2).denominator == 2
    finally: main.pop('Frac', None)
    with pytest.raises(ModuleNotFoundError): ranch(2, me, imports='import nosuchmodule')


def test_its_output_is_the_cells_own(as_before, capsys):
    def work():
        print('I am', me())
        return sys.stdout is not None
    ranch(3, work)
    assert capsys.readouterr().out == 'I am 0\n'
    ranch(3, work, caller_rank=2)
    assert capsys.readouterr().out == 'I am 2\n'


@pytest.mark.few(2)
@pytest.mark.parametrize('how', ['returns', 'raises'])
@pytest.mark.parametrize('ctx', [False, True])
def test_the_process_is_as_before(as_before, tmp_path, how, ctx):
    def work():
        os.chdir(tmp_path)
        os.environ.update(OF_THE_FUNCTION='1', HOME='/nowhere')
        torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
        names = {k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')}
        if how == 'raises': raise KeyError(names)
        return names
    kwargs = dict(ctx=TorchDDPCtx(**CPU)) if ctx else {}
    if how == 'returns': names = ranch(2, work, caller_rank=1, gather=False, **kwargs)
    else:
        with pytest.raises((KeyError, RankRaised)): ranch(2, work, caller_rank=1, **kwargs)
        return
    ranks = ('1', '2') if ctx else (None, None)
    assert names == dict(RANK=ranks[0], WORLD_SIZE=ranks[1], LOCAL_RANK='1', LOCAL_WORLD_SIZE='2')


def test_a_group_that_the_function_does_not_destroy(as_before, tmp_path):
    def work():
        dist.init_process_group('gloo', store=dist.FileStore(str(tmp_path/'meet'), 2), rank=me(), world_size=2)
        return total()
    assert ranch(2, work) == [2., 2.]


def test_one_context_manager_for_many_calls(as_before):
    ctx = TorchDDPCtx(**CPU)
    assert [ranch(2, total, ctx=ctx, caller_rank=o) for o in (0, 1, None)] == [[2., 2.]]*3


def test_the_notebook_waits_and_says_for_whom(as_before, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(caller, '_PATIENCE', 2.)
    def work():
        "Rank 2 ends first, then rank 0, in this process, and rank 1 five seconds later"
        waits_for = {0: 'two', 1: 'go'}.get(me())
        if me() == 2: (tmp_path/'two').touch()
        while waits_for and not (tmp_path/waits_for).exists(): time.sleep(.01)
        if me() == 0: threading.Timer(5, (tmp_path/'go').touch).start()
    ranch(3, work)
    assert capsys.readouterr().out == 'Rank 0, in this process, has ended. It waits for rank 1.\n'


@pytest.mark.parametrize('path', long_but(['launch/513_caller', 'tutorials/ranch']))
def test_a_notebook_in_the_main_thread(path, tmp_path):
    "All of its cells, also those that nbdev's thread leaves out"
    cells = json.loads((root/'nbs'/f'{path}.ipynb').read_text(encoding='utf-8'))['cells']
    code = '\n'.join(''.join(o['source']) for o in cells if o['cell_type'] == 'code')
    (tmp_path/'cells.py').write_text(code.replace('import nbdev; nbdev.nbdev_export()', ''), encoding='utf-8')
    env = {**os.environ, 'PYTHONPATH': str(root)}
    r = subprocess.run([sys.executable, 'cells.py'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert r.returncode == 0, r.stdout+r.stderr


def test_a_fit_inside(as_before):
    "In a process in which torch has made no DDP yet, too: no part of torch keeps the group"
    def fit(): make_learner().distrib_fit(1)
    in_torchddp(2, fit, **CPU)
    gc.collect()        # a learner refers to itself


NEW = '''
import gc, os, sys
sys.path[:0] = [{tests!r}, {tests!r}+'/launch']
import torch
from test_caller import CPU, averaged, in_torchddp, state, total
if __name__ == '__main__':
    in_torchddp(2, total, **CPU)
    before = state()
    in_torchddp(2, averaged, torch.nn.Linear(2, 1), **CPU)
    after = state()
    print({{k: (before[k], after[k]) for k in before if before[k] != after[k]}})
'''


def test_the_first_ddp_of_a_process(tmp_path):
    (tmp_path/'new.py').write_text(NEW.format(tests=str(root/'tests')))
    r = subprocess.run([sys.executable, '-W', 'ignore', 'new.py'], cwd=tmp_path, capture_output=True, text=True,
                       timeout=100)
    assert r.stdout.endswith('{}\n'), r.stdout+r.stderr


# Refusals

def test_refusals(as_before, monkeypatch):
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)      # torch replaces it
    with pytest.raises(CantDistribute, match='wait=False.*caller_rank=None'): ranch(2, me, wait=False)
    store = dist.HashStore()
    dist.init_process_group('gloo', store=store, rank=0, world_size=1)
    try:
        with pytest.raises(CantDistribute, match='%%dip.*caller_rank=None'): ranch(2, me)
        assert ranch(2, me, caller_rank=None) == [0, 1]
    finally: dist.destroy_process_group()


def test_inside_a_block(as_before):
    learn = make_learner()
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        assert in_torchddp(2, total, **CPU) == 2.
        learn.fit(1)


# Faults

def fault(what, rank=1):
    "What happens on one rank"
    if me() != rank: return
    if what == 'raises': raise KeyError('the cause')
    if what == 'exits': os._exit(3)
    if what == 'leaves': sys.exit(4)
    if what == 'is killed': os.kill(os.getpid(), signal.SIGKILL)
    if what == 'has no descriptors':
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        while True: os.dup(0)


def loop(what, when):
    "A fault of rank 1 before, in and after a collective, or while the notebook computes alone"
    if when == 'before': fault(what)
    total()
    if when != 'before': fault(what)
    while True: time.sleep(.01) if when == 'alone' else total()


ERRORS = {'raises': RankRaised, 'exits': RankDied, 'leaves': RankRaised, 'is killed': RankDied,
          'has no descriptors': RankRaised}


@pytest.mark.few(2)
@pytest.mark.spread
@pytest.mark.parametrize('n,mine', [(2, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize('when', ['before', 'in', 'alone'])
@pytest.mark.parametrize('what', ERRORS)
def test_a_fault_of_a_worker(as_before, what, when, n, mine):
    with pytest.raises(ERRORS[what]) as e: in_torchddp(n, loop, what, when, caller_rank=mine, **CPU)
    assert e.value.rank == 1


def test_the_notebooks_own_error_is_raised_as_it_is(as_before):
    def fails():
        if me() == 0: raise KeyError('of the notebook')
        total()
    with pytest.raises(KeyError, match='of the notebook'): in_torchddp(3, fails, **CPU)


def test_workers_that_wait_too_long_name_the_notebook(as_before):
    def late():
        if me() == 0: time.sleep(60)
        total()
    with pytest.raises(GroupTimeout) as e: ranch(2, late, ctx=TorchDDPCtx(timeout=2, **CPU))
    assert e.value.rank == 0 and 'time.sleep(60)' in str(e.value)


# Ctrl-C

def press(*pauses):
    "Ctrl-C for this process after each pause"
    def go():
        for o in pauses:
            time.sleep(o)
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=go)
    thread.start()
    return thread


def collectives():
    while True: total()


def python():
    while True: time.sleep(.01)


def stopped():
    total()
    if me() == 1: os.kill(os.getpid(), signal.SIGSTOP)
    total()


def one_never_returns():
    while me() == 1: time.sleep(.01)


@pytest.mark.few(2)
@pytest.mark.parametrize('what', [collectives, python, stopped, one_never_returns])
def test_ctrl_c(as_before, what):
    thread = press(3)
    with pytest.raises(KeyboardInterrupt): in_torchddp(2, what, **CPU)
    thread.join()


@pytest.mark.full
@pytest.mark.parametrize('seed', range(20))
def test_ctrl_c_at_any_moment(as_before, seed):
    "Twice in a row; both are pressed before anything else happens"
    pauses = random.Random(seed).uniform(0, 1.2), random.Random(seed).choice([0., .01, .3])
    ended = []
    try:
        thread = press(*pauses)
        try: in_torchddp(2, collectives, **CPU)
        except KeyboardInterrupt: ended.append(1)
        thread.join()
    except KeyboardInterrupt:       # the second one, after the call
        thread.join()
    assert ended


def test_a_function_that_handles_ctrl_c_returns(as_before, tmp_path):
    def work():
        try:
            (tmp_path/str(me())).write_text('')
            while True: time.sleep(.01)
        except KeyboardInterrupt: return f'stopped {me()}'
    def go():
        while len(list(tmp_path.iterdir())) < 2: time.sleep(.02)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=go, daemon=True).start()
    assert ranch(2, work) == ['stopped 0', 'stopped 1']
