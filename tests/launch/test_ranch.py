"""Functions on many processes: as a script, in a kernel, from a thread; failures, interrupts, large results, nothing
left."""
import contextlib, datetime, multiprocessing, os, signal, socket, subprocess, sys, textwrap, threading, time
from pathlib import Path
import psutil, pytest, torch
from fastddp.all import (CantDistribute, RankDied, RankRaised, TorchDDPCtx, global_imports, import_star, in_torchddp,
                         ranch,
                         spawn)
from fastddp.base import group
from fastddp.base.errors import NotPicklable
from fastddp.cluster.cluster import Cluster
from fastddp.process import workers
from spread import long_but

root = Path(__file__).resolve().parent.parent.parent


def me(*_): return int(os.environ['LOCAL_RANK'])


def summed(x, use=1.):
    import torch.distributed as dist
    t = torch.full((3,), x + dist.get_rank())
    dist.all_reduce(t)
    return (t*use).tolist()


@pytest.mark.parametrize('caller', long_but([0, 1, 2, None], 1, None))
def test_results_by_rank_and_the_callers_own(caller):
    def who(): return me(), int(os.environ['LOCAL_WORLD_SIZE']), os.environ.get('RANK'), os.getpid()
    res = ranch(3, who, caller_rank=caller)
    assert [o[:3] for o in res] == [(0, 3, None), (1, 3, None), (2, 3, None)]
    assert [r for r, o in enumerate(res) if o[3] == os.getpid()] == ([] if caller is None else [caller])
    assert ranch(2, me, caller_rank=1, gather=False) == 1
    assert ranch(2, me, caller_rank=None, gather=False) is None


def test_one_process_is_the_notebook_itself():
    assert ranch(1, os.getpid) == [os.getpid()] and ranch(1, open, os.devnull)[0].close() is None
    assert ranch(1, os.getpid, caller_rank=None) != [os.getpid()]
    assert in_torchddp(1, summed, 1., use_gpu=False) == [1.]*3
    with pytest.raises(ZeroDivisionError): ranch(1, lambda: 1/0)


def test_the_result_and_the_output_of_one_rank(capsys):
    "The others' results need not be picklable then"
    def work():
        print('I am', me())
        return me() if me() == 1 else open(os.devnull)
    assert ranch(2, work, caller_rank=1, gather=False) == 1
    assert capsys.readouterr().out == 'I am 1\n'
    assert ranch(2, me, caller_rank=None, gather=False) is None


