"""Two hosts with addresses of their own on this machine: network namespaces with virtual links, each with its own /tmp
and /dev/shm, so that nothing can be shared by accident. Needs root and Linux."""
import os, subprocess, sys
from pathlib import Path

ENTER = Path(__file__).with_name('enter_host.sh')


def ip(*args): return subprocess.run(['ip', *args], check=True, capture_output=True, text=True, timeout=30).stdout


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
    def __enter__(self):
        try: self.make()
        except BaseException:
            self.remove()
            raise
        return self
    def __exit__(self, *_): self.remove()
    def link(self, state): ip('-n', self.a, 'link', 'set', 'eth0', state)
    def remove(self):
        for o in ('link', 'del', self.here), ('netns', 'del', self.a), ('netns', 'del', self.b):
            subprocess.run(['ip', *o], capture_output=True, timeout=30)
    def _start(self, host, run, env):
        argv = [o for w in self.command.split() for o in (run if w == '{run}' else [w.replace('{host}', host)])]
        return subprocess.Popen([*map(str, argv)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    def torchrun(self, *script, per_node=2, env={}):
        "Runs a script on both hosts as torchrun does, and waits: `(stdout, stderr, exit status)` of each"
        env = os.environ | dict(OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME='eth0') | env
        run = [sys.executable, '-m', 'torch.distributed.run', '--nnodes', 2, '--nproc-per-node', per_node,
               '--master-addr', f'{self.net}.1', '--master-port', 29511]
        nodes = [self._start(o, [*run, '--node-rank', i, *script], env) for i, o in enumerate((self.a, self.b))]
        try: return [(*o.communicate(timeout=240), o.returncode) for o in nodes]
        finally:
            for o in nodes:
                o.terminate()
                o.wait()
