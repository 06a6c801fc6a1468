"""Simulated GPUs: importing this registers the device `vgpu` with torch, in this process. See device.cpp.

    VGPU_COUNT      how many there are, 1 to 8 (2)
    VGPU_MEMORY     bytes that each has, for all processes together (no limit)
    VGPU_P2P        what is wrong with sums over GPUs unless NCCL_P2P_DISABLE is set: zeros, fails or hangs
    VGPU_LEDGER     a file in which processes count the bytes that they use; without it each counts for itself

A process imports it before it uses fastddp; the helper and the workers get it by `fastddp.process.helper.preload`.
Workers that are spawned without the helper don't have it. fastddp itself knows nothing of it.
"""
import datetime, importlib.util, os, sys, types
import torch, torch.distributed as dist
from fastai.callback import fp16
import fastai.torch_core
from . import build

NAME, TOTAL = 'vgpu', 2**34


def _loaded():
    spec = importlib.util.spec_from_file_location(build.NAME, build.library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


C = _loaded()
used, most, reset_most, used_by_all = C.used, C.most, C.reset_most, C.used_by_all
waits, bytes_read, set_limit = C.waits, C.bytes_read, C.set_limit
if os.environ.get('VGPU_MEMORY') and not C.limit(): set_limit(int(os.environ['VGPU_MEMORY']))


def count():
    "As CUDA's: none where they are hidden, as they are in the helper"
    return C.device_count() if os.environ.get('CUDA_VISIBLE_DEVICES', 'all') != '' else 0


def _index(d):
    if d is None: return C.current_device()
    index = d if isinstance(d, int) else torch.device(d).index
    return C.current_device() if index is None else index


class device:
    "The context manager `torch.vgpu.device(0)`"
    def __init__(self, d): self.index = -1 if d is None else _index(d)
    def __enter__(self):
        self.before = C.current_device()
        if self.index >= 0: C.set_device(self.index)
    def __exit__(self, *_): C.set_device(self.before)


def _generators(): return [C.generator(i) for i in range(C.device_count())]


def _mem_get_info(d=None):
    total = C.limit() or TOTAL
    return total-used_by_all(_index(d)), total


def _set_states(states):
    for g, state in zip(_generators(), states): g.set_state(state)


def _module():
    "`torch.vgpu`, with the functions that `torch.cuda` has"
    about = types.SimpleNamespace(name='Simulated GPU', total_memory=TOTAL, major=9, minor=0, multi_processor_count=1)
    m = types.ModuleType(f'torch.{NAME}')
    vars(m).update(
        device=device, device_count=count, is_available=lambda: count() > 0, is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False, _lazy_init=lambda: None, init=lambda: None,
        current_device=C.current_device, set_device=lambda d: C.set_device(_index(d)),
        empty_cache=lambda: None, synchronize=lambda d=None: C.synchronize(),
        memory_allocated=lambda d=None: used(_index(d)), memory_reserved=lambda d=None: used(_index(d)),
        max_memory_allocated=lambda d=None: most(_index(d)),
        max_memory_reserved=lambda d=None: most(_index(d)),
        reset_peak_memory_stats=lambda d=None: reset_most(_index(d)), mem_get_info=_mem_get_info,
        get_device_name=lambda d=None: about.name, get_device_properties=lambda d=None: about,
        is_bf16_supported=lambda: True, get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        default_generators=_generators(), manual_seed=lambda s: C.generator(-1).manual_seed(s),
        manual_seed_all=lambda s: [g.manual_seed(s) for g in _generators()],
        get_rng_state=lambda d=None: C.generator(_index(d)).get_state(),
        set_rng_state=lambda state, d=None: C.generator(_index(d)).set_state(state),
        get_rng_state_all=lambda: [g.get_state() for g in _generators()], set_rng_state_all=_set_states,
        Stream=torch.Stream, Event=torch.Event,
        current_stream=lambda d=None: torch.Stream(device=torch.device(NAME, _index(d))))
    return m


def _make_collectives(options, extra=None):
    # `set_timeout` doesn't reach it, so a short limit, of the time in which ranks connect, would stay
    limit = max(options.timeout, datetime.timedelta(minutes=5))
    inner = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, limit)
    return C.wrap(inner)


def _allow_new_data():
    """Parameters keep their identity when they move (`t.data = t.data.cuda()`, `Module.to`): torch allows it between
    the CPU and CUDA, but not for PrivateUse1"""
    data, compatible = torch._C.TensorBase.__dict__['data'], torch._has_compatible_shallow_copy_type
    def set_data(t, new):
        if t.device.type != new.device.type and NAME in (t.device.type, new.device.type): C.set_data(t, new)
        else: data.__set__(t, new)
    torch.Tensor.data = property(data.__get__, set_data)
    # torch compares this signature with that of its own
    def has_compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return NAME in (input.device.type, from_.device.type) or compatible(input, from_)
    torch._has_compatible_shallow_copy_type = has_compatible


def _tell_fastai():
    "fastai asks for CUDA by name: for its default device, and in `to_fp16`"
    on_cpu = fastai.torch_core.default_device
    def default_device(use=-1):
        chosen = on_cpu(use)
        if not count() or fastai.torch_core.defaults.use_cuda is False: return chosen
        return torch.device(NAME, C.current_device())
    for m in [o for k, o in sys.modules.items() if k.startswith('fastai.') and hasattr(o, 'default_device')]:
        m.default_device = default_device
    fp16.autocast = lambda device_type, **kwargs: torch.amp.autocast(NAME, **kwargs)
    fp16.GradScaler = lambda device_type, **kwargs: torch.amp.GradScaler(NAME, **kwargs)


def _register():
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend('vccl', _make_collectives, extended_api=True, devices=[NAME])
    torch.backends.cuda.is_built = lambda: False        # so that torch's accelerator is this one
    _allow_new_data()
    _tell_fastai()


_register()
