"""What fastddp promises about GPUs, checked on the machine at hand: `python benchmarks/gpu_check.py`.

Needs at least one GPU and about ten minutes. With one: a single NCCL rank, and two gloo ranks that share it. With
more: all of them by NCCL, the last two in reverse order, and two ranks against one. Prints a row for each promise,
writes them as JSON and as a page, and exits with 1 if a promise is broken.

    python benchmarks/gpu_check.py [--out FILE] [--only promises,parity] [--dry | --simulated]

`--dry` runs all of it on the CPU, to see that the checks themselves work; it says nothing about GPUs. `--simulated`
runs it on two simulated GPUs: it says nothing about speed, NCCL and drivers.
"""
import argparse, atexit, importlib, os, sys, tempfile
from pathlib import Path

SECTIONS = ('promises', 'parity', 'precision', 'waits', 'speed', 'memory', 'stop')
HERE = Path(__file__).resolve().parent


def parse(args):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', type=Path, help='where the results go, without an ending')
    p.add_argument('--only', default=','.join(SECTIONS), help='sections, separated by commas')
    p.add_argument('--dry', action='store_true', help='on the CPU, with little data')
    p.add_argument('--simulated', action='store_true', help='on two simulated GPUs, with little data (needs g++)')
    o = p.parse_args(args)
    o.only = o.only.split(',')
    if wrong := set(o.only)-{*SECTIONS}:
        p.error(f"no section {', '.join(sorted(wrong))}; there are {', '.join(SECTIONS)}")
    return o


def simulate():
    "Give this process and its workers two simulated GPUs"
    tests = str(HERE.parent/'tests')
    ledger = tempfile.NamedTemporaryFile(prefix='vgpu-', delete=False).name
    atexit.register(os.remove, ledger)
    os.environ |= dict(FASTDDP_GPU_CHECK='simulated', VGPU_COUNT='2', VGPU_LEDGER=ledger,
                       PYTHONPATH=os.pathsep.join([tests, os.environ.get('PYTHONPATH', '')]))
    sys.path.append(tests)
    from simulated_gpu import build
    if why := build.why_not(): sys.exit(f'gpu_check: {why}')
    import simulated_gpu.device
    from fastddp.process import helper
    helper.preload('simulated_gpu.device')


def main(args=None):
    o = parse(args)
    if o.dry: os.environ['FASTDDP_GPU_CHECK'] = 'dry'
    if o.simulated: simulate()
    from gpu import machine
    from gpu.table import Table
    n = machine.n_gpus()
    if not n: sys.exit('gpu_check: no GPU is visible here; `--dry` runs the checks on the CPU.')
    table = Table()
    print(f'{n} x {machine.name()}')
    for section in o.only:
        with table.of(section): importlib.import_module(f'gpu.{section}').check(table)
    folder = HERE/'results'/'gpu' if not (o.dry or o.simulated) else HERE.parent/'build'
    path = o.out or folder/f'{n}x-{machine.name().replace(" ", "-").lower()}'
    table.save(path)
    promised = [r for r in table.rows if r['ok'] is not None]
    print(f'{len(promised)-len(table.broken)} of {len(promised)} hold; {path}.md')
    return len(table.broken) > 0


if __name__ == '__main__': sys.exit(main())
