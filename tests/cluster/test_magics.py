"""The magics in a real kernel: every flag, every refusal, interrupts, deaths, and nothing left behind."""
import asyncio, os, re, signal, time
from pathlib import Path
import nbformat, psutil, pytest
from traces import children, files, left_after
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

root = Path(__file__).resolve().parent.parent.parent


class Kernel:
    "A kernel that runs one cell after the other"
    def __init__(self, folder):
        self.nb = nbformat.v4.new_notebook(metadata=dict(kernelspec=dict(name='python3', display_name='python3')))
        self.client = NotebookClient(self.nb, timeout=120, resources=dict(metadata=dict(path=str(folder))),
                                     kernel_name='python3')

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.ctx = self.client.async_setup_kernel()
        self.loop.run_until_complete(self.ctx.__aenter__())
        return self

    def __exit__(self, *_):
        self.loop.run_until_complete(self.ctx.__aexit__(None, None, None))
        self.loop.close()

    def start(self, source):
        "Begin a cell; what comes back is to be waited for by `end`"
        self.nb.cells.append(nbformat.v4.new_code_cell(source))
        i = len(self.nb.cells) - 1
        return self.loop.create_task(self.client.async_execute_cell(self.nb.cells[i], i,
                                                                    store_history=True)), self.nb.cells[i]

    def run(self, source):
        "Run a cell and return what it shows as text"
        task, cell = self.start(source)
        self.loop.run_until_complete(task)
        return shown(cell)

    def fails(self, source, allow=CellExecutionError):
        "Run a cell that must fail; return its error's name and everything that is shown"
        task, cell = self.start(source)
        with pytest.raises(allow) as e: self.loop.run_until_complete(task)
        # a UsageError is a line of stderr
        told = [l for o in cell.outputs if o.output_type == 'error' for l in o.traceback]
        return e.value.ename, re.sub('\x1b\\[[0-9;]*m', '', '\n'.join([*told, shown(cell)]))

    def interrupt_after(self, source, marker):
        "Run a cell and interrupt it once `marker`, a file, is there"
        task, cell = self.start(source)
        async def go():
            while not marker.exists(): await asyncio.sleep(.05)
            await self.client.km.interrupt_kernel()
            with pytest.raises(CellExecutionError): await task
        self.loop.run_until_complete(asyncio.wait_for(go(), 60))
        return [o.ename for o in cell.outputs if o.output_type == 'error']

    def pid(self): return self.client.km.provisioner.process.pid


def shown(cell):
    text = lambda o: o.text if o.output_type == 'stream' else o.data.get('text/plain', '') + '\n' if 'data' in o else ''
    return ''.join(map(text, cell.outputs))


@pytest.fixture(autouse=True)
def leaves_nothing():
    "The kernel lives longer than a test; `kernel` looks at what is left in the end"
    yield


@pytest.fixture(scope='module')
def folder(tmp_path_factory): return tmp_path_factory.mktemp('magics')


@pytest.fixture(scope='module')
def kernel(folder):
    old, was = os.environ.get('PYTHONPATH'), (children(), files())
    os.environ['PYTHONPATH'] = str(root)
    try:
        with Kernel(folder) as k:
            k.run('%load_ext fastddp')
            yield k
    finally:
        os.environ.pop('PYTHONPATH') if old is None else os.environ.update(PYTHONPATH=old)
    assert not left_after(children, was[0]) and not left_after(files, was[1])


@pytest.fixture(scope='module')
def group(kernel):
    "A group of three"
    assert '3 ranks on CPU (gloo), app none' in kernel.run('%makedip -n 3 -a none')
    kernel.run('%%dip\nimport os, time, torch, torch.distributed as dist\nrank = int(os.environ["RANK"])\nkept, x = '
               'rank + 1, 10*rank')
    return kernel


# Before there is a group

@pytest.mark.parametrize('cell',
                         ['%%dip\n1', '%autodip on', '%dipush x', '%dipull x', '%dipper d', '%dipstat', '%makedip -i',
                          '%%dip everywhere\n1'])
def test_no_group_yet(kernel, cell):
    name, text = kernel.fails(cell)
    # the message is wrapped
    text = ' '.join(text.split())
    assert name == 'CantDistribute' and 'no group yet' in text and '%makedip -n 2' in text


