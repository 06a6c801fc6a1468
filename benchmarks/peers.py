"""What people use in a notebook instead: two processes that have imported fastai, in a group, after one all-reduce.

Each peer runs in an interpreter of its own, as a fresh notebook would, and prints the seconds from the call to the
reduced sum. A peer that is not installed is said so (`pip install -e '.[bench]'` brings them).

    python benchmarks/peers.py [--repeats 5]
"""
import importlib.util, os, subprocess, sys, tempfile
from pathlib import Path
from common import arguments, save, show, summary, take_turns

WORK = '''
import os, sys, time, warnings
warnings.simplefilter('ignore')
path, called = sys.argv[1], time.time()
os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
def work(rank, path, called):
    import time, torch, torch.distributed as dist
    import fastai.vision.all
    dist.init_process_group('gloo', init_method='file://'+path, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    secs = time.time()-called
    if rank == 0: print('SECONDS', secs, flush=True)
    dist.destroy_process_group()
    return secs
'''

SPAWN = WORK+'''
import torch.multiprocessing as mp
if __name__ == '__main__': mp.spawn(work, args=(path, time.time()), nprocs=2)
'''

ACCELERATE = '''
import time, torch, torch.distributed as dist, fastai.vision.all
from accelerate import Accelerator, debug_launcher
def work(called):
    acc = Accelerator(cpu=True)
    dist.all_reduce(torch.ones(1))
    if acc.is_main_process: print('SECONDS', time.time()-called, flush=True)
if __name__ == '__main__': debug_launcher(work, (time.time(),), num_processes=2)
'''

LIGHTNING = '''
import os, time, warnings
warnings.simplefilter('ignore')
import torch, fastai.vision.all
from lightning.fabric import Fabric
def work(fabric, called):
    import fastai.vision.all
    fabric.all_reduce(torch.ones(1))
    if fabric.global_rank == 0: print('SECONDS', time.time()-called, flush=True)
if __name__ == '__main__': Fabric(accelerator='cpu', devices=2, strategy=STRATEGY).launch(work, time.time())
'''

IPYPARALLEL = '''
import logging, sys, time, ipyparallel as ipp
def work(rank, path, called):
    import os, time, torch, torch.distributed as dist
    import fastai.vision.all
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
    dist.init_process_group('gloo', init_method='file://'+path, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    return time.time()-called
if __name__ == '__main__':
    called = time.time()
    with ipp.Cluster(n=2, log_level=logging.ERROR) as rc:
        rc.wait_for_engines(2)
        res = [rc[i].apply_async(work, i, sys.argv[1], called) for i in range(2)]
        print('SECONDS', res[0].get(), flush=True)
'''

# Its magics need a live shell. Its shutdown ends every process of the machine with a name like a worker's, so its own
# are ended here.
NBDISTRIBUTED = '''
import os, time
os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbdistributed.magic import DistributedMagic
DistributedMagic._nuclear_shutdown = classmethod(lambda cls: None)
if __name__ == '__main__':
    shell, called = InteractiveShell.instance(), time.time()
    shell.run_line_magic('load_ext', 'nbdistributed')
    shell.run_line_magic('dist_init', '-n 2')
    [magic] = [o for o in shell.magics_manager.registry.values() if isinstance(o, DistributedMagic)]
    while True:     # a cell that comes before the workers listen is lost
        try: magic._comm_manager.send_to_all('get_status', {}, timeout=.2)
        except Exception: continue
        break
    with capture_output() as shown: shell.run_cell_magic('distributed', '', """
import fastai.vision.all
t = torch.ones(1)
dist.all_reduce(t)
print(f'summed to {t.item()}')
""")
    secs = time.time()-called
    for p in magic._process_manager.processes: p.kill()
    if shown.stdout.count('summed to 2.0') == 2: print('SECONDS', secs, flush=True)
    else: print(shown.stdout, flush=True)
    os._exit(0)
'''

PEERS = {   # name -> (package, script)
    'torch spawn': ('torch', SPAWN),
    'accelerate (fork)': ('accelerate', ACCELERATE),
    'lightning ddp_spawn': ('lightning', LIGHTNING.replace('STRATEGY', "'ddp_spawn'")),
    'lightning ddp_fork': ('lightning', LIGHTNING.replace('STRATEGY', "'ddp_fork'")),
    'ipyparallel': ('ipyparallel', IPYPARALLEL),
    'nbdistributed': ('nbdistributed', NBDISTRIBUTED)}


def seconds(script):
    with tempfile.TemporaryDirectory() as d:
        path = Path(d, 'peer.py')
        path.write_text(script, encoding='utf-8')
        env = {**os.environ, 'PYTHONWARNINGS': 'ignore', 'IPYTHONDIR': d}
        r = subprocess.run([sys.executable, str(path), os.path.join(d, 'rendezvous')], capture_output=True, text=True,
                           timeout=300, env=env)
    if 'SECONDS' not in r.stdout: raise RuntimeError(f'peer failed:\n{r.stdout[-500:]}\n{r.stderr[-2000:]}')
    return float(r.stdout.split('SECONDS')[1].split()[0])


def installed():
    "`name -> function that returns its seconds`; says who is missing"
    for name, (package, _) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed (pip install -e '.[bench]')")
    return {name: (lambda script=script: seconds(script))
            for name, (package, script) in PEERS.items() if importlib.util.find_spec(package)}


def main():
    args = arguments(__doc__)
    times = take_turns(installed(), args.repeats)
    rows = summary(times, 'torch spawn')
    show('Seconds from the call to the first all-reduce, 2 processes', rows)
    if not args.small: save('peers', args.machine, unit='seconds', rows=rows, times=times)


if __name__ == '__main__': main()
