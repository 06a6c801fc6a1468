"""Tests here run in a process with simulated GPUs, which is started before the first test of a module"""
import pytest
import simulated_gpu
from simulated_gpu import build


def pytest_collection_modifyitems(items):
    why = build.why_not()
    for o in items:
        if o.path.parent.name != 'simulated_gpu': continue
        if why: o.add_marker(pytest.mark.skip(reason=why))
        # the first one may wait until the device is compiled
        elif not o.get_closest_marker('timeout'): o.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope='module', autouse=True)
def with_gpus(request):
    if build.why_not() is None:
        tests = [o for o in vars(request.module).values() if hasattr(o, 'needs_gpus')]
        for n in {o.needs_gpus for o in tests}: simulated_gpu.start(n)
    yield
    simulated_gpu.end_all()