def test_variables_come_back_as_they_were(monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', 'mine')
    assert ranch(2, me) == [0, 1]
    assert os.environ['LOCAL_RANK'] == 'mine'


def test_a_stale_rank_does_not_reach_the_workers(monkeypatch):
    monkeypatch.setenv('RANK', '1')
    assert ranch(2, lambda: os.environ.get('RANK')) == [None, None]


class Noted:
    "A context manager that counts, by value in each process"
    depth = 0
    def __enter__(self): os.environ['NOTED'] = str(type(self).depth + 1)
    def __exit__(self, *_): del os.environ['NOTED']


def test_context_manager_around_each_call():
    assert ranch(2, lambda: os.environ['NOTED'], ctx=Noted()) == ['1', '1']
    assert 'NOTED' not in os.environ


FORMS = '''
    import math, os.path as osp
    from collections import (
        OrderedDict as OD,
        Counter)      # the last one
    from functools \\
        import reduce
    from string import *
'''


def test_all_forms_of_import():
    ns = {}
    global_imports(FORMS, ns)
    assert ns['osp'] is os.path and ns['Counter']('a') and ns['OD']() == {} and ns['reduce'] and ns['ascii_letters']
    global_imports(['import json', 'from math import pi'], ns)
    assert ns['json'] and ns['pi'] > 3
    import_star(['cmath'], ns)
    assert ns['phase'](1) == 0
    with pytest.raises(SyntaxError): global_imports('from os import (', {})
    with pytest.raises(ModuleNotFoundError): global_imports('import nosuchmodule', {})


def script(code, tmp_path, *args, timeout=100):
    "Run `code` as a script, or in IPython's shell with `args`"
    path = tmp_path/'script.py'
    path.write_text(textwrap.dedent(code))
    env = {**os.environ, 'PYTHONPATH': str(root)}
    r = subprocess.run([sys.executable, *args, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True,
                       timeout=timeout)
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


PLAIN = '''
    import os, threading
    from fastddp.ranch import ranch, spawn, in_torchddp
    offset = 100
    class Point:
        def __init__(self, x): self.x = x
        def moved(self): return Point(self.x + offset)
    def helper(p): return p.moved().x + int(os.environ['LOCAL_RANK'])
    def work(x): return helper(Point(x))
    def late(): return dec('1.5') + known
    known = 2
    print(ranch(2, work, 1))
    print(ranch(2, late, need='known', imports='from decimal import Decimal as dec'))
    print(ranch(2, late, need='known, offset', imports='from decimal import Decimal as dec'))
    print(spawn(lambda r, a: a*r, (3,), nprocs=2))
    got = []
    t = threading.Thread(target=lambda: got.append(ranch(2, work, 5)))
    t.start(); t.join()
    print(got)
    def outer(x):
        def inner(y): return x + y + offset
        return ranch(2, inner, 1)
    print(outer(1))
'''
SAID = ["[101, 102]", "[Decimal('3.5'), Decimal('3.5')]", "[Decimal('3.5'), Decimal('3.5')]", "[0, 3]", "[[105, 106]]",
        "[102, 102]"]


@pytest.mark.full
def test_in_a_plain_script(tmp_path):
    "Without the guard around the main code that multiprocessing asks for: it runs once"
    assert script(PLAIN, tmp_path).splitlines() == SAID


@pytest.mark.full
def test_in_the_ipython_shell(tmp_path):
    assert script(PLAIN, tmp_path, '-m', 'IPython', '--no-banner', '--colors=NoColor').splitlines() == SAID


@pytest.mark.full
def test_a_function_of_a_module_nearby(tmp_path):
    (tmp_path/'pack').mkdir()
    (tmp_path/'pack'/'__init__.py').write_text('')
    (tmp_path/'pack'/'deep.py').write_text('import os\nfrom fastddp.ranch import ranch\n'
                                           'def f(x): return x, os.environ["LOCAL_RANK"]\ndef go(): return ranch(2, '
                                           'f, 7)\n')
    assert script('from pack import deep\nprint(deep.go())', tmp_path) == "[(7, '0'), (7, '1')]\n"


def test_from_a_thread():
    got = []
    t = threading.Thread(target=lambda: got.append(in_torchddp(2, summed, 1., use_gpu=False)))
    t.start()
    t.join(60)
    assert got == [[3., 3., 3.]]


# A process group

def test_group_is_private_and_gone_afterwards(monkeypatch):
    monkeypatch.setenv('MASTER_PORT', 'nonsense')
    threads = torch.get_num_threads()
    assert in_torchddp(2, summed, 1., use=2., use_gpu=False) == [6., 6., 6.]
    assert ranch(2, summed, 0., ctx=TorchDDPCtx(world_size=2, use_gpu=False)) == [[1., 1., 1.]]*2
    assert not torch.distributed.is_initialized() and torch.get_num_threads() == threads
    assert os.environ['MASTER_PORT'] == 'nonsense' and 'RANK' not in os.environ


def listeners():
    "The addresses at which this process listens, once it is in a group"
    return sorted({c.laddr.ip for c in psutil.Process().net_connections('inet') if c.status == psutil.CONN_LISTEN})


LOOPBACK = {'127.0.0.1', '::1'}


@pytest.mark.parametrize('how', ['nothing', 'addr', 'addr and port', 'in_torchddp', 'cluster'])
def test_who_listens(how):
    "On one host: gloo, on the loopback; whatever address was given, nothing else, and nobody else's port is needed"
    taken = socket.create_server(('', 0))
    port = taken.getsockname()[1]
    given = {'addr': dict(addr='127.0.0.1'), 'addr and port': dict(addr='localhost', port=port)}.get(how, {})
    try:
        mine = listeners()
        if how == 'cluster':
            cluster = Cluster(nprocs=2)
            try: found = cluster.run(listeners)
            finally: cluster.shutdown()
        elif how == 'in_torchddp': found = [in_torchddp(2, listeners, use_gpu=False)]
        else: found = ranch(2, listeners, ctx=TorchDDPCtx(use_gpu=False, **given))
    finally: taken.close()
    assert {o for l in found for o in l} - set(mine) <= LOOPBACK and all(found)


def test_rank_0_of_several_hosts_listens_at_its_address_only():
    "The other host never comes"
    port = free_port()
    other = subprocess.Popen([sys.executable, '-c', MEET.format(port=port)], stdout=subprocess.PIPE, text=True)
    try: assert other.stdout.readline().strip() == '127.0.0.1'
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


MEET = '''
import psutil, threading, time
from fastddp.base import group
threading.Thread(target=group.join_at, args=('127.0.0.1', {port}, 0, 2), daemon=True).start()
while not (l := [c.laddr.ip for c in psutil.Process().net_connections('inet') if c.laddr.port == {port}
                 and c.status == psutil.CONN_LISTEN]): time.sleep(.02)
print(*l, flush=True)
'''


def test_two_groups_one_after_the_other_in_one_ranch():
    def twice():
        res = []
        for _ in range(2):
            with TorchDDPCtx(use_gpu=False): res += summed(1.)[:1]
        return res
    assert ranch(2, twice) == [[3., 3.], [3., 3.]]


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


HOST = '''
    import sys, torch
    from fastddp.ranch import TorchDDPCtx, ranch
    def total():
        import torch.distributed as dist
        t = torch.tensor([10**dist.get_rank()])
        dist.all_reduce(t)
        return t.item(), dist.get_world_size()
    base, port = int(sys.argv[1]), int(sys.argv[2])
    print(ranch(2, total, ctx=TorchDDPCtx(world_size=4, base_rank=base, use_gpu=False, addr='127.0.0.1', port=port)))
'''


@pytest.mark.full
def test_two_hosts_meet_at_an_address(tmp_path):
    path, port = tmp_path/'host.py', str(free_port())
    path.write_text(textwrap.dedent(HOST))
    env = {**os.environ, 'PYTHONPATH': str(root), 'GLOO_SOCKET_IFNAME': 'lo'}
    hosts = [subprocess.Popen([sys.executable, str(path), base, port], env=env, stdout=subprocess.PIPE, text=True)
             for base in '02']
    assert [h.communicate(timeout=100)[0] for h in hosts] == ['[(1111, 4), (1111, 4)]\n']*2


@pytest.mark.parametrize('kwargs,says', [
    (dict(world_size=1), "don't fit"), (dict(base_rank=1), "don't fit"), (dict(base_rank=-1), "don't fit"),
    (dict(world_size=4), 'addr= and port=')])
def test_ranks_that_do_not_fit(kwargs, says):
    with pytest.raises(CantDistribute, match=says): in_torchddp(2, summed, 1., use_gpu=False, **kwargs)


def test_a_group_that_cannot_be_joined_leaves_the_environment_as_it_was():
    def attempt():
        def refuse(*_): raise RuntimeError('nobody there')
        group.join = refuse
        before,ctx = dict(os.environ),TorchDDPCtx(use_gpu=False)
        with pytest.raises(RuntimeError, match='nobody there'): ctx.__enter__()
        return dict(os.environ) == before
    assert ranch(2, attempt, caller_rank=None) == [True, True]


def test_outside_of_a_ranch():
    with pytest.raises(CantDistribute, match='LOCAL_RANK'): TorchDDPCtx(world_size=2).__enter__()


@pytest.mark.parametrize('use_gpu,gpu', [(True, 1), (False, None)])
def test_a_gpu_for_each_process(monkeypatch, use_gpu, gpu):
    def use_device(gpu, threads): raise CantDistribute(f'device {gpu}')
    for k, v in dict(LOCAL_RANK='1', LOCAL_WORLD_SIZE='2').items(): monkeypatch.setenv(k, v)
    monkeypatch.setattr(group, 'n_gpus', lambda: 2)
    monkeypatch.setattr(group, 'use_device', use_device)
    with pytest.raises(CantDistribute, match=f'device {gpu}$'): TorchDDPCtx(use_gpu=use_gpu).__enter__()


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(group, 'n_gpus', lambda: 1)
    with pytest.raises(CantDistribute, match='2 processes, but 1 GPU is visible.*nprocs=1'): in_torchddp(2, me)
    assert in_torchddp(2, me, use_gpu=False) == 0


def in_small_pieces(rank):
    group._PIECE = 7
    own = dict(rank=rank, text='x'*100*rank, numbers=torch.arange(3.)+rank)
    return [o['numbers'].tolist()+[o['rank'], len(o['text'])] for o in group.all_gather_object(own)], \
        group.from_rank0('of rank 0'*9 if rank == 0 else None)


def test_objects_go_in_pieces():
    "What torch holds of them on a GPU stays small; ranks have different numbers of pieces"
    found = ranch(2, lambda: in_small_pieces(group.rank()), caller_rank=None, ctx=TorchDDPCtx())
    assert found == [([[0., 1., 2., 0, 0], [1., 2., 3., 1, 100]], 'of rank 0'*9)]*2


# Failures

@pytest.mark.parametrize('args,says', [((0, me), 'at least one'), ((-1, me), 'at least one')])
def test_no_process(args, says):
    with pytest.raises(CantDistribute, match=says): ranch(*args)


def test_caller_rank_that_is_none_of_them():
    with pytest.raises(CantDistribute, match='ranks 0 to 1'): ranch(2, me, caller_rank=2)


def test_an_error_says_which_function_it_was_in():
    def fails(rank): return [][rank]
    with pytest.raises(RankRaised) as e: spawn(fails, nprocs=2)
    assert e.value.failure.where == 'in fails' and 'batch_items' in e.value._render_traceback_()[-1]


def test_need_that_is_not_there():
    with pytest.raises(CantDistribute, match='nosuch'): ranch(2, me, need='nosuch')


def test_an_argument_that_cannot_travel(tmp_path):
    with open(tmp_path/'f', 'w') as f, pytest.raises(NotPicklable, match=r"args\[1\]\['log'\]"):
        ranch(2, lambda *a: None, 1, {'log': f})


def test_a_result_that_cannot_travel(tmp_path):
    "That of a worker"
    def opens(): return {'files': [open(os.devnull)]}
    with pytest.raises(RankRaised) as e: ranch(2, opens)
    assert e.value.rank == 1 and "opens(...)['files'][0] can't be sent to the notebook (an open file" in str(e.value)


def test_a_context_manager_that_handles_the_error():
    "On each rank the result is None then"
    assert ranch(2, lambda: 1/0, ctx=contextlib.suppress(ZeroDivisionError)) == [None, None]


def stuck(x):
    "Rank 1 fails while the others wait for it in a collective"
    if me() == 1: raise KeyError('the cause')
    return summed(x)


@pytest.mark.parametrize('caller', long_but([0, 2, None], 2))
def test_an_error_ends_ranks_that_wait_in_a_collective(caller):
    with pytest.raises(RankRaised) as e: ranch(3, stuck, 1., caller_rank=caller, ctx=TorchDDPCtx(use_gpu=False))
    assert e.value.rank == 1 and isinstance(e.value.__cause__, KeyError) and 'the cause' in str(e.value)
    assert not torch.distributed.is_initialized()


def dies(how):
    "Rank 1 dies while the other waits for it in a collective"
    summed(1.)
    if me() == 1: os._exit(3) if how == '_exit' else os.kill(os.getpid(), signal.SIGKILL)
    while True: summed(1.)


@pytest.mark.parametrize('how', ['_exit', 'kill'])
def test_a_dead_worker_leaves_the_notebook_in_no_group(how):
    env = dict(os.environ)
    for _ in range(3):
        with pytest.raises(RankDied): in_torchddp(2, dies, how, use_gpu=False)
        assert not torch.distributed.is_initialized() and dict(os.environ) == env
    assert in_torchddp(2, summed, 1., use_gpu=False) == [3.]*3


def test_a_group_that_did_not_come_about_keeps_no_later_one_waiting(tmp_path):
    store, soon = torch.distributed.FileStore(str(tmp_path/'meet'), 2), datetime.timedelta(seconds=.5)
    with pytest.raises(RuntimeError):
        torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=2, timeout=soon)
    assert ranch(2, summed, 1., ctx=TorchDDPCtx(use_gpu=False), gather=False) == [3.]*3


@pytest.mark.parametrize('how', ['_exit', 'kill'])
def test_a_dead_worker_is_noticed_while_the_notebook_computes(how):
    def work():
        if me() == 1: os._exit(3) if how == '_exit' else os.kill(os.getpid(), signal.SIGKILL)
        while True: time.sleep(.01)
    with pytest.raises(RankDied) as e: ranch(2, work)
    assert e.value.rank == 1 and ('SIGKILL' if how == 'kill' else 'code 3') in str(e.value)


def test_a_dead_worker_is_noticed_from_a_thread():
    def work():
        if me() == 1: os._exit(3)
        while True: time.sleep(.01)
    got = []
    def go():
        try: ranch(2, work)
        except RankDied as e: got.append(e.rank)
    t = threading.Thread(target=go)
    t.start()
    t.join(60)
    assert got == [1]


def interrupt_when(ready):
    "Ctrl-C for this process once `ready()`"
    def go():
        while not ready(): time.sleep(.02)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=go, daemon=True).start()


