"""`wait=False`: a job beside the notebook, with the result of the same call in the foreground; and checkpoints."""
import asyncio, contextlib, os, pickle, random, signal, subprocess, sys, threading, time, types
from functools import partial
from pathlib import Path
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastai.learner import AvgMetric
from fastai.metrics import accuracy
from torch import nn
import fastddp
from fastddp.all import CantDistribute, InProcess, Local, RankRaised, ranch
from fastddp.fastai2 import learner_job, resume
from fastddp.launch import background, held_gpus, session
from fastddp.launch.engine import Job
from fastddp.process.helper import sweep
from fastddp.ranch import spawn
from parity import learner, mlp, seed, values, warm
from spread import long_but
from test_interrupt import wait_for
import faults


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield dict(nprocs=2, launcher=launcher)


class Slow(Callback):
    "Each batch takes a while, so that something can happen meanwhile"
    def after_batch(self): time.sleep(.02)


class Fails(Callback):
    def after_epoch(self):
        if self.epoch == 1: raise KeyError('in the second epoch')


def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b))


def until(cond):
    end = time.monotonic()+60
    while not cond() and time.monotonic() < end: time.sleep(.02)
    assert cond()


def first_epoch(job): until(lambda: job.epoch is not None or job.done())


def test_variables_of_a_cell_change_when_the_fit_ends():
    told = []
    class Tells(Callback):
        def after_epoch(self): told.append(self.epoch)
    job = learner(cbs=Tells()).distrib_fit(2, nprocs=2, wait=False)
    assert job.exception() is None and told == [0, 1]
    job.result()
    assert told == [0, 1]


def test_result_is_that_of_the_foreground(two):
    here, there = learner(), learner()
    seed(1)
    here.distrib_fine_tune(2, 1e-2, **two)
    drawn = torch.rand(1)
    seed(1)
    before = weights(there)
    job = there.distrib_fine_tune(2, 1e-2, wait=False, **two)
    seed(7)     # the job has streams of its own
    job.exception(60)
    assert same(weights(there), before) and not hasattr(there.recorder, "lrs")
    assert job.result() is None and job.done() and job.exception() is None
    assert same(weights(here), weights(there)) and values(here) == values(there)
    assert torch.equal(torch.rand(1), drawn)
    calls = [[o.what for o in learn.distrib_report.calls] for learn in (here, there)]
    assert here.opt.hypers == there.opt.hypers and calls[0] == calls[1]
    assert '2 workers' in job.log and '2 epochs in' in job.log


def test_the_notebook_meanwhile(capsys):
    two = dict(nprocs=2)
    learn = learner(cbs=[Slow()])
    before = weights(learn)
    job = learn.distrib_fit(50, wait=False, **two)
    for fit, options in ((learn.fit, {}), (learn.fit_one_cycle, {}), (learn.distrib_fit, two)):
        with pytest.raises(CantDistribute, match=r'job \d+: fit\(50\), running'): fit(1, **options)
    learn.get_preds()
    first_epoch(job)
    assert same(weights(learn), before)
    job.pull()
    assert not same(weights(learn), before) and len(learn.recorder.values) == learn.epoch+1 >= 1
    job.stop()
    assert job.result(timeout=60) is None and job.state == 'stopped'
    assert len(learn.recorder.values) < 50 and len(learn.recorder.lrs) > 0
    assert capsys.readouterr().out == ''        # all of it is in the job's display
    assert 'Stopped in epoch' in job.log
    batches = len(learn.recorder.lrs)
    again = learn.distrib_resume(wait=False)
    until(lambda: again.epoch is not None)
    again.stop()
    again.result(timeout=60)
    assert len(learn.recorder.lrs) > batches
    learn.fit(1)        # the learner is the notebook's again


def test_changed_meanwhile(two):
    learn = learner()
    job = learn.distrib_fit(1, wait=False, **two)
    with torch.no_grad(): learn.model[0].weight.mul_(2)
    mine = weights(learn)
    for _ in range(2):
        with pytest.raises(CantDistribute, match='were changed .* job.twin.learn is the copy'): job.result(60)
    assert same(weights(learn), mine) and len(job.twin.learn.recorder.values) == 1
    assert not same(weights(job.twin.learn), weights(learner()))