@pytest.mark.parametrize('line,says', [
    ('-r', 'no group yet that could'), ('-n 0', 'at least one'), ('-g one', 'GPU numbers'),
                                       ('-g 0 -n 2', 'one of them'),
    ('-g 77', 'visible'), ('-n 2 -a nosuch', 'known are'), ('-n 2 --wrong', 'unrecognized')])
def test_makedip_refuses(kernel, line, says):
    name, text = kernel.fails(f'%makedip {line}')
    assert name in ('CantDistribute', 'UsageError') and says in text
    assert 'no group yet' in kernel.fails('%makedip -i')[1]


def test_local_needs_no_group(kernel):
    assert kernel.run('%%dip local\nhere = 1\nhere + 1') == '2\n'
    assert kernel.run('%%dip local\nimport asyncio\nawait asyncio.sleep(0, 5)') == '5\n'


# Cells

def test_runs_there_and_not_here(group):
    out = group.run('%%dip --see all\nimport os\nrank = int(os.environ["RANK"])\nx = 10*rank\nprint("I am", rank, '
                    '"of", os.environ["WORLD_SIZE"])')
    assert sorted(out.splitlines()) == ['I am 0 of 3', '[rank 1] I am 1 of 3', '[rank 2] I am 2 of 3']
    assert group.fails('x')[0] == 'NameError'
    assert group.run('%%dip\nprint(x)') == '0\n'


def test_last_expression_of_each_seen_rank(group):
    out = group.run('%%dip --see all\nx')
    found = re.findall(r'Out\[(\d):(\d+)\]: (\d+)', out)
    assert [(r, x) for r, _, x in found] == [('0', '0'), ('1', '10'), ('2', '20')]
    n = int(found[0][1])
    assert f'Out[0:{n+1}]: 1' in group.run('%%dip\nx + 1')
    assert 'Out' not in group.run('%%dip\nx + 1;') and 'Out' not in group.run('%%dip\ny = x')


@pytest.mark.parametrize('see,ranks', [('0,2', [0, 2]), ('1', [1]), ('2 1', [1, 2]), ('all', [0, 1, 2])])
def test_see(group, see, ranks):
    out = group.run(f'%%dip --see {see}\nprint("me", rank)')
    assert sorted(re.findall(r'me (\d)', out)) == [str(r) for r in ranks]


def test_see_then_place(group):
    assert '10' in group.run('%%dip --see 0,1 everywhere\nimport os\nprint(int(os.environ.get("RANK", 7))*10)')


@pytest.mark.parametrize('on,ranks', [('1', [1]), ('2,0', [0, 2]), ('all', [0, 1, 2])])
def test_on(group, on, ranks):
    group.run('%%dip\nran = False')
    group.run(f'%%dip --on {on}\nran = True')
    out = group.run('%%dip --see all\nran')
    assert re.findall(r'Out\[(\d):\d+\]: True', out) == [str(r) for r in ranks]


def test_who_runs_alone_is_seen(group):
    assert group.run('%%dip --on 1\nprint("only", rank)') == 'only 1\n'


@pytest.mark.parametrize('line', ['--see 3', '--see 0,9', '--on 3', '--on first', '--see nobody'])
def test_unknown_rank(group, line):
    name, text = group.fails(f'%%dip {line}\nran = 1')
    assert name == 'CantDistribute' and 'ranks are 0 to 2' in text


def test_unknown_place_or_flag(group):
    assert group.fails('%%dip nowhere\n1')[0] == 'UsageError'
    assert group.fails('%%dip --wrong\n1')[0] == 'UsageError'


def test_everywhere_runs_here_first(group):
    out = group.run('%%dip everywhere --see all\nimport os\nwhere = os.environ.get("RANK", "here")\nprint("in", where)')
    assert out.splitlines()[0] == 'in here' and sorted(out.splitlines()[1:]) == ['[rank 1] in 1', '[rank 2] in 2',
                                                                                 'in 0']
    assert group.run('where') == "'here'\n"


