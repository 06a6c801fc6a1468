"""Every test leaves the machine as it found it: processes, files, shared memory, environment, signal handlers."""
import atexit, contextlib, gc, os, shutil, signal, sys, tempfile
import pytest
gc.disable()    # until all tests are collected: a third of the time that imports take
sys.modules['rfc3987_syntax'] = None    # nbformat imports it for a second, and no notebook needs it
from spread import all_but_a_spread
from traces import nothing_left


def own_temporary_folder():
    "A temporary folder of this run only, so that runs side by side don't see each other's files"
    path, pid = tempfile.mkdtemp(prefix='t'), os.getpid()
    os.environ['TMPDIR'], tempfile.tempdir = path, None
    # at exit, and after multiprocessing has removed what it keeps in there; a forked child must not do it
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == pid else None)


own_temporary_folder()
# Files of tests that run side by side share the cores: with more threads than cores each waits for all the others.
if 'PYTEST_XDIST_WORKER' in os.environ:
    import torch
    torch.set_num_threads(1)


def pytest_configure(config):
    "What is less in `make test`: random cases of pure arithmetic, and processes of fastai's loaders"
    few = config.option.markexpr == 'not full'
    with contextlib.suppress(ImportError):      # fastai v1 has neither
        from hypothesis import settings
        settings.register_profile('many', max_examples=100 if few else 1000, deadline=None)
        from fastcore.basics import defaults
        # loaders that are not told how many to have: most of what a small fit costs
        if few: defaults.cpus = 0


# Those that take longest begin first: at the end no file goes on alone.
LONGEST = '''notebooks cases around browser leaves_nothing magics cells scripts demo gpu_check comes_back
callbacks ranch
wheel data shapes lock_step decisions caller next_helper odd_processes hangs
v1_apps v1_comes_back v1_notebooks v1_life v1_magics'''.split()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    names = [f'test_{o}' for o in LONGEST]
    items.sort(key=lambda o: names.index(o.path.stem) if o.path.stem in names else len(names))
    for o in all_but_a_spread(items): o.add_marker(pytest.mark.full)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file run one after the other; those on simulated GPUs are one file, with one process. The table of
    cases is two files: each number of workers has its own"""
    from xdist.scheduler import LoadFileScheduling
    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if 'test_cases.py' in file: return nodeid.partition('-')[0]
            return 'simulated_gpu' if 'simulated_gpu/' in file else file
    return Scheduling(config, log)


def pytest_collection_finish():
    "A collection of garbage leaves alone what all tests have in common: a million objects of torch and fastai"
    gc.collect()
    gc.freeze()
    gc.enable()


# A shell starts what runs in its background with Ctrl-C ignored; here it is pressed.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leaves_nothing():
    "Fail the test that leaves something behind"
    # a process shows a warning of its workers once
    if replay := sys.modules.get('fastddp.output.replay'): replay._shown_once.clear()
    with nothing_left(): yield


@pytest.fixture(scope='module', autouse=True)
def warm_workers(request):
    "The session's launchers (`parity.warm`) end before a module that has no use for them"
    if not hasattr(request.module, 'warm') and (parity := sys.modules.get('parity')): parity.end_launchers()


@pytest.fixture(scope='session', autouse=True)
def warm_workers_go():
    yield
    if parity := sys.modules.get('parity'): parity.end_launchers()