def test_nothing_is_pulled_after_the_result(two):
    learn = learner()
    job = learn.distrib_fit(1, wait=False, **two)
    assert job.result(60) is None
    with pytest.raises(CantDistribute, match='already put what was trained into a learner'): job.pull()
    assert job.result() is None


class Notes(Callback):
    "Notes a number of its own at the end of each epoch"
    def __init__(self, n): self.n, self.seen = n, []
    def after_epoch(self): self.seen.append(self.n)


class Last(AvgMetric):
    "Keeps its values"
    def __init__(self): super().__init__(accuracy); self.values = []
    @property
    def value(self):
        self.values.append(float(super().value))
        return self.values[-1]


def test_exchanged_meanwhile(two):
    "What the notebook exchanges stays as it is, the earlier parts get the result"
    old, new, went, came, given = Last(), Last(), Notes(1), Notes(2), Notes(3)
    learn, other = learner(metrics=old, cbs=[Slow(), went]), learner()
    job = learn.distrib_fit(2, cbs=given, wait=False, **two)
    first_epoch(job)
    learn.metrics, learn.dls = [new, Last()], other.dls
    learn.remove_cb(went)
    learn.add_cbs([came, GradientClip(.1)])
    was = other.dls.train.rng.getstate()
    job.pull()
    assert given.seen[:1] == [3] and went.seen[:1] == [1] and old.values
    assert job.result(60) is None and len(learn.recorder.values) == 2
    assert given.seen == [3, 3] and went.seen == [1, 1] and len(old.values) == 2 and old.func is accuracy
    assert came.seen == [] and came.n == 2 and new.values == [] and learn.metrics[0] is new
    assert other.dls.train.rng.getstate() == was and learn.dls is other.dls
    assert [type(cb) for cb in learn.cbs][-2:] == [Notes, GradientClip] and learn.notes is came


def test_what_the_learner_keeps_is_said(two, monkeypatch):
    "In the job's display, where the learner wants lines"
    monkeypatch.setattr(learner_job, 'gpu_memory_note', lambda learn, gpus: 'learn keeps 9 MB')
    learn = learner()
    def said():
        job = learn.distrib_fit(1, wait=False, **two)
        job.result(60)
        return 'learn keeps 9 MB\n' in job.log
    assert said()
    with learn.no_logging(): assert not said()


def test_failure():
    learn = learner(cbs=[Fails()])
    before = weights(learn)
    job = learn.distrib_fit(3, wait=False, nprocs=2)
    assert isinstance(job.exception(60), RankRaised) and job.state == 'failed'
    assert same(weights(learn), before) and "rank 0 raised KeyError" in job.log.replace('rank 1', 'rank 0')
    assert 'Traceback' not in job.log       # `result` shows it, once
    for _ in range(2):
        with pytest.raises(RankRaised, match='in the second epoch'): job.result()
    assert not same(weights(learn), before) and len(learn.recorder.values) == 1
    assert learn.epoch == 1     # all ranks raised it: the learner is as one process leaves it
    with pytest.raises(RankRaised, match='in the second epoch'): learn.distrib_resume(wait=False).result(60)


def test_inference_and_lr_find(two, tmp_path):
    learn = learner(path=tmp_path)
    job = learn.distrib_get_preds(wait=False, **two)
    assert all(torch.equal(a, b) for a, b in zip(job.result(60), learn.get_preds()))
    async def awaited(): return await learn.distrib_lr_find(wait=False, **two)
    assert asyncio.run(awaited()).valley > 0 and len(learn.recorder.lrs) > 50


def test_a_refusal_is_raised_by_the_call_although_its_thread_goes_on_for_a_while():
    def refuse(): raise CantDistribute('not like this')
    job = background.BackgroundJob('a call', run=refuse)
    write = job.panel.write
    def slowly(*args):
        time.sleep(.3)
        write(*args)
    job.panel.write = slowly
    with pytest.raises(CantDistribute, match='not like this'): job.start()
    assert job.done() and 'not like this' in job.log


def waiting(end, cls=background.BackgroundJob, **kwargs):
    "A started job that ends when `end` is set"
    job = cls('a call', run=lambda: end.wait(60), **kwargs)
    job._started.set()
    return job.start()