def test_an_error_here_keeps_the_cell_from_the_group(group):
    name, text = group.fails('%%dip everywhere\nleft = 1/0')
    assert name == 'ZeroDivisionError' and text.count('ZeroDivisionError') <= 3 and 'left = 1/0' in text
    assert group.fails('%%dip\nleft')[0] == 'RankRaised'


def test_output_is_live(group, folder):
    "The first line is there while the cell still runs"
    task, cell = group.start(f'%%dip\nimport time, os\nprint("one")\nwhile not os.path.exists({str(folder/"go")!r}): '
                             f'time.sleep(.02)')
    async def go():
        end = time.monotonic() + 120
        while not shown(cell) and time.monotonic() < end: await asyncio.sleep(.05)
        seen = shown(cell)
        (folder/'go').write_text('')
        await task
        return seen
    assert group.loop.run_until_complete(go()) == 'one\n'


def test_quiet_shows_the_end_only(group, folder):
    "Nothing while it runs; of a display that was updated only its last state"
    said, go_on = folder/'said', folder/'go2'
    task, cell = group.start('%%dip -q\nfrom IPython.display import display\nprint("one", flush=True)\nh = '
                             'display("a", display_id=True)\n'
                             f'for i in range(5): h.update(i); time.sleep(.1)\nopen({str(said)!r}, "w").close()\n'
                             f'while not os.path.exists({str(go_on)!r}): time.sleep(.02)')
    async def go():
        while not said.exists(): await asyncio.sleep(.05)
        await asyncio.sleep(1)      # for what would be on its way
        seen = shown(cell)
        go_on.touch()
        await task
        return seen
    assert group.loop.run_until_complete(go()) == ''
    assert 'one' in shown(cell)


def test_rich_output(group):
    task, cell = group.start('%%dip --see 0,1\nfrom IPython.display import HTML\nHTML(f"<b>{rank}</b>")')
    group.loop.run_until_complete(task)
    assert [o.data['text/html'] for o in cell.outputs if 'data' in o and 'text/html' in o.data] == ['<b>0</b>',
                                                                                                    '<b>1</b>']
    assert 'Out[0:' in shown(cell) and 'Out[1:' in shown(cell)


def test_plots(group):
    task, cell = group.start('%%dip\nimport matplotlib.pyplot as plt\nplt.plot([1,2]); plt.show()')
    group.loop.run_until_complete(task)
    assert any('image/png' in o.get('data', {}) for o in cell.outputs)


CELLS = {
    'await': ('import asyncio\nasync def f(): await asyncio.sleep(.01); return "waited"\nawait f()', 'waited'),
    'shell': ('!echo from a shell', 'from a shell'),
    'line magic': ('%pwd', ''),
    'cell magic': ('%%time\nprint("timed")', 'Wall time'),
    'help': ('len?', 'Return the number of items'),
    'assignment from a shell': ('a = !echo caught\na', 'caught')}


@pytest.mark.parametrize('name', CELLS)
def test_ipython_inside(group, name):
    cell, says = CELLS[name]
    assert says in group.run(f'%%dip\n{cell}')


def test_folder_and_environment_stay_changed(group, folder):
    group.run('%%dip\nos.makedirs("sub", exist_ok=True); os.chdir("sub"); os.environ["MINE"] = "yes"')
    assert "('sub', 'yes')" in group.run('%%dip\nos.path.basename(os.getcwd()), os.environ["MINE"]')
    assert group.run('import os\nos.path.basename(os.getcwd()), os.environ.get("MINE")') == f"('{folder.name}', None)\n"
    group.run('%%dip\nos.chdir("..")')


def test_appcmd_runs_before_the_cell(group):
    assert 'Out[0:' in (out := group.run('%%dip -a "before = 5"\nbefore + 1')) and out.strip().endswith(': 6')


def test_verbose(group):
    group.run('%makedip -v True')
    assert 'on all, see 0' in group.run('%%dip\npass')
    group.run('%makedip -v False')
    assert group.run('%%dip\npass') == '' and group.run('%makedip -n 3 -a none') == ''
    assert 'stands already' in group.run('%makedip -n 3 -a none -v') and 'on all' in group.run('%%dip\npass')
    group.run('import fastddp.magics\nget_ipython().magics_manager.registry["DipMagics"].verbose = None')


