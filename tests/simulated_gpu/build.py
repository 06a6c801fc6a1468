"""Compiles the simulated device, once for each version of torch and of its source, into build/simulated_gpu"""
import fcntl, hashlib, importlib.metadata, shutil, subprocess, sys, sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name('device.cpp')
FOLDER = Path(__file__).resolve().parents[2]/'build'/'simulated_gpu'    # ignored by git
NAME = '_vgpu'


def why_not():
    "Why it can't be built here, or None"
    if not sys.platform.startswith('linux'): return 'simulated GPUs need Linux'
    if shutil.which('g++') is None: return 'simulated GPUs need g++'
    if not Path(sysconfig.get_path('include'), 'Python.h').exists(): return 'simulated GPUs need the headers of Python'
    # before, `init_process_group(device_id=)` takes GPUs of CUDA only
    if [*map(int, importlib.metadata.version('torch').split('.')[:2])] < [2, 7]: return 'simulated GPUs need torch 2.7'


def library():
    "The path of the compiled device; a compiler's error is raised with what it said"
    import torch
    key = hashlib.sha256(f'{torch.__version__} {sys.version}'.encode()+SOURCE.read_bytes()).hexdigest()[:16]
    path = FOLDER/f'{NAME}-{key}.so'
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER/'lock', 'w') as lock:          # runs side by side build it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists(): return path
        from torch.utils import cpp_extension as ext
        includes = [f'-I{o}' for o in (*ext.include_paths(), sysconfig.get_path('include'))]
        libs = [o for folder in ext.library_paths() for o in (f'-L{folder}', f'-Wl,-rpath,{folder}')]
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        new = path.with_suffix('.new')
        done = subprocess.run(
            ['g++', '-O1', '-std=c++20', '-shared', '-fPIC', '-w', f'-D_GLIBCXX_USE_CXX11_ABI={abi}', '-DUSE_C10D_GLOO',
             f'-DTORCH_EXTENSION_NAME={NAME}', *includes, str(SOURCE), '-o', str(new), *libs,
             '-lc10', '-ltorch_cpu', '-ltorch', '-ltorch_python'], capture_output=True, text=True)
        if done.returncode: raise RuntimeError(f'g++ ended with {done.returncode}:\n{done.stderr[:4000]}')
        new.rename(path)
    return path


if __name__ == '__main__': print(why_not() or library())