def test_a_job_that_ends_while_it_is_stopped_has_ended():
    end = threading.Event()
    class Ends(background.BackgroundJob):
        def done(self):
            was_done = super().done()
            end.set()
            self._ended.wait(1)     # the thread ends the job here, if it can
            return was_done
    job = waiting(end, Ends)
    job.stop()
    assert job.result(60) and job.state == 'done'


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_display_that_fails_at_the_end_is_no_failure_of_the_call():
    end = threading.Event()
    job = waiting(end)
    def closed(force=False): raise OSError('closed')
    job.panel.refresh = closed
    end.set()
    assert job.result(60) and job.state == 'done'


def test_refused(two):
    learn = learner()
    for options, why in ((dict(nprocs=1), 'needs workers in processes of their own'),
                         (dict(launcher=InProcess()), 'needs workers in processes of their own'),
                         (dict(nprocs=2, wait='no'), 'True or False'),
                         (dict(nprocs=2, checkpoint='10min'), "'epoch', to save")):
        with pytest.raises(CantDistribute, match=why): learn.distrib_fit(1, **dict(wait=False) | options)
    with pytest.raises(CantDistribute, match='wait=.*True or False'): learn.distrib_resume(wait='no')
    with pytest.raises(CantDistribute, match='A block waits'), learn.distrib_ctx(nprocs=2, wait=False): pass
    with pytest.raises(CantDistribute, match='A block waits'): learn.distrib_check(wait=False, **two)
    with pytest.raises(CantDistribute, match='outside of it'), learn.distrib_ctx(**two):
        learn.distrib_fit(1, wait=False)
    other = learner()
    with learn.distrib_ctx(**two):
        # the block is another learner's
        other.distrib_fit(1, wait=False, nprocs=2).result(60)
        assert len(other.recorder.values) == 1
    # what a rank would refuse is refused in the call
    with pytest.raises(CantDistribute, match='n_epoch'): learn.distrib_fit('x', wait=False, **two)
    for p in learn.model.parameters(): p.requires_grad_(False)
    with pytest.raises(CantDistribute, match='no trainable parameters'): learn.distrib_fit(1, wait=False, **two)
    assert not held_gpus.running_jobs and not [k for k in vars(learn) if k == 'fit']


def test_a_job_beside_a_block(two, monkeypatch):
    "The open block of another learner has GPUs (made up: the workers are on the CPU)"
    @contextlib.contextmanager
    def engine_for(given, asked):
        with two['launcher'] as engine: yield engine, 2, given['gpus']
    monkeypatch.setattr(session, 'engine_for', engine_for)
    outer, learn = learner(), learner()
    with outer.distrib_ctx(gpus=[0, 1]):
        with pytest.raises(CantDistribute, match='block of another learner has GPU 1'):
            learn.distrib_fit(1, gpus=[1, 2], wait=False)
        learn.distrib_fit(1, gpus=[2, 3], wait=False).result(60)
    job = learn.distrib_fit(1, gpus=[1, 2], wait=False)
    with pytest.raises(CantDistribute, match=r'fit\(1\), \w+ has GPU 1\.'), outer.distrib_ctx(gpus=[0, 1]): pass
    job.result(60)
    with outer.distrib_ctx(gpus=[0, 1]): pass
    assert not held_gpus._reservations


def test_a_closure_means_the_twin(two):
    "A loss that refers to the notebook's model is that of the model that trains"
    def make():
        seed()
        model = mlp()
        def loss(pred, y): return nn.functional.cross_entropy(pred, y) + .1*model[0].weight.square().mean()
        return learner(model=model, loss_func=loss)
    here, there = make(), make()
    seed(1)
    here.distrib_fit(1, loss='mean', **two)
    seed(1)
    there.distrib_fit(1, loss='mean', wait=False, **two).result(60)
    assert same(weights(here), weights(there))


def test_a_plain_fit_beside_a_thread(two):
    "A block belongs to its thread: a fit in another one is refused, and names who trains"
    learn, began, errors = learner(cbs=[Slow()]), threading.Event(), []
    def train():
        try: learn.distrib_fit(3, **two)
        except BaseException as e: errors.append(e)
    thread = threading.Thread(target=train, name='night')
    thread.start()
    until(lambda: 'distrib_session' in vars(learn))
    with pytest.raises(CantDistribute, match='Another thread has this learner on workers'): learn.fit(1)
    thread.join(60)
    assert not errors and len(learn.recorder.values) == 3
    assert not hasattr(type(learn).fit, '__wrapped__')