# Errors

def test_an_error_fails_the_cell_and_the_group_lives(group):
    group.run('%%dip\nkept = rank')
    name, text = group.fails('%%dip --see 1\nprint("before")\nif rank == 1:\n    {}["nothing"]')
    assert name == 'RankRaised' and "rank 1 raised KeyError: 'nothing'" in text
    assert '{}["nothing"]' in text and 'before' in text
    assert 'run_code' not in text and 'fastddp/process/worker.py' not in text and 'fastddp/launch/rank.py' not in text
    assert 'Out[2:' in group.run('%%dip --see 2\nkept')


def test_syntax_error(group):
    name, text = group.fails('%%dip\nfor in range')
    assert name == 'RankRaised' and 'SyntaxError' in text and 'for in range' in text
    # the report of a rank, and not IPython's own of a SyntaxError, with the frames of the library
    assert 'rank' in text and 'monitor.py' not in text


@pytest.mark.parametrize('cell', ['exit()', 'quit', 'import sys; sys.exit()'])
def test_exit_says_how_to_end_the_group(group, cell):
    _, text = group.fails(f'%%dip\n{cell}')
    assert '%makedip -k' in text and 'ask_exit' not in text
    assert 'Out[0:' in group.run('%%dip\n1')


def test_a_name_of_the_notebook(group):
    "How it gets there, and nothing of what IPython keeps in a namespace"
    _, text = group.fails('%%dip\nprint(only_here)')
    assert '%dipush' in text and '_ih' not in text and 'get_ipython' not in text


def test_interrupt_stops_the_code_and_not_the_group(group, folder):
    group.run('%%dip\nkept, pid = rank + 1, os.getpid()')
    marker = folder/'looping'
    assert group.interrupt_after(f'%%dip\nopen({str(marker)!r}, "w").close()\nwhile True: time.sleep(.01)',
                                 marker) == ['KeyboardInterrupt']
    assert 'tensor([6])' in group.run('%%dip\nt = torch.tensor([kept]); dist.all_reduce(t); t')
    assert 'True' in group.run('%%dip\nos.getpid() == pid')


# Objects there and back

def test_push_and_pull(group):
    group.run('import torch, collections\nPoint = collections.namedtuple("Point", "x y")\n'
              'class Own:\n    def __init__(self, v): self.v = v\n    def twice(self): return 2*self.v\n'
              'a, own, big = Point(1, 2), Own(21), torch.arange(3_000_000.)')
    group.run('%dipush a own big')
    assert '(1, 42, 2999999.0)' in group.run('%%dip\na.x, own.twice(), big[-1].item()')
    group.run('%%dip\nmine = [rank, big[:3] + rank]\nbig += 1')
    assert group.run('%dipull -r 2 mine\nmine') == '[2, tensor([2., 3., 4.])]\n'
    assert group.run('%dipull mine\nmine[0]') == '0\n'
    assert group.run('big[0].item()') == '0.0\n'


def test_what_was_pushed_stays_what_it_was(group):
    "The next push doesn't write into the memory of the first"
    group.run('first = torch.zeros(1_000_000)\nsecond = torch.ones(1_000_000)\n%dipush first\n%dipush second')
    assert '(0.0, 1000000.0)' in group.run('%%dip\nfirst.sum().item(), second.sum().item()')


def test_what_contains_itself_is_pushed_and_pulled(group):
    group.run('ring = [1]\nring.append(ring)\n%dipush ring')
    assert 'True' in group.run('%%dip\nring[1] is ring')
    group.run('%dipull ring')
    assert group.run('ring[1] is ring, len(ring)') == '(True, 2)\n'


def test_what_was_pushed_or_pulled_can_grow(group):
    group.run('import torch, numpy as np\nheld, row = [torch.ones(3)], np.ones(3)\n%dipush held row')
    said = group.run('%%dip\nheld[0].resize_(1000).fill_(2)\nrow.resize(50, refcheck=False)\nheld[0].sum(), row.size')
    assert '(tensor(2000.), 50)' in said
    group.run('%dipull held row')
    assert group.run('held[0].sum(), row.size') == '(tensor(2000.), 50)\n'
    assert group.run('held[0].resize_(5000).shape, row.resize(90, refcheck=False), row.size') == (
        '(torch.Size([5000]), None, 90)\n')


