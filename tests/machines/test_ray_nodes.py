"""A Ray cluster whose nodes claim GPUs that torch doesn't find; one makes runtime environments, one has no fastddp."""
import os
import pytest
from parity import assert_same, fit_both, learner
from ray_cluster import Cluster, connected, needs_ray, wait_until_free
from two_hosts import leaves_nothing, leaves_nothing_at_last, net
from fastddp.all import CantDistribute, Ray
from fastddp.launch.engine import Job

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope='module')
def cluster(net, leaves_nothing_at_last):
    cluster = Cluster(net, num_gpus=2)
    try:
        cluster.start(runtime_envs=True)
        cluster.bare = cluster.add_without_fastddp(num_cpus=1, resources=dict(bare=1))
        with connected(cluster): yield cluster
    finally: cluster.stop()


@pytest.fixture(autouse=True)
def all_is_given_back(cluster):
    yield
    wait_until_free(CPU=5, GPU=4, bare=1)


def ray_of(cls=Ray, **kwargs): return cls(**{'start_timeout': 240., **kwargs})


@pytest.fixture
def reserved(cluster):
    "Returns what has been asked of Ray since the test's begin: CPUs and GPUs of each bundle"
    import ray
    was = set(ray.util.placement_group_table())
    def found():
        new = [o for k, o in ray.util.placement_group_table().items() if k not in was]
        return [{k: v for k, v in b.items() if k in ('CPU', 'GPU')} for o in new for b in o['bundles'].values()]
    return found


@needs_ray
@pytest.mark.parametrize('asked,gpus', [({}, 2), (dict(per_node=1), 1), (dict(nodes=2, per_node=2), 2)])
def test_gpus_that_torch_does_not_find(cluster, reserved, asked, gpus):
    "Ray is asked for one for each rank. What it gives is no good: one line for each machine, and nobody trains"
    with pytest.raises(CantDistribute) as caught: learner().distrib_fit(1, launcher=ray_of(**asked))
    lines = str(caught.value).splitlines()
    assert [o.split(':')[0] for o in lines] == ['localhost', cluster.other]
    assert all(f'Ray gave {gpus} GPU' in o and 'Ray(gpus=0) takes the CPU' in o for o in lines), lines
    assert reserved() == [{'CPU': gpus, 'GPU': gpus}]*2


@needs_ray
@pytest.mark.parametrize('engine,call', [(dict(gpus=0), {}), ({}, dict(gpus=[]))])
def test_the_cpu_is_asked_for(reserved, engine, call, capsys):
    "By the engine or by the call: no GPU is reserved"
    assert_same(*fit_both(learner(), 2, ray_of(nodes=2, per_node=1, **engine), 1, ddp=call))
    assert capsys.readouterr().out.startswith('2 workers (2 machines x 1 on the CPU, gloo over ')
    assert reserved() == [{'CPU': 1}]*2


@needs_ray
def test_a_machine_without_fastddp(cluster):
    "The actor gets there, since it travels by value, and says so"
    import ray
    def finds_fastddp():
        import importlib.util
        return importlib.util.find_spec('fastddp') is not None
    assert not ray.get(ray.remote(num_cpus=0, resources=dict(bare=1))(finds_fastddp).remote(), timeout=120)
    says = f'^{cluster.bare}: has no fastddp for this Python: install it there, or name it in runtime_env= '
    with pytest.raises(CantDistribute, match=says) as caught:
        learner().distrib_fit(1, launcher=ray_of(gpus=0, resources=dict(bare=1)))
    assert '\n' not in str(caught.value)


def variables(ctx, obj): return os.environ.get('MINE'), os.environ.get('NOTEBOOKS'), ctx.local_rank


@needs_ray
def test_a_runtime_environment(cluster, monkeypatch):
    "Its variables are there, on the other machine; all else is the notebook's"
    for k in 'MINE', 'NOTEBOOKS': monkeypatch.setenv(k, 'at home')
    launcher = ray_of(nodes=2, per_node=1, gpus=0, runtime_env=dict(env_vars=dict(MINE='there')))
    with launcher: found = launcher.run(Job.of(variables, None), launcher.place()[0]).results
    assert found == [('at home', 'at home', 0), ('there', 'at home', 0)]


@needs_ray
@pytest.mark.parametrize('wrong,says', [
    (dict(working_dir='file:///no/such.zip'), r"^[\d.]+: Ray couldn't make its runtime_env= there \(.*such.zip")])
def test_a_runtime_environment_that_cannot_be(cluster, wrong, says):
    with pytest.raises(CantDistribute, match=says) as caught:
        learner().distrib_fit(1, launcher=ray_of(nodes=2, per_node=1, gpus=0, runtime_env=wrong))
    assert '\n' not in str(caught.value)