def rest(ctx, obj):
    began = time.time()
    time.sleep(obj)
    return began, time.time()


def test_two_threads_on_one_engine(two):
    "The second waits for its turn"
    launcher,first = two['launcher'],[]
    def run(): first.append(launcher.run(Job.of(rest, .5), 2))
    thread = threading.Thread(target=run)
    thread.start()
    def taken():
        if not launcher._lock.acquire(blocking=False): return True
        launcher._lock.release()
    until(taken)
    second = launcher.run(Job.of(rest, 0), 2)
    thread.join(60)
    assert max(end for _, end in first[0].results) <= min(began for began, _ in second.results)


def test_ranch():
    job = ranch(2, os.getpid, caller_rank=None, wait=False)
    assert len({*job.result(60), os.getpid()}) == 3
    with pytest.raises(CantDistribute, match='caller_rank=None'): ranch(2, os.getpid, wait=False)


def test_a_job_whose_variable_is_lost(two):
    "Also what `spawn` has begun"
    learn = learner(cbs=[Slow()])
    job = learn.distrib_fit(500, wait=False, **two)
    spawned = spawn(sleeps, nprocs=2, join=False)
    trains, sleeping = map(repr, fastddp.jobs())
    assert trains.endswith('fit(500), running') and 'spawn(sleeps' in sleeping
    first_epoch(job)
    for o in fastddp.jobs()[::-1]: o.stop()
    until(lambda: not fastddp.jobs())
    with pytest.raises(KeyboardInterrupt): spawned.join(60)
    assert job.state == 'stopped' and job.result() is None


def sleeps(rank): time.sleep(600)


class Cut(Callback):
    "The kernel ends in the third epoch"
    def before_epoch(self):
        if self.epoch == 2: raise KeyboardInterrupt


@pytest.mark.parametrize('how', ['fit_one_cycle', pytest.param('fine_tune', marks=pytest.mark.full)])
def test_checkpoint(how, two, tmp_path):
    def make(**kwargs): return learner(path=tmp_path, opt_func=__import__('fastai.optimizer').optimizer.Adam, **kwargs)
    whole, cut = make(), make()
    seed(1)
    whole.distrib(how, 4, 1e-2, **two)
    seed(1)
    # as a kernel that ends: nothing of the learner is left but the file
    with pytest.raises(KeyboardInterrupt): cut.distrib(how, 4, 1e-2, checkpoint='epoch', cbs=Cut(), **two)
    seed(99)
    new = make()
    with pytest.raises(KeyboardInterrupt): new.distrib_resume('distrib')     # the callback came along
    other = learner(path=tmp_path, model=mlp(n_hid=9))
    with pytest.raises(CantDistribute, match="another learner: its weights differ"):
        other.distrib_resume('distrib')
    with pytest.raises(CantDistribute, match='No checkpoint in'): new.distrib_resume('night')


def test_checkpoint_goes_on(two, tmp_path, monkeypatch):
    def make(): return learner(path=tmp_path)
    whole, cut = make(), make()
    seed(1)
    whole.distrib_fit_one_cycle(3, 1e-2, **two)
    seed(1)
    written, write = [], resume.write_checkpoint
    def until_the_second(*args):
        if len(written) < 2: write(*args)
        written.append(args)
    with monkeypatch.context() as m:
        m.setattr(resume, 'write_checkpoint', until_the_second)
        cut.distrib_fit_one_cycle(3, 1e-2, wait=False, checkpoint='epoch', **two).result(60)
    assert len(written) == 3
    seed(99)
    new = make()
    new.distrib_resume('distrib', wait=False).result(60)
    assert same(weights(new), weights(whole)) and values(new) == values(whole)
    assert new.recorder.lrs == whole.recorder.lrs


def test_a_checkpoint_that_fails_is_written_after_the_next_epoch(monkeypatch):
    tries = []
    def full(*_):
        tries.append(1)
        if len(tries) == 1: raise OSError('disk full')
    monkeypatch.setattr(resume, 'write_checkpoint', full)
    for name in 'dump_call', 'weights_in': monkeypatch.setattr(resume, name, lambda *_: None)
    monkeypatch.setattr(resume.SavedGraph, 'of', lambda *_: ())
    write = resume.checkpoint_writer()
    fit_call = types.SimpleNamespace(learn=learner(), counts_steps=False, cbs=[], places=None,
                                     user_call=types.SimpleNamespace(run_id='run'))
    with pytest.warns(UserWarning, match='disk full'): write(fit_call, ())
    write(fit_call, ())
    assert len(tries) == 2


