"The GPUs of a standing cluster (made up: its workers are on the CPU) and those of blocks and background jobs."
import contextlib, os, signal
import pytest
from fastddp.all import CantDistribute
from fastddp.cluster import cluster
from fastddp.launch import held_gpus, session
from parity import learner, warm


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture(autouse=True)
def gpus(two, monkeypatch):
    "Clusters and blocks that count as being on the GPUs they ask for"
    def engine_for(given, asked): return contextlib.nullcontext((two, 2, given['gpus']))
    class OnCPU(cluster.StandingLocal):
        def __init__(self, gpus, **kwargs): super().__init__(gpus=[], **kwargs)
    monkeypatch.setattr(session, 'engine_for', engine_for)
    monkeypatch.setattr(cluster, 'workers_for', lambda nprocs, gpus: (2, gpus))
    monkeypatch.setattr(cluster, 'StandingLocal', OnCPU)


HELD = 'standing cluster has GPU 1.*%makedip -k'


def test_jobs_and_blocks_beside_a_cluster():
    learn, dip = learner(), cluster.Cluster(gpus=[0, 1])
    for wait in True, False:
        with pytest.raises(CantDistribute, match=HELD): learn.distrib_fit(1, gpus=[1, 2], wait=wait)
    learn.distrib_fit(1, gpus=[2, 3], wait=False).result(60)
    with pytest.raises(CantDistribute, match=HELD): cluster.Cluster(gpus=[1, 2])
    dip.shutdown()
    learn.distrib_fit(1, gpus=[1, 2], wait=False).result(60)
    assert not held_gpus._reservations


def test_a_cluster_beside_jobs_and_blocks():
    learn = learner()
    with learn.distrib_ctx(gpus=[0, 1]), pytest.raises(CantDistribute, match='distrib_ctx block .*has GPU 0'):
        cluster.Cluster(gpus=[0, 2])
    job = learn.distrib_fit(50, gpus=[0, 1], wait=False)
    with pytest.raises(CantDistribute, match=r'fit\(50.* has GPU 1'): cluster.Cluster(gpus=[1, 2])
    job.stop()
    job.result(60)
    cluster.Cluster(gpus=[1, 2]).shutdown()
    assert not held_gpus._reservations


@pytest.mark.parametrize('n,device', [(0, None), (1, 'the GPU')])
def test_objects_from_gpus_are_pulled_to_the_notebooks(monkeypatch, n, device):
    dip = cluster.Cluster(gpus=[0, 1])
    dip.run_cell('x = 1')
    monkeypatch.setattr(cluster.group, 'n_gpus', lambda: n)
    monkeypatch.setattr(cluster, 'current_device', lambda: 'the GPU')
    monkeypatch.setattr(cluster, 'load', lambda *_, device, home: dict(x=device))
    assert dip.pull('x') == dict(x=device or cluster.torch.device('cpu'))
    dip.shutdown()


def test_a_cluster_that_has_ended_holds_nothing():
    dip = cluster.Cluster(gpus=[0, 1])
    os.kill(dip.pids[1], signal.SIGKILL)
    with pytest.raises(Exception, match='ended'): dip.run_cell('import time; time.sleep(60)')
    assert not held_gpus._reservations
    dip.shutdown()
