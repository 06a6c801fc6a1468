"""What is missing to make the environment, in one line on standard output; nothing if all is there.

Run as `python check.py VENV` by the interpreter that the environment is made with, however old: no f-strings here.
"""
import os, shutil, subprocess, sys

NEED_GB = 9   # 6.2 for torch with its CUDA libraries and the rest, 2.5 for pip's downloads until it is done


def version_of(python):
    "The (major, minor) of the interpreter at `python`, None if it does not run"
    try: out = subprocess.check_output([python, '-c', 'import sys; print("%d.%d" % sys.version_info[:2])'])
    except (OSError, subprocess.CalledProcessError): return None
    return tuple(int(o) for o in out.decode().split('.'))


def wrong_python(venv):
    "Why this interpreter can't make or can't use `venv`, None if it can"
    here, there = tuple(sys.version_info[:2]), version_of(os.path.join(venv, 'bin', 'python'))
    if here < (3, 10):
        return 'Python 3.10 or newer is needed, %s is %d.%d: pass PYTHON=/path/to/python' % ((sys.executable,) + here)
    if there and there != here:
        return '%s was made with Python %d.%d, PYTHON is %d.%d: run `make distclean`, or pass another VENV=' % (
            (venv,) + there + here)
    if there: return None
    try: import ensurepip, venv as _
    except ImportError:
        return ('%s has no venv module: run `apt-get install python3-venv`, or pass PYTHON=/path/to/python'
                % sys.executable)


def no_room(venv):
    "Why the packages would not fit, None if they do or are there"
    lib = os.path.join(venv, 'lib', 'python%d.%d' % tuple(sys.version_info[:2]), 'site-packages', 'torch')
    if os.path.isdir(lib): return None
    place = os.path.dirname(os.path.abspath(venv))
    free = shutil.disk_usage(place).free / 2**30
    if free < NEED_GB:
        return '%d GB of free disk are needed for %s, %.1f GB are free in %s' % (NEED_GB, venv, free, place)


if __name__ == '__main__':
    problem = wrong_python(sys.argv[1]) or no_room(sys.argv[1])
    if problem: print(problem)
