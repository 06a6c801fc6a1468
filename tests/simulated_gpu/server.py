"""A process with simulated GPUs that runs tests: `python -m simulated_gpu.server FD`, see `simulated_gpu.Server`"""
import faulthandler, gc, importlib, sys, traceback, warnings
from multiprocessing.connection import Connection
from pathlib import Path
from . import device
import torch
import fastddp.process.helper as helper
helper.preload('simulated_gpu.device')      # before fastddp starts its helper
from fastddp.all import *
from traces import nothing_left


def in_use():
    gc.collect()
    return [device.used_by_all(i) for i in range(device.count())]


def run(file, name, kwargs):
    "Run a test, which must leave nothing on the GPUs, and no process. Return the text of its failure, or None"
    try:
        test = getattr(importlib.import_module(f'simulated_gpu.{Path(file).stem}'), name)
        before = in_use()
        with nothing_left():
            test(**kwargs)
            gc.collect()        # what an exception's frames held
        if (left := in_use()) != before: raise AssertionError(f'bytes on the GPUs: {before} before, {left} after')
    except BaseException as e:
        trace = traceback.TracebackException.from_exception(e, capture_locals=True)
        return ''.join(o[:3000] for o in trace.format())[-12000:]
    finally:
        device.set_limit(0)
        torch.vgpu.set_device(0)


def main(fd):
    faulthandler.enable()
    # a user sees torch's warnings about our calls in the progress bar
    warnings.filterwarnings('error', category=FutureWarning, module=r'(fastddp|torch.distributed)\b')
    torch.set_num_threads(1)
    helper.warm()       # it stays from test to test, whatever workers import on a busy machine
    helper._LEAST_SECONDS = float('inf')
    with Connection(fd) as conn:
        conn.send(None)
        while True:
            try: request = conn.recv()
            except EOFError: return
            failure = run(*request)
            sys.stdout.flush()
            conn.send(failure)


if __name__ == '__main__': main(int(sys.argv[1]))
