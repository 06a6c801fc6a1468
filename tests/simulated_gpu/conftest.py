"""Tests here run in a process with simulated GPUs"""
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
    "The processes that the module's tests need, before a test looks at what it leaves behind"
    if build.why_not() is None:
        here = [o.function for o in request.session.items if o.path == request.path]
        for n in {o.needs_gpus for o in here}: simulated_gpu.start(n)


@pytest.fixture(scope='session', autouse=True)
def end_processes():
    yield
    simulated_gpu.end_all()
