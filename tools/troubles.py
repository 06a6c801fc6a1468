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

The learner then has the state of the last complete epoch (or is unchanged if there was none), and \
`learn.distrib_resume()` continues from there: same call, same schedule, same table. `restarts=2` does that \
automatically, at most twice.

**Stop.** One interrupt (the button, or Ctrl-C) stops all workers after the same batch: weights, optimizer and \
recorder are in the learner, as after a fit in one process. A second interrupt ends the workers at once; the learner \
then has the state of the last complete epoch. `learn.distrib_resume()` repeats the interrupted epoch and continues.

**A fit hangs.** After `timeout=` seconds without a training step (1,800 by default) the fit ends with an error that \
shows the Python stack of each rank, beginning with the rank that all others wait for.'''


def entry(t): return f'### {t.name}\n\n`{t.seen}`\n\n{t.cause}\n\n*What to do:* {t.remedy}'


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
