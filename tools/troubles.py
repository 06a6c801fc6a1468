"""Render nbs/troubles.ipynb, "When things go wrong", from the catalogue that errors and tests use."""
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
HEAD = '''\
# When things go wrong

> Each message, its cause and its remedy

When a worker fails, your cell raises an error. It shows rank, epoch and batch, then your own lines and their \
variables, the items of the batch, the worker's traceback, the state of the learner, and what to do. `err.failure` \
has all of it, `err.failure.locals` the variables of each of your frames, `err.batch_items` the indices.

The learner then has the state of the last complete epoch (or is unchanged if there was none); if all workers have \
raised the same error, that of the last finished batch, as in one process. `learn.distrib_resume()` continues: same \
call, same schedule, same table. `restarts=2` does that automatically, at most twice.

**Your own callback was the cause.** `distrib_resume()` calls the same objects again, with the code that they had. \
Mend the class in its cell. If it is a callback of the learner, exchange it, `learn.remove_cb(learn.my_callback)`, \
`learn.add_cb(MyCallback())`, and resume. If the call was given it, make the call with a new object and the epoch \
that the error names: `learn.distrib_fit_one_cycle(5, 1e-2, cbs=MyCallback(), start_epoch=2)`. The schedule goes on \
there.

**Stop.** One interrupt (the button, or Ctrl-C) stops all workers after the same batch: weights, optimizer and \
recorder are in the learner, as after a fit in one process. A second interrupt ends the workers at once; the learner \
then has the state of the last complete epoch. `learn.distrib_resume()` repeats the interrupted epoch and continues.

**A fit hangs.** After `timeout=` seconds without a training step (1,800 by default) the fit ends with an error that \
shows the Python stack of each rank, beginning with the rank that all others wait for.'''


# Of each entry of the catalogue: what the cell shows, and its cause
PAGE = {
    'out of memory on the GPU': (
        "RankRaised: rank 1 raised OutOfMemoryError: CUDA out of memory ...",
        "The GPU of that rank is full."),
    'an assertion on the GPU': (
        "RankRaised: rank 1 raised RuntimeError: CUDA error: device-side assert triggered ...",
        "A kernel found an index out of range. The GPU reports it to a later call, and can't be used by that "
        "process any more; the next fit has new ones."),
    'a GPU for one process': (
        "RankRaised: rank 0 raised RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable ...",
        "Its compute mode is 'exclusive process', as on some clusters: nvidia-smi shows `E. Process`."),
    'two devices in one operation': (
        "RankRaised: rank 1 raised RuntimeError: Expected all tensors to be on the same device, but found ...",
        "A tensor of your code is on GPU 0, in each worker: `torch.device('cuda:0')`, `.cuda()`, or one that a model "
        "keeps in a plain attribute."),
    "a GPU that isn't there": (
        "RankRaised: rank 0 raised RuntimeError: CUDA error: invalid device ordinal",
        "Your code names a GPU by its number."),
    'torch without code for the GPU': (
        "RankRaised: rank 0 raised RuntimeError: CUDA error: no kernel image is available for execution ...",
        "The GPU is older, or newer, than this build of torch."),
    'two workers on one GPU': (
        "RankRaised: rank 1 raised DistBackendError: Duplicate GPU detected : rank 1 and rank 0 both on ...",
        "`gpus=` names a GPU twice, or code in the workers sets `CUDA_VISIBLE_DEVICES`."),
    'out of memory': (
        "RankRaised: rank 1 raised MemoryError",
        "The host's memory, or a limit on this process, was reached."),
    'shared memory is full': (
        "RankRaised: rank 0 raised RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error",
        "DataLoader workers pass batches through /dev/shm, which has 64 MB in a Docker container, or one of "
        "them was killed."),
    'a connection broke': (
        "RankRaised: rank 1 raised ConnectionResetError: [Errno 104] Connection reset by peer",
        "With `num_workers` a DataLoader worker was killed while it sent a batch, most likely for lack of "
        "memory; or it is a connection of your own."),
    'disk is full': (
        "RankRaised: rank 0 raised OSError: [Errno 28] No space left on device: '/tmp/x'",
        "A file grew until its disk was full: a checkpoint, or something temporary."),
    'name not in a module': (
        "RankRaised: rank 0 raised ImportError: cannot import name 'Param' from 'fastcore.script'",
        "A cell added a name to a library, so that another one can be imported. Workers import both as they "
        "are installed."),
    'module not found': (
        "RankRaised: rank 0 raised ModuleNotFoundError: No module named 'mine'",
        "Code from files is imported by the workers, not sent to them."),
    'file not found': (
        "RankRaised: rank 0 raised FileNotFoundError: [Errno 2] No such file or directory: 'data/x.csv'",
        "The path doesn't exist for the workers."),
    'path too long': (
        "RankRaised: rank 0 raised OSError: AF_UNIX path too long",
        "Processes meet at a socket in the temporary folder, and its path has 107 letters at most."),
    'not writable': (
        "RankRaised: rank 0 raised OSError: [Errno 30] Read-only file system: 'models'",
        "`lr_find`, `save` and SaveModelCallback write to `learn.path/learn.model_dir`, by default in the "
        "working directory."),
    'not permitted': (
        "RankRaised: rank 1 raised PermissionError: [Errno 13] Permission denied: '/data/x.png'",
        "Another user owns the file or folder, or its permissions don't allow access."),
    'no keyboard': (
        "RankRaised: rank 0 raised EOFError: EOF when reading a line",
        "`input()`, `breakpoint()` or `pdb.set_trace()` in a worker, a process of its own, without the "
        "notebook's keyboard."),
    'an operator of the notebook': (
        "RankRaised: rank 1 raised AttributeError: '_OpNamespace' 'mine' object has no attribute 'twice'",
        "`torch.library` registers an operator in the process in which it is defined; "
        "docs/guide.md, \"What workers run first\", has an example."),
    'name not known': (
        "RankRaised: rank 0 raised NameError: name 'helper' is not defined",
        "Functions of the notebook are sent with the globals that they use; a name made by `exec` or a magic "
        "may be missing."),
    'WandbCallback': (
        "RankRaised: rank 0 raised TypeError: Exception occured in WandbCallback ... vars() argument must "
        "have __dict__ attribute",
        "`WandbCallback` of fastai 2.8.12 fails with fastcore 2.2, in a fit without workers, too."),
    'a count of zero': (
        "RankRaised: rank 1 raised ZeroDivisionError: division by zero (epoch 0)",
        "A callback divides by the number of its batches, and a worker has none of a small validation set."),
    'batch size built in': (
        "RankRaised: rank 0 raised RuntimeError: Expected hidden size (2, 16, 64), got [2, 8, 64]",
        "The model keeps a state for as many rows as the loader's batch has; with `batch='global'` a worker "
        "gets a part of these rows."),
    'a list that C code refuses': (
        "RankRaised: rank 0 raised TypeError: Object of type list is not JSON serializable",
        "In a worker a very long list shares its memory with the other workers: Python takes it for a list, "
        "functions in C don't."),
    'sys.exit': (
        "RankRaised: rank 0 raised SystemExit: 3",
        "Code of the fit called sys.exit."),
    'killed by the system': (
        "RankDied: rank 1 died: killed by SIGKILL",
        "Most likely Linux's out-of-memory killer."),
    'no room for a file in memory': (
        "RankDied: rank 0 died: killed by SIGBUS",
        "The disk was full when a memory-mapped file (`np.memmap`, shared memory) was written, or the file "
        "was truncated meanwhile."),
    'compiled code crashed': (
        "RankDied: rank 0 died: killed by SIGSEGV",
        "A library's compiled code crashed."),
    'exited': (
        "RankDied: rank 0 died: exited with code 1",
        "Something ended the process without an exception."),
    'machine or link lost': (
        "RankDied: rank 2 on gpu2 died: the connection ended",
        "Another machine, its actor, or the network between the machines failed."),
    'no step': (
        "GroupTimeout: no step for 1800 s: all workers are waiting for rank 1 (epoch 3, batch 17)",
        "One rank makes no progress, and the others wait for it. The stacks below the message show where.")}


