"""Two hosts with addresses of their own on this machine: network namespaces with virtual links, each with its own /tmp
and /dev/shm, so that nothing can be shared by accident. Needs root and Linux."""
import os, shutil, subprocess
from pathlib import Path
import pytest
from fastddp.launch.hosts import Hosts
from traces import nothing_left

ENTER = Path(__file__).with_name('enter_host.sh')


def ip(*args): subprocess.run(['ip', *args], check=True, capture_output=True, text=True, timeout=30)


class TwoHosts:
    "Hosts `a` and `b` with a link between them (their eth0), and one from b to this machine (its eth1)"
    def __init__(self):
        n = os.getpid()
        self.a, self.b, self.here = f'fastddp{n}a', f'fastddp{n}b', f'fd{n}'
        self.net = f'10.{n//250%250}.{n%250}'
        self.command = f'ip netns exec {{host}} unshare -m sh {ENTER} {{run}}'
    def make(self):
        for o in self.a, self.b:
            ip('netns', 'add', o)
            ip('-n', o, 'link', 'set', 'lo', 'up')
        ip('link', 'add', 'eth0', 'netns', self.a, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', self.b)
        ip('link', 'add', self.here, 'type', 'veth', 'peer', 'name', 'eth1', 'netns', self.b)
        for args, dev, at in [(('-n', self.a), 'eth0', 1), (('-n', self.b), 'eth0', 2), ((), self.here, 129),
                              (('-n', self.b), 'eth1', 130)]:
            ip(*args, 'addr', 'add', f'{self.net}.{at}/25', 'dev', dev)
            ip(*args, 'link', 'set', dev, 'up')
    def link(self, state): ip('-n', self.a, 'link', 'set', 'eth0', state)
    def remove(self):
        for o in ('link', 'del', self.here), ('netns', 'del', self.a), ('netns', 'del', self.b):
            subprocess.run(['ip', *o], capture_output=True, timeout=30)
    def hosts(self, *names, per_node=2, cls=Hosts, **kwargs):
        "An engine for both hosts, or for those named"
        names = names or (self.a, self.b)
        return cls(names, per_node=per_node, command=self.command, **{'start_timeout': 240., **kwargs})


@pytest.fixture(scope='module')
def net():
    "Yields `TwoHosts`; skips where they can't be made"
    if not shutil.which('ip') or os.geteuid() != 0: pytest.skip('network namespaces need root and the program ip')
    hosts = TwoHosts()
    try: hosts.make()
    except subprocess.CalledProcessError as e:
        hosts.remove()
        pytest.skip(f'no network namespaces here: {e.stderr.strip()}')
    try: yield hosts
    finally: hosts.remove()


# For a whole file of tests that have agents: its module imports all three

@pytest.fixture(scope='module', autouse=True)
def leaves_nothing_at_last():
    "Agents stay from test to test, and have new workers after a failure: what is left is looked at in the end"
    with nothing_left(): yield


@pytest.fixture(autouse=True)
def leaves_nothing(): "Of one test: see `leaves_nothing_at_last`"