def test_a_function_finds_names_of_the_workers(group):
    group.run('def ten(): return kept*10\n%dipush ten')
    assert re.findall(r': (\d+)', group.run('%%dip --see all\nten()')) == ['10', '20', '30']


@pytest.mark.parametrize('cell,says', [
    ('%dipush nosuch', "no variable 'nosuch'"), ('%dipull nosuch', "no variable 'nosuch'"),
                                       ('%dipull -r 3 kept', 'ranks are 0 to 2'),
    ('f = open("/dev/null")\n%dipush f', "f can't be sent"), ('%dipull gen', "gen can't be sent")])
def test_objects_refused(group, cell, says):
    group.run('%%dip\ngen = (i for i in range(3))')
    name, text = group.fails(cell)
    assert name in ('CantDistribute', 'NotPicklable') and says in text


# The group object

@pytest.mark.full
def test_ranch_in_a_cell(group):
    """Each rank of the group has its own workers, which may form a group; a rank of the group can't be a rank of
    another one, and nothing waits"""
    cell = '%%dip\nfrom fastddp.ranch import *\ndef two(): return 2\nranch(2, two, caller_rank=None)'
    assert group.run(cell).endswith('[2, 2]\n')
    assert group.run('%%dip\nranch(2, two, ctx=TorchDDPCtx(use_gpu=False), caller_rank=None)').endswith('[2, 2]\n')
    assert 'Pass caller_rank=None' in group.fails('%%dip --see all\nranch(2, two)')[1]
    failed = group.fails('%%dip --see all\nin_torchddp(2, two, use_gpu=False)')[1]
    assert 'In a cell of %%dip use that group' in ' '.join(failed.split())


def test_dipper(group):
    group.run('%dipper d')
    assert group.run('d.run(lambda x: x + kept, 1)') == '[2, 3, 4]\n'
    assert group.run('d.push(z=3)\nd.push({"w": 4})\nd.pull("z", "w", rank=1)') == "{'z': 3, 'w': 4}\n"
    assert 'from one worker' in group.fails('d.pull("z", rank="all")')[1]
    assert group.run('d.gpus, d.n') == '([], 3)\n'
    assert '3 ranks on CPU (gloo)' in group.run('print(d.info())')


def test_a_cell_without_a_name_does_not_get_that_of_the_last_one(group):
    group.run('%%dip\nimport sys\ndef file(): return sys._getframe(1).f_code.co_filename\nfirst = file()')
    group.run('%dipper d')
    assert group.run("d.run_cell('print(file() == first)')") == 'False\n'


def test_dipstat(group):
    lines = group.run('%dipstat').splitlines()
    assert lines[0].split() == ['rank', 'pid', 'device', 'memory', 'busy', 'runs']
    assert [l.split()[0] for l in lines[1:]] == ['0', '1',
                                                 '2'] and all(' cpu ' in l and ' no ' in l and 'MB' in l
                                                              for l in lines[1:])


def test_dipstat_while_busy(group, folder):
    "From another thread of the notebook: what runs"
    nap = f'# nap\nwhile not os.path.exists({str(folder/"awake")!r}): time.sleep(.02)'
    out = group.run(f'import threading, time\n%dipper d\nt = threading.Thread(target=lambda: '
                    f'd.run_cell({nap!r}))\nt.start()\n'
                    'while not d.running: time.sleep(.01)\n%dipstat\ntry: d.run_cell("1")\nexcept ValueError as e: '
                    'print(e)\n'
                    f'open({str(folder/"awake")!r}, "w").close()\nt.join()')
    assert out.count(' yes ') == 3 and out.count('# nap') == 4 and 'The group is busy' in out


# autodip