def entry(t):
    seen, cause = PAGE[t.name]
    return f'### {t.name}\n\n`{seen}`\n\n{cause}\n\n*What to do:* {t.remedy}'


def refusal():
    return ("### before anything is started\n\n`CantDistribute`, `CantShard`, `NotPicklable`\n\n"
            "The request can't run on workers. No process is started, and nothing is changed.\n\n"
            "*What to do:* as the message says; `NotPicklable` names the attribute that can't be sent.")


def lost():
    return ("### after a fit\n\n`UserWarning: fastddp: learn.my_callback.stream (TypeError: cannot pickle 'generator' "
            "object) can't be sent back from the workers ...`\n\n"
            "A callback has made an object that can't be sent to the notebook: an open file, a connection, a "
            "generator. Weights, optimizer, recorder and all other attributes came back. If an object can be sent but "
            "not loaded again (some exceptions with arguments), no callback's attributes come back; weights and "
            "optimizer do.\n\n"
            "*What to do:* keep plain values in the callback, or remove the object in `after_fit`.")


def notices():
    return ("### notices\n\n`fastddp: ... so workers start by spawn, which takes seconds`\n\n"
            "The helper process from which workers are forked can't be used: it crashed, or a library that it imported "
            "used CUDA. Everything works, but each call starts slower.\n\n"
            "`fastddp: ... so data is shared through a temporary file`\n\n"
            "The system has no anonymous memory files, or little free memory. Everything works; the file has no name "
            "and is deleted with the call. `TMPDIR` chooses the folder.\n\n*What to do:* nothing, or as the line says.")


def render():
    "The notebook's text"
    from fastddp.base.errors import TROUBLES
    texts = [HEAD, '## The messages', refusal(), *map(entry, TROUBLES), lost(), notices()]
    cells = [dict(cell_type='markdown', id=f'trouble{i:02}', metadata={}, source=t.splitlines(True))
             for i, t in enumerate(texts)]
    kernel = dict(kernelspec=dict(display_name='python3', language='python', name='python3'))
    nb = dict(cells=cells, metadata=kernel, nbformat=4, nbformat_minor=5)
    return json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True)+'\n'


if __name__ == '__main__': (root/'nbs'/'troubles.ipynb').write_text(render(), encoding='utf-8')
