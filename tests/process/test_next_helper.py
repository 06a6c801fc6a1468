"""A library that workers had to import is imported by the next helper, which takes the place of the present one"""
import os, sys, time
import pytest
from fastai.callback.core import Callback
from fastddp.all import *
from fastddp.process import helper
from parity import learner

pytestmark = pytest.mark.timeout(180)

SLOW = '''
import os, time
from fastai.callback.core import Callback
_began = time.process_time()
while time.process_time() < _began+.5: pass
{more}
__pid__ = os.getpid()       # of the process that imported it; other variables are sent
class Where(Callback):
    def before_fit(self): self.here = __pid__ == os.getpid()
def here(): return __pid__ == os.getpid()
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    "A function that imports a new module: of a library, or the user's own"
    made = []
    def make(name, more='', folder='site-packages'):
        path = tmp_path/folder
        path.mkdir(exist_ok=True)
        (path/f'{name}.py').write_text(SLOW.format(more=more))
        monkeypatch.syspath_prepend(str(path))
        made.append(name)
        return __import__(name)
    yield make
    for name in made: sys.modules.pop(name, None)


def wait_for_next():
    "Until the second helper has taken the place of the first one, or has ended; the pid of the helper"
    end = time.monotonic()+90
    while helper.ensure_helper() and helper._next and time.monotonic() < end: time.sleep(.1)
    assert not helper._next
    return helper.ensure_helper().popen.pid


def imported_in_worker(lib, **kwargs):
    "Did a worker import it in a fit? And what the report says"
    learn = learner(cbs=lib.Where())
    learn.distrib_fit(1, nprocs=2, **kwargs)
    return learn.where.here, repr(learn.distrib_report)


def imported_by_workers(f):
    "What `f` returns on a rank that isn't in this process"
    return ranch(2, f)[1]


@pytest.mark.full
def test_the_next_call_finds_it_imported(module):
    lib = module('lib_slow')
    wait_for_next()         # what a test before this one has made workers import
    helper._noted.clear()
    here, report = imported_in_worker(lib)
    assert here and 'lib_slow' in report.split('\n')[0] and '  import ' in report
    first = helper.ensure_helper().popen.pid
    assert wait_for_next() != first
    here, report = imported_in_worker(lib)
    assert not here and 'lib_slow' not in report and '  import ' not in report
    assert not helper._next and lib.__name__ in helper.ensure_helper().libraries


@pytest.mark.full
def test_a_library_that_looks_for_gpus_at_its_import_finds_the_notebooks(module, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    saw = '__saw__ = os.environ.get("CUDA_VISIBLE_DEVICES")'
    lib = module('lib_of_gpus', more=f'{saw}\ndef saw(): return __saw__, here()')
    assert imported_by_workers(lib.saw) == ('0,1', True)
    wait_for_next()
    assert imported_by_workers(lib.saw) == ('0,1', False)


@pytest.mark.full
def test_another_library_comes_beside_the_first(module):
    lib = module('lib_slow')
    assert imported_by_workers(lib.here)
    wait_for_next()
    other = module('lib_slow_too')
    assert imported_by_workers(other.here)
    wait_for_next()
    assert not imported_by_workers(other.here) and not imported_by_workers(lib.here)


@pytest.mark.full
def test_a_library_that_the_users_module_imports(module):
    lib = module('lib_below')
    own = module('own_above', 'import lib_below', folder='')
    def both(): return own.here(), lib.here()
    assert imported_by_workers(both) == (True, True)
    wait_for_next()
    assert imported_by_workers(both) == (True, False)      # the user's module may change


@pytest.mark.full
def test_workers_stay_when_the_helper_is_replaced(module):
    lib, learn = module('lib_in_block'), learner()
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        assert imported_in_worker(lib)[0]       # in workers of their own
        first = helper.ensure_helper().popen
        assert wait_for_next() != first.pid and first.poll() is None
        learn.fit(1)
        assert len(learn.recorder.values) == 1
    assert first.wait(30) == 0


THREAD = 'import threading; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()'
ENDS_HELPER = """
import threading
if threading.active_count() == 1 and os.getpid() != %d: os._exit(3)       # a worker has two
""" % os.getpid()


@pytest.mark.full
@pytest.mark.parametrize('more', [THREAD, ENDS_HELPER], ids=['thread', 'ends'])
def test_a_library_after_which_workers_cannot_be_forked(module, more):
    lib = module('lib_refused', more)
    helper.ensure_helper()
    try:
        for _ in range(2):
            assert imported_by_workers(lib.here)    # the helper doesn't have it, now as before
            wait_for_next()     # on a busy machine other imports may have a new helper made
            assert 'lib_refused' in helper._refused
    finally: helper._refused.clear()
    assert helper.start_method() == 'forkserver'