def test_autodip(group):
    assert group.run('%autodip') == 'Auto Execution on DDP group: Off\n'
    assert group.run('%autodip on') == 'Auto Execution on DDP group: on, will run cell as %%dip\n'
    assert 'me 0' in group.run('# a comment first\nauto = rank\nprint("me", rank)')
    assert sorted(group.run('%%dip --see all\nprint("me", rank)').splitlines()) == ['[rank 1] me 1', '[rank 2] me 2',
                                                                                    'me 0']
    assert group.run('print("me", rank)') == 'me 0\n'
    shown = group.run('%autodip -a "--see 1,2" on')
    assert shown == 'Auto Execution on DDP group: on, will run cell as %%dip --see 1,2\n'
    assert group.run('print("me", rank)').count('me') == 2
    assert group.run('%%dip local\nsent = "from here"\n%dipush sent') == ''
    assert group.run('print(sent)').count('from here') == 2
    assert group.run('%autodip') == 'Auto Execution on DDP group: on, will run cell as %%dip --see 1,2\n'
    assert group.run('%autodip off') == 'Auto Execution on DDP group: Off\n'
    assert group.fails('auto')[0] == 'NameError'


def test_errors_leave_autodip_as_it_was(group):
    group.run('%autodip on')
    assert group.fails('1/0')[0] == 'RankRaised'
    assert group.fails('def (')[0] == 'RankRaised'
    assert group.fails('%%dip local\n1/0')[0] == 'ZeroDivisionError'
    assert group.fails('%autodip -a "--see 9 --wrong" on')[0] == 'UsageError'
    assert 'Out[0:' in group.run('rank')
    group.run('%autodip off')
    assert group.run('3') == '3\n'


# Help

@pytest.mark.parametrize('magic,says',
                         [('%%dip', '--see'), ('%makedip', '--nprocs'), ('%autodip', '--args'), ('%dipull', '--rank')])
def test_help(group, magic, says):
    task, cell = group.start(f'{magic}?')
    group.loop.run_until_complete(task)
    help = group.run(f'print(get_ipython().find_magic({magic.lstrip("%")!r}, "cell" if {magic.startswith("%%")} else '
                     f'"line").__doc__)')
    assert says in help


# Ends

def test_another_group_is_refused_and_the_same_one_kept(group):
    group.run('%%dip\nstays = 1')
    assert 'stands already' in group.run('%makedip -n 3 -a none')
    assert 'Out[0:' in group.run('%%dip\nstays')
    name, text = group.fails('%makedip -n 2 -a none')
    assert name == 'CantDistribute' and 'There is a group already' in text


def test_info(group): assert 'app none' in group.run('%makedip -i') and 'rank' in group.run('%makedip')


def test_a_collective_that_waits_for_a_failed_rank_ends_the_group(group):
    "It can't be interrupted"
    name, text = group.fails('%%dip\nif rank == 1: raise ValueError("the cause")\ndist.all_reduce(torch.ones(1))')
    assert name == 'RankRaised' and 'rank 1 raised ValueError: the cause' in text and '%makedip -r' in text
    group.run('%makedip -r')
    group.run('%%dip\nimport os, time\nrank = int(os.environ["RANK"])')


def test_a_worker_that_dies_in_a_cell(group):
    name, text = group.fails('%%dip\nimport signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)')
    assert name == 'RankDied' and 'rank 1 died: killed by SIGKILL' in text and '%makedip -r' in text
    for cell in '%%dip\n1', '%dipull rank', '%%dip --on 1\n1':
        name, text = group.fails(cell)
        assert name == 'CantDistribute' and 'group has ended' in text


def test_restart(group):
    assert '3 ranks' in group.run('%makedip -r')
    assert group.fails('%%dip\nstays')[0] == 'RankRaised'
    assert '2 ranks' in group.run('%makedip -r -n 2 -a none') and 'Out[1:' in group.run('%%dip --see 1\nos = 1; os')


def test_a_worker_that_dies_between_cells(group):
    group.run('import os, signal\n%dipper d\nos.kill(d.pids[1], signal.SIGKILL)\nwhile d.alive: pass')
    name, text = group.fails('%%dip\n1')
    assert name == 'CantDistribute' and 'Rank 1 died' in text and '%makedip -r' in text
    assert 'ended' in group.run('print(d)')
    group.run('%makedip -r')
    assert 'Out[0:' in group.run('%%dip\n1')


