"""The same code as in a notebook, started on two machines by torchrun"""
import json, os
from pathlib import Path
import pytest
from ray_cluster import shared
from two_hosts import net


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_same_code_under_torchrun_on_two_hosts(net, shared):
    here = Path(__file__).parent.parent
    env = dict(PYTHONPATH=f'{here}{os.pathsep}{here.parent}')
    said = net.torchrun(here/'script_fit.py', shared, env=env)
    assert [o[2] for o in said] == [0, 0], said[0][1][:6000]+said[1][1][:6000]
    ranks = [json.loads((shared/f'rank{r}.json').read_text()) for r in range(4)]
    assert all(o['world'] == '4' and o['weights'] == ranks[0]['weights'] for o in ranks)
    assert '4 workers (torchrun, gloo) x batch 16 = 64 per step' in said[0][0] and 'workers (' not in said[1][0]
