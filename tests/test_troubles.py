"""An error says what to do: each entry of the catalogue is known by a type and a message, and no other error has it."""
import pytest
from fastddp.base.errors import TROUBLES, trouble_of

# entry -> the exception's type and message (or the signal) by which it is known
EXAMPLES = {
    'out of memory on the GPU': ('OutOfMemoryError', 'CUDA out of memory. Tried to allocate 2.00 GiB'),
    'an assertion on the GPU': ('AcceleratorError', 'CUDA error: device-side assert triggered\nCUDA kernel errors'),
    'a GPU for one process': ('AcceleratorError', 'CUDA error: CUDA-capable device(s) is/are busy or unavailable'),
    # `OSError: [Errno 12] Cannot allocate memory` is another text for it
    'two devices in one operation': ('RuntimeError', 'Expected all tensors to be on the same device, but found at '
                                     'least two devices, cuda:0 and cuda:1!'),
    'a GPU that isn\'t there': ('AcceleratorError', 'CUDA error: invalid device ordinal'),
    'torch without code for the GPU': ('RuntimeError', 'CUDA error: no kernel image is available for execution on the '
                                       'device'),
    'two workers on one GPU': ('DistBackendError', 'Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1'),
    'out of memory': ('RuntimeError', "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    'shared memory is full': ('RuntimeError', 'DataLoader worker (pid 1) is killed by signal: Bus error'),
    'a connection broke': ('ConnectionResetError', '[Errno 104] Connection reset by peer'),
    'disk is full': ('OSError', "[Errno 28] No space left on device: '/tmp/x'"),
    'name not in a module': ('ImportError', "cannot import name 'Param' from 'fastcore.script'"),
    'module not found': ('ModuleNotFoundError', "No module named 'mine'"),
    'file not found': ('FileNotFoundError', "[Errno 2] No such file or directory: 'x'"),
    'path too long': ('OSError', 'AF_UNIX path too long'),
    'not writable': ('OSError', "[Errno 30] Read-only file system: 'models'"),
    'not permitted': ('PermissionError', "[Errno 13] Permission denied: '/data/x.png'"),
    'no keyboard': ('EOFError', 'EOF when reading a line'),
    'an operator of the notebook': ('AttributeError', "'_OpNamespace' 'mine' object has no attribute 'twice'"),
    'name not known': ('NameError', "name 'x' is not defined"),
    'WandbCallback': ('TypeError', 'Exception occured in `WandbCallback` when calling event `before_fit`:\n\t'
                                   'vars() argument must have __dict__ attribute'),
    'a count of zero': ('ZeroDivisionError', 'division by zero'),
    'batch size built in': ('RuntimeError', 'Expected hidden size (2, 16, 64), got [2, 8, 64]'),
    'sys.exit': ('SystemExit', '3'),
    'killed by the system': ('SIGKILL', ''), 'no room for a file in memory': ('SIGBUS', ''),
    'compiled code crashed': ('SIGSEGV', ''), 'exited': ('exit', ''),
    'machine or link lost': ('lost', ''),
    'no step': ('GroupTimeout', '')}


def test_every_entry_has_an_example(): assert [t.name for t in TROUBLES] == list(EXAMPLES)


@pytest.mark.parametrize('name', EXAMPLES)
def test_is_known_by(name): assert trouble_of(*EXAMPLES[name]).name == name


@pytest.mark.parametrize('kind,message,name', [
    ('KeyError', "'hashmap'", None), ('ValueError', 'the shmoo is wrong', None),
    ('OSError', "[Errno 28] No space left on device: '/tmp/models/m.pth'", 'disk is full'),
    ('RuntimeError', 'unable to write to file </torch_12_3>: No space left on device (28)', 'shared memory is full'),
    ('OSError', "[Errno 28] No space left on device: '/dev/shm/x'", 'shared memory is full'),
    ('PermissionError', "[Errno 13] Permission denied: 'models/m.pth'", 'not writable'),
    ('PermissionError', "[Errno 13] Permission denied: '/data/cats/1.png'", 'not permitted'),
    ('EOFError', 'Ran out of input', None)])
def test_no_wrong_remedy(kind, message, name): assert getattr(trouble_of(kind, message), 'name', None) == name