@pytest.mark.parametrize('caller', [0, None])
def test_interrupt(caller, tmp_path):
    def work():
        (tmp_path/str(me())).write_text('')
        while True: time.sleep(.01)
    interrupt_when(lambda: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(KeyboardInterrupt): ranch(2, work, caller_rank=caller)
    assert ranch(2, me) == [0, 1]


@pytest.mark.parametrize('caller', [0, None])
def test_interrupt_runs_the_clean_up_of_the_function(caller, tmp_path):
    def work():
        try:
            (tmp_path/f'ready{me()}').write_text('')
            while True: time.sleep(.01)
        finally: (tmp_path/f'clean{me()}').write_text('')
    interrupt_when(lambda: len(list(tmp_path.glob('ready*'))) == 2)
    with pytest.raises(KeyboardInterrupt): ranch(2, work, caller_rank=caller)
    assert len(list(tmp_path.glob('clean*'))) == 2


# Results

SIZE = 1_000_000_000 if os.environ.get('FASTDDP_FULL') else 100_000_000     # bytes


def test_large_results():
    res = ranch(2, lambda: torch.full((SIZE//4,), me()+1.))
    assert [(o.numel(), o[-1].item()) for o in res] == [(SIZE//4, 1.), (SIZE//4, 2.)]


def test_side_effects_stay_in_the_workers():
    seen = []
    res = ranch(2, lambda: seen.append(me()) or len(seen), caller_rank=None)
    assert res == [1, 1] and seen == []


def test_temporary_folders_of_a_library():
    "It keeps one as long as its process lives; wandb does"
    def keep():
        import sys, tempfile
        sys.kept = tempfile.TemporaryDirectory()
        return os.path.isdir(sys.kept.name), sys.kept.name
    found = ranch(2, keep, caller_rank=None)
    assert [there for there, _ in found] == [True]*2 and not any(os.path.exists(o) for _, o in found)


@pytest.mark.parametrize('caller', [0, None])
def test_output_of_rank_0_only(caller, capsys):
    ranch(2, lambda: print('I am', me()), caller_rank=caller)
    assert capsys.readouterr().out == 'I am 0\n'


# spawn

def test_spawn_shows_all_ranks_and_gives_results(capsys):
    def work(rank, a): print('rank', rank); return rank*a
    assert spawn(work, (2,), nprocs=2) == [0, 2]
    assert sorted(capsys.readouterr().out.splitlines()) == ['[rank 1] rank 1', 'rank 0']


def test_spawn_to_join_later(tmp_path):
    def work(rank):
        while not (tmp_path/'go').exists(): time.sleep(.01)
        if rank == 1: raise ValueError('oh no')
    job = spawn(work, nprocs=2, join=False)
    assert not job.join(timeout=.1)
    (tmp_path/'go').write_text('')
    with pytest.raises(RankRaised, match='rank 1 raised ValueError: oh no'): job.join()


class Unloadable:
    "Can be sent, and raises where it is loaded"
    def __init__(self, error): self.error = error
    def __getstate__(self): return self.__dict__
    def __setstate__(self, state): raise state['error']


@pytest.mark.parametrize('error', [ValueError('no'), SystemExit(3)])
def test_a_result_that_cannot_be_loaded(error):
    says = f'The result of rank 0 can.t be sent to the notebook .{type(error).__name__}: '
    with pytest.raises(NotPicklable, match=says): ranch(2, lambda: Unloadable(error), caller_rank=None)
    # the notebook's own result needs no pickle
    with pytest.raises(NotPicklable, match=says.replace('0', '1')): ranch(2, Unloadable, error)


def test_a_ranch_inside_of_a_ranch(capsys):
    "In the notebook's process and in a worker: it says that each starts workers of its own"
    pids = [*ranch(2, ranch, 2, os.getpid)[0], *ranch(2, lambda: ranch(2, os.getpid))[1]]
    assert len({*pids}) == 4 and pids[0] == os.getpid()
    said = capsys.readouterr().out
    assert said.count('inside of a ranch: each process that calls it starts 1 worker of its own') == 2


def test_nothing_runs_afterwards():
    assert [o for o in ranch(3, os.getpid) if psutil.pid_exists(o)] == [os.getpid()]


# Processes of the function's own

def forks(how):
    "The exit code of a process that leaves this function as `how` says"
    if not (pid := os.fork()):
        if how == 'raises': raise ValueError('wrong on purpose')
        if how == 'exits': sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def pool():
    import multiprocessing
    with multiprocessing.Pool(2) as p: return p.map(abs, [-1, -2])


def test_processes_that_a_function_starts():
    "A fork that leaves the function ends, and is not another worker; a worker may have children"
    assert ranch(2, forks, 'raises', caller_rank=None) == [1, 1]
    assert ranch(2, forks, 'exits', caller_rank=None) == [3, 3]
    assert ranch(2, pool) == [[1, 2]]*2


def test_threads_that_start_workers_at_a_time():
    "The environment, and what `__main__` says of itself, are as they were"
    main = sys.modules['__main__']
    was = dict(os.environ), getattr(main, '__file__', None), main.__spec__
    threads = [threading.Thread(target=lambda: [spawn(me) for _ in range(3)]) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert (dict(os.environ), getattr(main, '__file__', None), main.__spec__) == was


@pytest.mark.parametrize('caller', [0, None])
def test_interrupt_while_workers_end(caller, monkeypatch):
    "All of them end, and it is raised afterwards"
    real, freed = workers.remove_folder, []
    def remove(path):
        signal.raise_signal(signal.SIGINT)
        freed.append(real(path))
    monkeypatch.setattr(workers, 'remove_folder', remove)
    with pytest.raises(KeyboardInterrupt): ranch(2, me, caller_rank=caller)
    assert freed


def says(): print(f"rank {os.environ['LOCAL_RANK']} is here")


@pytest.mark.parametrize('caller,see,seen', [
    (0, (2,), [0, 2]), (0, None, [0]), (None, 'all', [0, 1, 2]), (None, None, [0])])
def test_whose_output_is_shown(caller, see, seen, capsys):
    "The caller's own, and that of the workers that are asked for"
    ranch(3, says, caller_rank=caller, see=see)
    out = capsys.readouterr().out
    assert [r for r in range(3) if f'rank {r} is here' in out] == seen
    with pytest.raises(CantDistribute, match='the ranks whose output is shown'): ranch(2, says, see=1)


def puts(queue, lock):
    with lock: queue.put(os.getpid())


def test_a_managers_queue_and_lock():
    "As in the examples of `torch.multiprocessing.spawn`, with the notebook's authkey"
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        ranch(2, puts, queue, manager.Lock())
        found = {queue.get(timeout=5), queue.get(timeout=5)}
        assert len(found) == 2 and os.getpid() in found     # the notebook is one of both
