"""Two hosts made of network namespaces (namespaces.py) as a fixture of tests. Needs root and Linux."""
import contextlib, os, shutil, subprocess
import pytest
from namespaces import ENTER, TwoHosts
from traces import nothing_left


@pytest.fixture(scope='module')
def net():
    "Yields `TwoHosts`; skips where they can't be made"
    if not shutil.which('ip') or os.geteuid() != 0: pytest.skip('network namespaces need root and the program ip')
    with contextlib.ExitStack() as stack:
        try: hosts = stack.enter_context(TwoHosts())
        except subprocess.CalledProcessError as e: pytest.skip(f'no network namespaces here: {e.stderr.strip()}')
        yield hosts


# For a whole file of tests that have actors: its module imports all three

@pytest.fixture(scope='module', autouse=True)
def leaves_nothing_at_last():
    "Actors stay from test to test, and have new workers after a failure: what is left is looked at in the end"
    with nothing_left(): yield


@pytest.fixture(autouse=True)
def leaves_nothing(): "Of one test: see `leaves_nothing_at_last`"
