"""`make gpu`: runs benchmarks/gpu_check.py with an interpreter that has what it needs; installs nothing that is there.

The environment of this checkout if there is one, else this Python if it has torch. What that one lacks comes from the
wheels in `.whl/`, into `.site/`: so it runs on a machine without network. Arguments go to gpu_check.py.
"""
import os, subprocess, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
NEEDED = ('torch', 'fastai', 'fastcore', 'cloudpickle')


def interpreter(venv=root/'.venv'):
    own = venv/'bin'/'python'
    return str(own) if own.exists() else sys.executable


def lacking(python, path):
    "Which of the modules that are needed `python` doesn't find"
    code = f'import importlib.util as u; print(*[o for o in {NEEDED!r} if u.find_spec(o) is None])'
    return subprocess.run([python, '-c', code], env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True,
                          check=True).stdout.split()


def install_wheels(python, wheels, site):
    "Puts `wheels` into the folder `site`, without a network"
    subprocess.run([python, '-m', 'pip', 'install', '-q', '--no-index', '--no-deps', '--no-compile', '--no-cache-dir',
                    '--upgrade', '--target', str(site), *map(str, wheels)], check=True)


def main(args):
    python, site = interpreter(), root/'.site'
    path = os.pathsep.join([str(site), str(root)])
    wheels = sorted((root/'.whl').glob('*.whl'))
    if lacking(python, path) and wheels: install_wheels(python, wheels, site)
    if missing := lacking(python, path):
        sys.exit(f"{python} has no {', '.join(missing)}: `make venv` makes an environment; "
                 "without a network, put their wheels into .whl/.")
    done = subprocess.run([python, '-W', 'ignore', str(root/'benchmarks'/'gpu_check.py'), *args],
                          env=os.environ | dict(PYTHONPATH=path))
    return done.returncode


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
