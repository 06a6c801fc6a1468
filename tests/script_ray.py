"""The notebook as a process of its own, on a machine of a Ray cluster: `script_ray.py ADDRESS FOLDER` fits as one
process does, on this machine only, which leaves nothing of Ray's behind, and then for long on two"""
import os, sys
from faults import Slow
from parity import assert_same, fit_both, learner
from fastddp.all import Ray

if __name__ == '__main__':
    address, folder = sys.argv[1:]
    learner(train=8, valid=1)       # what torch sets once and for all is set
    was = os.environ.get('PYTHONBREAKPOINT')
    assert_same(*fit_both(learner(), 2, Ray(address, nodes=1, per_node=2), 1))
    import ray
    assert not ray.is_initialized()
    assert was == os.environ.get('PYTHONBREAKPOINT')
    print('as before', flush=True)
    os.environ['RAY_ADDRESS'] = address
    learner(train=4000, cbs=[Slow(.01, folder)]).distrib_fit(
        1000, launcher=Ray(per_node=2, start_timeout=240., link_timeout=600.))
