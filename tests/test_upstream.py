"""Defects of the libraries below us that our code works around (docs/maintainers/upstream.md). Each test fails when one
is mended, so that the detour can go."""
import pickle, re, subprocess, sys
from pathlib import Path
import cloudpickle, fastai.callback.progress, psutil, pytest, torch     # it patches `no_bar` onto the learner
from fastai.callback.core import Callback
from learners import make_learner

root = Path(__file__).resolve().parent.parent


def test_fastai_hides_an_exception_without_text():
    class Raises(Callback):
        def after_batch(self): raise ValueError
    with pytest.raises(IndexError): make_learner(cbs=[Raises()]).fit(1)


def test_fastai_ignores_run_after():
    class Late(Callback): order = 5
    class Early(Callback): order, run_after = 1, Late
    learn = make_learner(cbs=[Early(), Late()])
    names = [o.name for o in learn.cbs.sorted('order')]
    assert names.index('early') < names.index('late')


def test_a_pickled_learner_has_lost_its_losses():
    learn = make_learner()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    again = pickle.loads(cloudpickle.dumps(learn))
    assert learn.recorder.losses and not getattr(again.recorder, 'losses', None)


def test_fastai_saves_nothing_where_rank_is_set(tmp_path, monkeypatch):
    learn = make_learner()
    learn.path = tmp_path
    monkeypatch.setenv('RANK', '1')
    assert not learn.save('lost').exists()


def said_by(code):
    "In a process of its own: `fastai.distributed` puts its `distrib_ctx` in the place of ours"
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, timeout=120)
    return done.stdout


@pytest.mark.full
def test_fastai_distributed_needs_accelerate():
    said = said_by("import sys; sys.modules['accelerate'] = None\ntry: import fastai.distributed\n"
                   "except NameError as e: print(e)")
    assert "'Accelerator' is not defined" in said


DROPS = """
import torch
from fastai.distributed import DistributedDL
called = []
def collate(items): return called.append(1) or torch.tensor(items)
dl = torch.utils.data.DataLoader(list(range(8)), batch_size=2, sampler=[7, 5, 3, 1], collate_fn=collate)
mine = DistributedDL(dl, rank=0, world_size=1, device='cpu')
mine._broadcast = lambda t, rank: t
print(sorted(torch.cat([*mine]).tolist()), called)
"""


@pytest.mark.full
def test_fastais_own_sharding_drops_a_sampler():
    pytest.importorskip('accelerate')
    assert said_by(DROPS) == '[0, 1, 2, 3, 4, 5, 6, 7] []\n'


def test_a_store_of_torch_listens_on_all_addresses():
    store = torch.distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    at = [o.laddr for o in psutil.Process().net_connections('inet') if o.status == psutil.CONN_LISTEN]
    assert [o.ip for o in at if o.port == store.port] in (['::'], ['0.0.0.0'])


def test_torch_pickles_tensors_in_the_band():
    buffers = []
    cloudpickle.dumps(torch.zeros(1000), protocol=5, buffer_callback=buffers.append)
    assert buffers == []


def test_each_row_names_a_test():
    "Of the page: the tests that it names are there"
    page = (root/'docs'/'maintainers'/'upstream.md').read_text(encoding='utf-8')
    named = re.findall(r'`([\w/]+\.py)::(test_\w+)`', page)
    assert len(named) > 8
    assert [o for o in named if f'def {o[1]}(' not in (root/'tests'/o[0]).read_text(encoding='utf-8')] == []
