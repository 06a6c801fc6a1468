"""Render nbs/troubles.ipynb, "When things go wrong", from the catalogue that errors and tests use."""
import json
from pathlib import Path

root = Path(__file__).resolve().parent.parent
HEAD = '''\
# When things go wrong

> Each message, what lies behind it, and what to do

Made by `make troubles` from the catalogue `TROUBLES` in `fastddp.base`, which the errors themselves and the tests \
use as well.

A failure of a worker is raised in your cell: first the headline with rank, epoch and batch, then your own lines and \
what their variables were, the items of the batch at hand, the worker's whole traceback, what the learner holds now, \
and what to do. `err.failure` has all of it, `err.failure.locals` the variables of each of your frames, \
`err.batch_items` the indices.

The learner then holds the end of the last complete epoch (or is as it was before the fit), and \
`learn.distrib_resume()` goes on from there: same call, same schedule, same table. `restarts=2` does that by itself, \
twice at most.

**Stop.** One interrupt (the button, or Ctrl-C) stops all ranks at the same batch and keeps it: weights, optimizer \
and recorder are in the learner, as after a local fit. A second interrupt ends the workers at once; what you have \
then is the last complete epoch. `learn.distrib_resume()` begins the interrupted epoch anew, and goes on.

**Nothing happens any more.** After `timeout=` seconds without a step (1,800 if you say nothing) the fit is ended \
with one Python stack per rank, the one that all others wait for first.'''


def entry(t): return f'### {t.name}\n\n`{t.seen}`\n\n{t.cause}\n\n*What to do:* {t.remedy}'


def refusal():
    return ("### before anything is started\n\n`CantDistribute`, `CantShard`, `NotPicklable`\n\n"
            "What can't work is refused before any process is started, and nothing is changed.\n\n"
            "*What to do:* the message says it; `NotPicklable` names the attribute that can't be sent.")


def lost():
    return ("### after a fit\n\n`UserWarning: fastddp: learn.my_callback.stream (TypeError: cannot pickle 'generator' "
            "object) can't be sent back from the workers ...`\n\n"
            "A callback made something in a worker that can't leave it: an open file, a connection, a generator. "
            "All else came back: weights, optimizer, recorder, the other attributes. An object that can be sent but "
            "not loaded again (exceptions with arguments of their own are known for that) costs what all callbacks "
            "hold; weights and optimizer are there.\n\n"
            "*What to do:* keep plain values in the callback, or let it put the object away in `after_fit`.")


def notices():
    return ("### what is only said\n\n`fastddp: ... so workers start by spawn, which takes seconds`\n\n"
            "The helper process from which workers are forked can't be used: it crashed, or a library that it imported "
            "touched CUDA. All works, but each call starts slower.\n\n"
            "`fastddp: ... so data is shared through a temporary file`\n\n"
            "The system gives no anonymous memory files, or free memory is short. All works; the file has no name and "
            "is gone with the call. `TMPDIR` chooses the folder.\n\n*What to do:* nothing, or what the line says.")


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
