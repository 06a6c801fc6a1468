"""Every test leaves the machine as it found it: processes, files, shared memory, environment, signal handlers."""
import atexit, contextlib, os, shutil, tempfile
import pytest
from traces import changed, children, environment, files, handlers, left_after, memfds, of_others, running


def own_temporary_folder():
    "A temporary folder of this run only, so that runs side by side don't see each other's files"
    path, pid = tempfile.mkdtemp(prefix='t'), os.getpid()
    os.environ['TMPDIR'], tempfile.tempdir = path, None
    # at exit, and after multiprocess has removed what it keeps in there; a forked child must not do it
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == pid else None)


own_temporary_folder()


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


@pytest.fixture(autouse=True)
def leaves_nothing():
    "Fail the test that leaves something behind"
    with nothing_left(): yield
