"""What a test, or anything else, may leave behind: processes, files, shared memory, environment, signal handlers.
`conftest.py` looks after every test."""
import contextlib, os, re, signal, sys, tempfile, time
from pathlib import Path
import psutil

GRACE = 15.   # seconds for a process that is on its way out
MODELS = Path(__file__).resolve().parent.parent/'models'     # `learn.save` makes it where a learner has no path


def helper_pid():
    "Of fastddp's helper process, or None"
    helper = getattr(sys.modules.get('fastddp.process.helper'), '_helper', None)
    return helper and helper.popen.pid


def helper_pids():
    "Pids of the helper processes that may stay: ours, and multiprocessing's fork server and resource tracker"
    module = sys.modules.get('fastddp.process.helper')
    others = [getattr(module, '_next', None), *getattr(module, '_replaced', ())]
    pids = {helper_pid(), *(o.popen.pid for o in others if o)}
    server = getattr(sys.modules.get('multiprocessing.forkserver'), '_forkserver', None)
    tracker = getattr(sys.modules.get('multiprocessing.resource_tracker'), '_resource_tracker', None)
    pids |= {getattr(server, '_forkserver_pid', None), getattr(tracker, '_pid', None)}
    return pids - {None}


def is_helper(proc):
    "Is `proc` one that may stay? The fork server starts a tracker of its own"
    if proc.pid in helper_pids(): return True
    try: return 'resource_tracker import main' in ' '.join(proc.cmdline()) and proc.ppid() in helper_pids()
    except psutil.NoSuchProcess: return True


def running(proc):
    "Is `proc` neither gone nor a zombie that nobody has waited for yet?"
    try: return proc.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess: return False


def child_pids(pid):
    """Pids of the processes that descend from `pid`; to look through all of /proc would cost more than most tests.
    Read twice: the system may leave one out while another one ends, see proc_pid_task_children(5)"""
    pids = set()
    for path in [*Path(f'/proc/{pid}/task').glob('*/children')]*2:
        with contextlib.suppress(OSError): pids |= {int(o) for o in path.read_text().split()}
    return pids.union(*map(child_pids, pids))


def descendants():
    "The processes that descend from this one"
    if not Path(f'/proc/self/task/{os.getpid()}/children').exists(): return psutil.Process().children(recursive=True)
    found = []
    for pid in child_pids(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess): found.append(psutil.Process(pid))
    return found


def children(): return {o for o in descendants() if running(o) and not is_helper(o)}


def memfds():
    "Open anonymous memory files of this process, by descriptor"
    found = set()
    for fd in Path('/proc/self/fd').iterdir() if Path('/proc/self/fd').exists() else ():
        try: target = os.readlink(fd)
        except OSError: continue
        if target.startswith('/memfd:'): found.add(f'{fd} -> {target}')
    return found


def files():
    "What lies in shared memory, what of ours in the temporary folder, and fastai's folder of models in the checkout"
    shm, temp = '/dev/shm', tempfile.gettempdir()
    shared = os.listdir(shm) if os.path.exists(shm) else []
    ours = [o for o in os.listdir(temp) if o.startswith(('fastddp', 'pymp-'))]
    models = [MODELS] if MODELS.exists() else []
    return {*(f'{shm}/{o}' for o in shared), *(f'{temp}/{o}' for o in ours), *map(str, models)} - own_folders()


def own_folders():
    "Of this process, as long as it lives: multiprocessing's for sockets"
    process = sys.modules.get('multiprocessing.process')
    return {process.current_process()._config.get('tempdir')} if process else set()


def is_ours(pid):
    "Was process `pid` started by this run? A descendant, or an orphan that has our temporary folder in its environment"
    if pid == os.getpid() or pid in {o.pid for o in descendants()}: return True
    try: return f'TMPDIR={tempfile.gettempdir()}\0'.encode() in Path(f'/proc/{pid}/environ').read_bytes()
    except OSError: return False


def holders(path):
    "Pids of the processes that map `path` or have it open, as far as we may look"
    found = set()
    try: inode = str(os.stat(path).st_ino)
    except OSError: return found
    def is_it(line):
        "Of /proc/../maps. A semaphore is mapped under the name that it was made with"
        fields = line.split(maxsplit=5)
        return len(fields) > 5 and fields[4] == inode and fields[5].startswith('/dev/shm/')
    for proc in Path('/proc').iterdir():
        if not proc.name.isdigit(): continue
        try:
            mapped = any(map(is_it, (proc/'maps').read_text().splitlines()))
            if mapped or any(os.readlink(o) == path for o in (proc/'fd').iterdir()): found.add(int(proc.name))
        except OSError: continue
    return found


# joblib makes a semaphore while it is imported, by two names: they stay when that process is killed just then
UNFINISHED = r'sem\.(loky-.*|\w{6})$'


def of_others(path):
    "Does the file belong to another user or to processes that this run didn't start? Runs may go on side by side"
    try:
        if os.stat(path).st_uid != os.getuid(): return True
    except FileNotFoundError: return True
    here = Path.cwd()
    # what test_conftest.py leaves on purpose names the folder of the run that is to notice it
    if 'fastddp-test-' in path and f'-{here.parent.name}-{here.name}-' not in path: return True
    if not path.startswith('/dev/shm/'): return False
    pids = holders(path)
    return not any(map(is_ours, pids)) if pids else bool(re.match(UNFINISHED, Path(path).name))


# pytest's own, and one that torch sets when its optimizers are first used
PASSING = 'PYTEST_CURRENT_TEST', 'TORCHINDUCTOR_CACHE_DIR'


def environment(): return {k: v for k, v in os.environ.items() if k not in PASSING}


def handlers():
    """Signal handlers as Python sees them; SIGALRM belongs to pytest-timeout, SIGCHLD to torch's DataLoader, which
    keeps it"""
    return {s.name: signal.getsignal(s) for s in signal.Signals if s not in (signal.SIGALRM, signal.SIGCHLD)}


def left_after(look, before):
    "What `look` finds that was not there before, once everything had time to go"
    end = time.monotonic() + GRACE
    while (left := look() - before) and time.monotonic() < end: time.sleep(0.05)
    return left


def changed(before, now): return {k: (before.get(k), now.get(k)) for k in before | now if before.get(k) != now.get(k)}


@contextlib.contextmanager
def nothing_left():
    "Fails if something is left behind that was not there before"
    was = [look() for look in (children, files, memfds)]
    env, sigs = environment(), handlers()
    yield
    new_files = lambda: {o for o in files()-was[1] if not of_others(o)}
    procs, paths, fds = (left_after(*o) for o in zip((children, new_files, memfds), was))
    problems = {'processes': [f'{o.pid}: {" ".join(o.cmdline()[:6])}' for o in procs if running(o)],
                'files': sorted(paths), 'memory': sorted(fds),
                'environment': changed(env, environment()), 'signal handlers': changed(sigs, handlers())}
    for o in procs: o.kill()   # the next test is not to blame
    problems = {k: v for k, v in problems.items() if v}
    assert not problems, f'left behind: {problems}'