def test_timeout(group):
    name, text = group.fails('%makedip -r -n 2 -a none -t 0.000001')
    assert name == 'GroupTimeout'
    group.run('%makedip -r -n 2 -a none -t 100')
    assert 'Out[0:' in group.run('%%dip\n1')


def test_kill(group):
    group.run('%dipper d')
    pids = eval(group.run('list(d.pids)'))
    group.run('%makedip -k')
    assert not [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != 'zombie']
    assert 'no group yet' in group.fails('%%dip\n1')[1]


def test_everywhere_with_a_cell_that_ends_the_group(group):
    group.run('%makedip -r -n 2 -a none')
    name, text = group.fails('%%dip everywhere\n%makedip -k')
    assert name == 'CantDistribute' and 'no group yet' in text


def test_unload_leaves_nothing(group):
    group.run('%makedip -r -n 2 -a none\n%dipper d\n%autodip on')
    pids = eval(group.run('%%dip local\nlist(d.pids)'))
    group.run('%unload_ext fastddp')
    assert group.run('1 + 1') == '2\n'
    assert 'not found' in group.fails('%%dip\n1')[1] and 'not found' in group.fails('%dipstat')[1]
    assert not [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != 'zombie']
    assert group.run('[o for o in get_ipython().input_transformers_cleanup if "fastddp" in repr(getattr(o, '
                     '"__self__", ""))]') == '[]\n'
    group.run('%load_ext fastddp')


CTRL_C = """
import signal
stop = d.local.workers.stop
d.local.workers.stop = lambda grace: (stop(grace), signal.raise_signal(signal.SIGINT))"""


def test_unload_again_after_an_interrupt(group):
    group.run('%makedip -r -n 2 -a none\n%dipper d')
    group.run(CTRL_C)
    assert group.fails('%unload_ext fastddp')[0] == 'KeyboardInterrupt'
    group.run('%unload_ext fastddp')
    assert 'not found' in group.fails('%%dip\n1')[1]
    assert group.run('[o for o in get_ipython().configurables if "Dip" in repr(o)]') == '[]\n'
    group.run('%load_ext fastddp')


@pytest.mark.full
def test_kernel_exit_ends_the_group(folder, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(root))
    with Kernel(folder) as k:
        pids = eval(k.run('%load_ext fastddp\n%makedip -n 2 -a none -v False\n%dipper d\nlist(d.pids)'))
        assert all(map(psutil.pid_exists, pids))
        folder_left = eval(k.run('d.local.workers.dir'))
    end = time.monotonic() + 60
    while (any(map(psutil.pid_exists, pids)) or os.path.exists(folder_left)) and time.monotonic() < end: time.sleep(.1)
    assert not any(map(psutil.pid_exists, pids)) and not os.path.exists(folder_left)


# Lessons

LESSON = '''
from fastai.data.all import *
from fastai.learner import *
from fastai.callback.all import *
torch.manual_seed(0)
data = torch.randn(48, 3)
items = list(zip(data, data.sum(1, keepdim=True)))
dls = DataLoaders(DataLoader(items, bs=8, shuffle=True, num_workers=0), DataLoader(items, bs=8, num_workers=0))
learn = Learner(dls, nn.Linear(3, 1), loss_func=nn.MSELoss())
'''


@pytest.fixture(scope='module')
def lesson(kernel):
    "A group of two in which learners train together"
    assert 'app fastai_v2' in kernel.run('%makedip -k\n%makedip -n 2')
    kernel.run(f'%%dip\n{LESSON}')
    return kernel


def test_fits_are_distributed_in_place(lesson):
    task, cell = lesson.start('%%dip --see all\nlearn.fit_one_cycle(2, .1)')
    lesson.loop.run_until_complete(task)
    tables = [o for o in cell.outputs if 'text/html' in o.get('data', {}) and 'epoch' in o.data['text/html']]
    assert len(tables) == 1     # rank 0 only
    out = lesson.run('%%dip --see all\nimport os\nlen(learn.recorder.lrs), learn.model.weight.sum().item(), '
                     'learn.recorder.values[-1][1]')
    found = re.findall(r'Out\[\d:\d+\]: (.*)', out)
    # 48 items, 2 ranks, batches of 8
    assert len(found) == 2 and found[0] == found[1] and found[0].startswith('(6, ')


