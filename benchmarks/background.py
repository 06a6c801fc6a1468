"""What a job's live display and checkpoints cost the training, on rank 0 of 2.

Milliseconds of a training step and between two epochs (from the end of a validation to the next first batch), and the
CPU time of the notebook's process beyond that without bars, in percent of the training's time. All cases train the
same learner, in turns: without bars, with bars while the cell waits, as a job with its display, as a job that writes
a checkpoint after each epoch, and as one whose disk takes two seconds more for each. The display goes to a shell
without a browser, which turns it into JSON as a kernel does. `wide` has 17 million weights, and its checkpoint 134
MB.

    python benchmarks/background.py [--cases convnet,wide] [--repeats 5] [--machine NAME]
"""
import contextlib, json, statistics, tempfile, time
from functools import partial
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from fastai.callback.core import Callback
from torch import nn
from fastddp.all import *
from fastddp.fastai2 import resume
from fastddp.process import helper
from cases import CASES, InMemory
from common import argument_parser, data, save, show, take_turns

SLOW = 2.       # seconds
EPOCHS = 5      # the first is left out


class ToJson(DisplayPublisher):
    "What a kernel would send"
    sent = 0
    def publish(self, data, **kwargs): ToJson.sent += len(json.dumps(data))


def wide():
    layers = [o for _ in range(4) for o in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), *layers, nn.Linear(2048, 10))


LEARNERS = dict(convnet=CASES['convnet'], wide=InMemory(wide, lambda: data((64,), 480), 32, EPOCHS))


class Laps(Callback):
    "Seconds of each epoch's training on rank 0, and from the end of its validation to the next first batch"
    rank0_only = True
    def __init__(self): self.trained, self.between = [], []
    def before_batch(self):
        if not self.training or self.iter: return
        self.began = time.perf_counter()
        if self.epoch > 1: self.between.append(self.began-self.validated)
    def after_train(self):
        if self.epoch: self.trained.append(time.perf_counter()-self.began)
    def after_validate(self): self.validated = time.perf_counter()


def run(name, slow=0., bars=True, **options):
    "`(ms per step, ms between two epochs, ms of the notebook's CPU per step)`"
    learn, write = LEARNERS[name].learner(2), resume.write_checkpoint
    learn.add_cb(Laps())
    def slowly(*args):
        write(*args)
        time.sleep(slow)
    resume.write_checkpoint = slowly
    try:
        with tempfile.TemporaryDirectory() as learn.path, contextlib.nullcontext() if bars else learn.no_bar():
            return fit(learn, options)
    finally: resume.write_checkpoint = write


def fit(learn, options):
    cpu = time.process_time()
    job = learn.distrib_fit(EPOCHS, nprocs=2, launcher=Local(gpus=[], threads=1), **options)
    if job: job.result()
    steps, laps = len(learn.dls.train)//2, learn.laps
    cpu = (time.process_time()-cpu)/(EPOCHS*steps)
    return 1e3*statistics.median(laps.trained)/steps, 1e3*statistics.median(laps.between), 1e3*cpu


CASES_OF_JOBS = {'no bars': dict(bars=False), 'bars': {}, 'job': dict(wait=False),
                 'job, checkpoints': dict(wait=False, checkpoint='epoch'),
                 'job, checkpoints on a slow disk': dict(wait=False, checkpoint='epoch', slow=SLOW)}


def rows_of(times):
    "Medians of each column; `ratio` is that of the steps to those without bars"
    med = {k: [statistics.median(o) for o in zip(*v)] for k, v in times.items()}
    base = med['no bars']
    return [dict(case=k, step=round(s, 2), least=round(min(times[k])[0], 2), most=round(max(times[k])[0], 2),
                 ratio=round(s/base[0], 3), between_epochs=round(b, 1),
                 notebook_percent=round(100*(c-base[2])/s, 2)) for k, (s, b, c) in med.items()]


def main():
    p = argument_parser(__doc__)
    p.add_argument('--cases', default='convnet,wide')
    args = p.parse_args()
    InteractiveShell.instance(display_pub_class=ToJson).display_pub = ToJson()
    helper.warm()
    results = {}
    for name in args.cases.split(','):
        run(name)       # the first is slower
        times = take_turns({k: partial(run, name, **o) for k, o in CASES_OF_JOBS.items()}, args.repeats, 'ms')
        rows = rows_of(times)
        show(f'{name}: milliseconds', rows)
        step = {r['case']: r['step'] for r in rows}
        ratios = {f'{a} over {b}': round(step[a]/step[b], 3) for a, b in zip([*step][2:], [*step][1:])}
        print(ratios)
        results[name] = dict(rows=rows, ratios=ratios, times=times)
    assert ToJson.sent, 'nothing was displayed'
    if not args.small: save('background', args.machine, unit='milliseconds', **results)


if __name__ == '__main__': main()