class NotesEnds(Callback):
    ends = 0
    def after_fit(self): self.ends += 1


def test_a_checkpoint_of_the_last_epoch(two, tmp_path, capsys):
    "No epoch is left to train, and a line says so. The checkpoint is from before `after_fit`, which runs"
    whole, new = [learner(path=tmp_path, cbs=[NotesEnds()]) for _ in range(2)]
    whole.distrib_fit(2, checkpoint='epoch', **two)
    capsys.readouterr()
    new.distrib_resume('distrib')
    line = 'All epochs of this fit are trained (2 epochs): the workers only run after_fit of its callbacks.'
    assert line in capsys.readouterr().out.splitlines()
    assert same(weights(new), weights(whole)) and len(values(new)) == 2 and new.notes_ends.ends == 1


def test_two_fits_that_write_to_one_file(two, tmp_path):
    "At once: the second is refused. One after the other they may"
    a, b = learner(path=tmp_path, cbs=[Slow()]), learner(path=tmp_path)
    job = a.distrib_fit(50, wait=False, checkpoint='epoch', nprocs=2)
    for wait in True, False:
        with pytest.raises(CantDistribute, match=r"distrib\.ckpt\. Give this learner a folder"):
            b.distrib_fit(1, wait=wait, checkpoint='epoch', **two)
    b.distrib_fit(1, **two)
    job.stop()
    job.result(60)
    b.distrib_fit(1, checkpoint='epoch', **two)
    b.model_dir = 'models/b'
    with a.distrib_ctx(nprocs=2, checkpoint='epoch'), a.distrib_ctx(checkpoint='epoch'):
        b.distrib_fit(1, checkpoint='epoch', **two)
    assert not resume._claimed and (tmp_path/'models'/'b'/'distrib.ckpt').exists()


class Elsewhere(Local):
    "As an engine of other machines, here"
    workers_are_local = False
    def place(self, nprocs=None, gpus=None): return 2, None


def test_a_checkpoint_of_other_machines_asks_for_them(tmp_path):
    "It would go on with workers of this machine, and other batches"
    learner(path=tmp_path).distrib_fit(1, checkpoint='epoch', launcher=Elsewhere(gpus=[]))
    new = learner(path=tmp_path)
    with pytest.raises(CantDistribute, match=r'launcher=Elsewhere\(\.\.\.\), which is not in the file'):
        new.distrib_resume('distrib')
    new.distrib_resume('distrib', launcher=Elsewhere(gpus=[]))
    assert len(new.recorder.values) == 1


def test_no_step_waits_for_the_disk(two, tmp_path, monkeypatch):
    "While the first checkpoint is written, the workers train two epochs more, and have bars to show"
    written, write = [], resume.write_checkpoint
    def slowly(*args):
        if not written: wait_for(tmp_path/'done0', 15, limit=60)
        written.append(write(*args))
    monkeypatch.setattr(resume, 'write_checkpoint', slowly)
    learn = learner(path=tmp_path, cbs=[faults.Slow(.01, tmp_path)])
    learn.distrib_fit(4, wait=False, checkpoint='epoch', **two).result(60)
    assert len(written) == 4 and len(learn.dls.train) == 10       # 5 steps per epoch


def test_after_import_of_fastais_own_distrib_ctx(two, monkeypatch):
    "fastai.distributed puts a `distrib_ctx` of its own onto Learner"
    def theirs(self, sync_bn=True): raise AssertionError('not ours')
    learn = learner()
    monkeypatch.setattr(type(learn), 'distrib_ctx', theirs)
    learn.distrib_fit(1, wait=False, **two).result(60)
    assert len(learn.recorder.values) == 1


CELLS = ["""
import sys, time
sys.path.insert(0, 'TESTS')
from fastddp.all import *
from fastai.callback.core import Callback
from learners import make_learner
class Slow(Callback):
    def after_batch(self): time.sleep(.02)
learn = make_learner(cbs=Slow())
""", "job = learn.distrib_fit(3, nprocs=2, wait=False)", "print('meanwhile', job.done())",
"assert job.result() is None and len(learn.recorder.values) == 3", "job"]


