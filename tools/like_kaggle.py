"""Runs a command under the limits of a free notebook service: 64 MB of shared memory, 4 cores, 30 GB of memory.

    python tools/like_kaggle.py COMMAND ...

Needs root, for a mount namespace with a small /dev/shm; a control group holds the memory where there is one to make.
"""
import os, subprocess, sys
from pathlib import Path

SHM, CORES, MEMORY = '64m', 4, 30*2**30
GROUPS = Path('/sys/fs/cgroup')


def limit_memory(name='like-kaggle'):
    "Puts this process into a control group of its own; says whether it could"
    group = GROUPS/name
    try:
        group.mkdir(exist_ok=True)
        (group/'memory.max').write_text(str(MEMORY))
        (group/'cgroup.procs').write_text(str(os.getpid()))
    except OSError: return False
    return True


def main(command):
    if os.geteuid(): sys.exit('like_kaggle: needs root, for a small /dev/shm of its own')
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    if not limit_memory(): print('like_kaggle: no control group can be made here, so memory is not limited', flush=True)
    env = os.environ | dict(OMP_NUM_THREADS=str(CORES))
    script = f'mount -t tmpfs -o size={SHM} tmpfs /dev/shm && exec "$@"'
    return subprocess.run(['unshare', '--mount', 'sh', '-c', script, 'sh', *command], env=env).returncode


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
