"The notebook's machine is one of two: `script_hosts.py COMMAND OTHER FOLDER` fits as one process does, then for long"
import sys
from faults import Slow
from parity import assert_same, fit_both, learner
from fastddp.all import Hosts

if __name__ == '__main__':
    command, other, folder = sys.argv[1:]
    with Hosts(['localhost', other], per_node=2, command=command, start_timeout=240.) as hosts:
        hosts.__class__.__exit__ = lambda *_: None      # blocks inside this one keep the workers, too
        assert_same(*fit_both(learner(), 4, hosts, 1))
        print('same as in one process', flush=True)
        learner(train=4000, cbs=[Slow(.01, folder)]).distrib_fit(1000, nprocs=4, launcher=hosts)