@pytest.mark.full
def test_in_a_kernel(tmp_path):
    "Output goes to the cell that began the job, while others run; the job in another cell shows the same"
    import nbclient, nbformat
    code = [c.replace('TESTS', str(Path(__file__).parent.parent)) for c in CELLS]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in code])
    nbclient.NotebookClient(nb, timeout=200, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    _, began, other, waited, shown = ([o for o in c.outputs if o.output_type != 'stream' or o.name == 'stdout']
                                      for c in nb.cells)
    began = [o for o in began if o.data.get('text/html')]       # a line about the start has left an empty one
    assert [o.output_type for o in began] == ['display_data'] and not waited
    assert [o.text for o in other] == ['meanwhile False\n']
    html = began[0].data['text/html']
    assert 'done' in html and html.count('<tr') == 4 and '3 epochs in' in html
    assert shown[0].data['text/html'] == html


SCRIPT = """
import os, sys
sys.path.insert(0, TESTS)
from fastai.callback.core import Callback
from parity import learner, seed
class Ends(Callback):
    "The kernel is killed in the third epoch"
    def before_epoch(self):
        if self.epoch == 2 and not os.path.exists('killed'):
            open('killed', 'w').close()
            os.kill(PARENT, 9)
if __name__ == '__main__':
    learn = learner(path='.', cbs=Ends())
    seed(int(sys.argv[2]))
    if sys.argv[1] == 'resume': learn.distrib_resume('distrib')
    else: learn.distrib_fine_tune(4, 1e-2, nprocs=2, checkpoint='epoch')
    print([p.flatten().tolist() for p in learn.model.parameters()], learn.recorder.values)
"""


@pytest.mark.full
def test_the_kernel_is_killed(tmp_path):
    def run(folder, *args):
        folder.mkdir(exist_ok=True)
        text = SCRIPT.replace('TESTS', repr(str(Path(__file__).parent.parent))).replace('PARENT', 'os.getppid()*0+PID')
        (folder/'script.py').write_text('PID = int(__import__("os").environ.setdefault("PID", str('
                                        '__import__("os").getpid())))\n'+text)
        env = {k: v for k, v in os.environ.items() if k != 'PID'}
        return subprocess.run([sys.executable, 'script.py', *args], cwd=folder, env=env, capture_output=True, text=True)
    whole, cut = tmp_path/'whole', tmp_path/'cut'
    whole.mkdir()
    (whole/'killed').touch()
    expected = run(whole, 'fit', '1').stdout.splitlines()[-1]
    assert run(cut, 'fit', '1').returncode == -signal.SIGKILL
    res = run(cut, 'resume', '99')
    assert res.returncode == 0, res.stderr
    assert res.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize('kills', long_but([10, 200], 10))
def test_writing_is_killed_at_random(kills, tmp_path):
    "The file is always whole"
    rnd, path, learn = random.Random(0), tmp_path/'a.ckpt', learner()
    facts, write = resume.structure_of(learn), resume.write_checkpoint
    write(path, facts, 'run', [(b'first', [])])
    for _ in range(kills):
        if not (pid := os.fork()):
            try:
                for i in range(10**6):
                    write(path, facts, 'run', [(bytes([i%256]), [bytes([i%256])*rnd.randrange(1, 10**6)])])
            finally: os._exit(1)
        time.sleep(rnd.random()*.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (meta, buffers), = resume.read_checkpoint(path, learn)
        assert meta == b'first' or {*meta} == {*buffers[0]}


class Evil:
    "A pickle that makes a folder when it is loaded"
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return os.mkdir, (self.path,)


@pytest.mark.parametrize('where', ['instead of the file', 'in the place of weights', 'of another model'])
def test_a_pickle_that_is_not_needed_is_not_loaded(where, two, tmp_path):
    done, learn = tmp_path/'done', learner(path=tmp_path)
    learn.distrib_fit(1, checkpoint='epoch', **two)
    path, evil = resume.checkpoint_path(learn), pickle.dumps(Evil(done))
    if where == 'instead of the file':
        path.write_bytes(evil)
        with pytest.raises(CantDistribute, match='no checkpoint of fastddp'): learn.distrib_resume('distrib')
    elif where == 'of another model':
        resume.write_checkpoint(path, resume.structure_of(learn), 'run', [(evil, []), (evil, [])])
        with pytest.raises(CantDistribute, match='another learner: its weights differ'):
            learner(path=tmp_path, model=mlp(n_hid=9)).distrib_resume('distrib')
    else:
        call, graph, (meta, buffers) = resume.read_checkpoint(path, learn)
        i = next(i for i, o in enumerate(buffers) if len(o) >= len(evil))
        buffers[i][:len(evil)] = evil
        resume.write_checkpoint(path, resume.structure_of(learn), 'run', [call, graph, (meta, buffers)])
        before = weights(learn)
        learn.distrib_resume('distrib')     # all epochs are done: the state comes in
        assert not same(weights(learn), before)
    assert not done.exists()
    pickle.loads(evil)      # it would have been seen
    assert done.exists()


@pytest.mark.parametrize('s', long_but(range(20), 0, 1, 2))
def test_random_sequences(s, two):
    rnd, learn, others = random.Random(s), learner(cbs=[Slow()]), []
    job, edited = learn.distrib_fit(6, nprocs=2, wait=False), False
    for _ in range(rnd.randrange(2, 7)):
        time.sleep(rnd.random()*.3)
        action = rnd.choice(['pull', 'stop', 'edit', 'second', 'second job', 'beside', 'predict'])
        if action == 'pull':
            with contextlib.suppress(CantDistribute):
                job.pull()
                assert not edited, 'an edit was overwritten'
        elif action == 'stop': job.stop()
        elif action == 'edit':
            with torch.no_grad(): learn.model[0].weight.add_(1)
            edited = True
        elif action in ('second', 'second job') and not job.done():
            again = learn.fit if action == 'second' else partial(learn.distrib_fit, wait=False, **two)
            with contextlib.suppress(CantDistribute):
                res = again(1)
                assert job.done()
                if res: res.result(60)
                edited = True
        elif action == 'beside': others.append(learner().distrib_fit(1, wait=False, **two))
        elif action == 'predict': assert learn.get_preds()[0].shape == (21, 3)
    job.exception(60)
    if edited:
        with pytest.raises(CantDistribute, match='were changed'): job.result()
        learn = job.twin.learn      # that has what was trained
    else: job.result()
    assert job.state in ('done', 'stopped')
    assert job.state == 'stopped' or len(learn.recorder.values) == 6
    for other in others:
        other.result(60)
        assert len(other.original.recorder.values) == 1
    learn.fit(1)


SEQUENCE = """
import os, random, sys, time
from pathlib import Path
sys.path[:0] = TESTS, TESTS + "/launch"
from parity import seed
from test_background import night
if __name__ == '__main__':
    rnd, learn, file = random.Random(int(sys.argv[1])), night(os.getcwd()), Path('models/distrib.ckpt')
    seed(rnd.randrange(99))
    if file.exists(): job = learn.distrib_resume('distrib', wait=False)
    else:
        seed(1)
        job = learn.distrib_fit_one_cycle(6, 1e-2, nprocs=2, wait=False, checkpoint='epoch')
    at, end = file.stat().st_mtime if file.exists() else 0, time.monotonic()+60
    while not (file.exists() and file.stat().st_mtime > at) and time.monotonic() < end and not job.done():
        time.sleep(.01)
    for _ in range(rnd.randrange(3)):
        time.sleep(rnd.random()*.2)
        if rnd.random() < .5 and job.epoch: job.pull()
        else: learn.get_preds()
    os.kill(os.getpid(), 9)
"""


def night(path): return learner(path=path, cbs=[Slow()])


@pytest.mark.full
@pytest.mark.parametrize('s', range(5))
def test_random_deaths_of_the_kernel(s, two, tmp_path):
    "After each the next kernel goes on; the last one ends as if there had been none"
    whole = night(tmp_path)
    seed(1)
    whole.distrib_fit_one_cycle(6, 1e-2, **two)
    (tmp_path/'script.py').write_text(SEQUENCE.replace('TESTS', repr(str(Path(__file__).parent.parent))))
    for i in range(1+s%2):
        res = subprocess.run([sys.executable, 'script.py', str(10*s+i)], cwd=tmp_path, capture_output=True, text=True)
        assert res.returncode == -signal.SIGKILL, res.stderr
    new = night(tmp_path)
    new.distrib_resume('distrib')
    sweep()     # as the next process of this user's does
    assert same(weights(new), weights(whole)) and values(new) == values(whole)