def test_a_trained_learner_comes_back(lesson):
    lesson.run('from fastai.learner import *\n%dipull learn')
    shown = lesson.run('len(learn.recorder.lrs), len(learn.recorder.values), type(learn.model).__name__')
    assert shown == "(6, 2, 'Linear')\n"
    lesson.run('with learn.no_bar(), learn.no_logging(): learn.fit(1)')
    assert lesson.run('%dipush learn') == ''
    assert re.findall(r': (\d+)', lesson.run('%%dip --see all\nlen(learn.recorder.lrs)')) == ['6', '6']


def test_a_single_rank_trains_alone(lesson):
    "When all train together again, weights and optimizer are rank 0's on every rank"
    lesson.run(f'%%dip\n{LESSON}learn.fit(1)')
    lesson.run('%%dip --on 1 -q\nlearn.fit(2)')
    assert re.findall(r': (\d+)', lesson.run('%%dip --see all\nlen(learn.recorder.lrs)')) == ['3', '12']
    lesson.run('%%dip -q\nlearn.fit(1)')
    found = re.findall(r'Out\[\d:\d+\]: (.*)', lesson.run(
        '%%dip --see all\nlearn.model.weight.sum().item(), [float(torch.as_tensor(learn.opt.state[p][k]).sum()) for k '
        'in ("step", "grad_avg") for p in learn.model.parameters()]'))
    assert len(found) == 2 and found[0] == found[1] and '[6.0, 6.0, ' in found[0], found


def test_a_fit_that_a_cell_wraps(lesson):
    "By a cell in the notebook, whose patches come with `%dipush`, and by one of the group: all ranks train together"
    wrap = ('plain = Learner.fit\ndef fit(self, *args, **kwargs):\n    print("wrapped")\n'
            '    return plain(self, *args, **kwargs)\nLearner.fit = fit')
    lesson.run(f'from fastai.learner import *\n{wrap}\nnumber = 1')
    lesson.run('%dipush number')
    lesson.run('Learner.fit = plain\ndel fit, plain')
    for more in '', f'{wrap}\n':
        lesson.run(f'%%dip\n{LESSON}{more}')
        assert 'wrapped' in lesson.run('%%dip\nlearn.fit(1)')
        said = lesson.run('%%dip --see all\nlen(learn.recorder.lrs), learn.model.weight.sum().item()')
        found = re.findall(r': (.*)', said)
        assert len(found) == 2 and found[0] == found[1] and found[0].startswith('(3, '), found
    lesson.run('%dipush number')    # takes the patch away


def test_interrupt_of_a_fit(lesson, folder):
    marker = folder/'fitting'
    lesson.run(f'%%dip\n{LESSON}')      # equal on all ranks, with a fresh optimizer
    lesson.run(f'%%dip\nclass Slow(Callback):\n    def after_batch(self):\n        open({str(marker)!r}, '
               f'"w").close(); import time; time.sleep(.05)')
    assert lesson.interrupt_after('%%dip\nlearn.fit(500, cbs=Slow())', marker) == ['KeyboardInterrupt']
    found = re.findall(r'Out\[\d:\d+\]: (.*)', lesson.run('%%dip --see all\nlearn.model.weight.sum().item()'))
    assert len(found) == 2 and found[0] == found[1]
    lesson.run('%%dip\nlearn.fit(1)')


def test_interrupt_of_a_validation(lesson, folder):
    marker = folder/'validating'
    lesson.run(f'%%dip\n{LESSON}')
    lesson.run(f'%%dip\nclass SlowValid(Callback):\n    def after_batch(self):\n        open({str(marker)!r}, '
               f'"w").close(); import time; time.sleep(.05)\n'
               f'        if self.iter > 400: raise ValueError("it went on")')
    lesson.run('%%dip\nmany = DataLoader(list(learn.dls.valid_ds)*500, bs=1, num_workers=0, device="cpu")')
    cell = '%%dip\nwith learn.added_cbs(SlowValid()): learn.validate(dl=many)'
    assert lesson.interrupt_after(cell, marker) == ['KeyboardInterrupt']
    lesson.run('%%dip\nlearn.validate()')
