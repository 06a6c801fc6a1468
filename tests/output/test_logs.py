"""`logging` in workers is as the notebook has set it; records go to the notebook's handlers, in order with output."""
import logging, subprocess, sys, textwrap
from contextlib import contextmanager
from pathlib import Path
import pytest
from fastai.callback.core import Callback
from fastddp.all import *
from parity import learner, warm

pytestmark = pytest.mark.timeout(120)
here = Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@contextmanager
def to_file(name, path, level=logging.INFO, **attrs):
    "A logger with a file, as a cell sets it up"
    log, handler = logging.getLogger(name), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter('%(levelname)s %(name)s %(message)s'))
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(level)
    for k, v in attrs.items(): setattr(log, k, v)
    try: yield log
    finally:
        log.removeHandler(handler)
        handler.close()
        log.level, log.propagate = before
        logging.root.manager._clear_cache()


class Logs(Callback):
    def after_epoch(self):
        for name in 'tests.logs.a', 'tests.logs.b':
            log = logging.getLogger(name)
            log.debug('debug')
            log.info('epoch %d', self.epoch)
        logging.getLogger('tests.logs.a').warning('careful', extra=dict(a=1))


def fit(two, n_epoch=2, **kwargs):
    learn = learner(train=8, valid=2, cbs=Logs())
    learn.distrib_fit(n_epoch, nprocs=2, **{'launcher': two, **kwargs})


def test_file_of_the_notebook(two, tmp_path):
    with to_file('tests.logs', tmp_path/'log', propagate=False):
        logging.getLogger('tests.logs.b').setLevel(logging.ERROR)
        try: fit(two)
        finally: logging.getLogger('tests.logs.b').setLevel(logging.NOTSET)
    of_epoch = ['INFO tests.logs.a epoch {}', 'WARNING tests.logs.a careful']
    assert (tmp_path/'log').read_text().splitlines() == [o.format(i) for i in (0, 1) for o in of_epoch]


def test_settings_of_the_last_fit_are_gone(two, tmp_path, caplog):
    with to_file('tests.logs', tmp_path/'log', propagate=False): fit(two, 1)
    n = len((tmp_path/'log').read_text().splitlines())
    assert n == 3
    fit(two, 1)
    assert [o.message for o in caplog.records if o.name.startswith('tests.logs')] == ['careful']
    assert len((tmp_path/'log').read_text().splitlines()) == n


def test_all_handlers_on_the_way(two, tmp_path, caplog):
    "A logger's own file, that of the one above, and the root's handler; filters and disabled levels count"
    with to_file('tests.logs', tmp_path/'above'), to_file('tests.logs.a', tmp_path/'own', logging.DEBUG) as log:
        drop = lambda record: record.getMessage() != 'epoch 0'
        log.addFilter(drop)
        logging.disable(logging.DEBUG)
        try: fit(two, 2)
        finally:
            logging.disable(logging.NOTSET)
            log.removeFilter(drop)
    own = ['WARNING tests.logs.a careful', 'INFO tests.logs.a epoch 1', 'WARNING tests.logs.a careful']
    assert (tmp_path/'own').read_text().splitlines() == own
    above = (tmp_path/'above').read_text().splitlines()
    assert [o for o in above if '.a ' in o] == own and len(above) == 5
    assert [o.a for o in caplog.records if o.message == 'careful'] == [1, 1]


def test_all_ranks(tmp_path):
    with to_file('tests.logs', tmp_path/'log', propagate=False): fit(None, 1, launcher=Local(see='all'))
    lines = (tmp_path/'log').read_text().splitlines()
    assert sorted(lines) == sorted(f'{level} tests.logs.{name} {rank}{text}' for rank in ('', '[rank 1] ')
                                   for level, name, text in [('INFO', 'a', 'epoch 0'), ('INFO', 'b', 'epoch 0'),
                                                             ('WARNING', 'a', 'careful')])


class LogsItems:
    def __getitem__(self, i):
        logging.getLogger('tests.logs').info('item %d', i)
        return 1.*i
    def __len__(self): return 4


def read_items():
    from torch.utils.data import DataLoader
    return [o.item() for b in DataLoader(LogsItems(), num_workers=1, multiprocessing_context='fork') for o in b]


def test_processes_of_a_loader(tmp_path):
    with to_file('tests.logs', tmp_path/'log', propagate=False): ranch(1, read_items, caller_rank=None)
    lines = (tmp_path/'log').read_text().splitlines()
    assert lines == [f'INFO tests.logs item {i}' for i in range(4)]


def note(i): logging.getLogger('tests.logs').info('from %d', i)


def test_functions(tmp_path):
    with to_file('tests.logs', tmp_path/'log', propagate=False):
        ranch(2, note, 7, caller_rank=None)
        spawn(note, nprocs=2)
    assert (tmp_path/'log').read_text().splitlines()[0] == 'INFO tests.logs from 7'
    assert 'INFO tests.logs [rank 1] from 1' in (tmp_path/'log').read_text().splitlines()[1:]


def test_captured_warnings(two, caplog):
    class Warns(Callback):
        def after_fit(self): __import__('warnings').warn('to be logged')
    logging.captureWarnings(True)
    try: learner(train=8, valid=2, cbs=Warns()).distrib_fit(1, nprocs=2, launcher=two)
    finally: logging.captureWarnings(False)
    assert [o.name for o in caplog.records if 'to be logged' in o.message] == ['py.warnings']


SCRIPT = f'''
import logging, sys
sys.path.insert(0, {str(here)!r})
from fastai.callback.core import Callback
from fastddp.all import *
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(levelname)s %(message)s')
class Both(Callback):
    def after_epoch(self):
        print('printed', self.epoch)
        logging.info('logged %d', self.epoch)
        print('again', self.epoch)
if __name__ == '__main__':
    from parity import learner
    learner(train=8, valid=2, cbs=Both()).distrib_fit(3, nprocs=2)
'''


TORCHRUN = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']


@pytest.mark.full
@pytest.mark.parametrize('launcher', [[], TORCHRUN], ids=['script', 'torchrun'])
def test_order(launcher, tmp_path):
    (tmp_path/'script.py').write_text(SCRIPT)
    ran = subprocess.run([sys.executable, *launcher, 'script.py'], cwd=tmp_path, text=True, capture_output=True,
                         timeout=100)
    assert not ran.returncode, ran.stderr
    wanted = [o.format(i) for i in range(3) for o in ('printed {}', 'INFO logged {}', 'again {}')]
    # under torchrun each rank logs to its own stdout, as the script says
    if launcher: assert all(ran.stdout.count(o) == 2 for o in wanted if 'logged' in o)
    else: assert [o for o in ran.stdout.splitlines() if o.startswith(('printed', 'INFO', 'again'))] == wanted
