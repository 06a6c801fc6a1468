"""What fastddp promises about GPUs, checked on the machine at hand: `python benchmarks/gpu_check.py`.

Needs at least one GPU and about ten minutes. With one: a single NCCL rank, and two gloo ranks that share it. With
more: two and all of them by NCCL, the last two in reverse order, and two ranks against one. Prints a row for each
promise, writes them as JSON and as a page after each section, and exits with 1 if a promise is broken.

    python benchmarks/gpu_check.py [--out FILE] [--only promises,parity] [--dry | --simulated]

`--dry` runs all of it on the CPU, to see that the checks themselves work; it says nothing about GPUs. `--simulated`
runs it on two simulated GPUs, without the section of speed: it says nothing about NCCL and drivers either.
"""
import argparse, atexit, contextlib, importlib, os, signal, sys, tempfile
from pathlib import Path

SECTIONS = ('first', 'promises', 'parity', 'precision', 'waits', 'speed', 'memory', 'stop')
HERE = Path(__file__).resolve().parent
LONGEST = 180       # seconds for a section


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


@contextlib.contextmanager
def limited():
    "A section that hangs leaves the time to the others"
    def over(*_): raise TimeoutError(f'no end after {LONGEST} s')
    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(LONGEST)
    try: yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(args=None):
    o = parse(args)
    if o.dry: os.environ['FASTDDP_GPU_CHECK'] = 'dry'
    if o.simulated: simulate()
    from gpu import machine
    from gpu.table import Table
    n = machine.n_gpus()
    if not n: sys.exit('gpu_check: no GPU is visible here; `--dry` runs the checks on the CPU.')
    table = Table()
    folder = HERE/'results'/'gpu' if not (o.dry or o.simulated) else HERE.parent/'build'
    path = o.out or folder/f'{n}x-{machine.name().replace(" ", "-").lower()}'
    print(f'{n} x {machine.name()}; two ranks are {machine.two_are()}')
    for section in o.only:
        if machine.SIMULATED and section == 'speed': continue
        with table.of(section), limited(): importlib.import_module(f'gpu.{section}').check(table)
        table.save(path)        # a lent machine may be gone soon
    promised = [r for r in table.rows if r['ok'] is not None]
    print(f'{len(promised)-len(table.broken)} of {len(promised)} hold; {path}.md')
    return len(table.broken) > 0


if __name__ == '__main__': sys.exit(main())
