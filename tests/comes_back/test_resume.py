"""A fit that was cut goes on as if nothing had happened: same lists, same table, same weights."""
import contextlib, errno, gc, importlib, io, os, re, signal, subprocess, sys, threading, weakref
import pytest
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastai.learner import Metric
from fastai.metrics import AccumMetric
from torch import nn
from faults import OneFault
from fastddp.all import CantDistribute, RankDied, RankRaised
from fastddp.base import group
from fastddp.fastai2 import session
from fastddp.process.workers import Workers
from learners import make_learner, mlp
from spread import long_but

CUTS = {   # what, event, rank, epoch, batch, what is raised, complete epochs afterwards, recorded batches afterwards
    'interrupt in an epoch': ('interrupt', 'before_batch/train', 1, 1, 2, KeyboardInterrupt, 1, 9),
    'interrupt in the first epoch': ('interrupt', 'before_batch/train', 0, 0, 2, KeyboardInterrupt, 0, 2),
    'interrupt in validation': ('interrupt', 'before_batch/valid', 0, 1, 0, KeyboardInterrupt, 1, 14),
    'exception': ('exception', 'after_pred', 1, 1, 3, RankRaised, 1, 7),
    'death': ('SIGKILL', 'before_batch/train', 0, 2, 3, RankDied, 2, 14),
    'exception at once': ('exception', 'before_fit', 0, None, None, RankRaised, 0, 0)}


# the masks, too, are those of the uninterrupted fit
def with_dropout(): return nn.Sequential(nn.Dropout(.2), *mlp())


def writer():
    "A callback that writes into a variable of this function, and that variable"
    steps = []
    class Writes(Callback):
        def after_batch(self): steps.append((self.epoch, self.training, self.iter))
    return Writes(), steps


written = weakref.WeakKeyDictionary()       # learner -> the list of its callback


def learner(tmp_path, *fault):
    marker = str(tmp_path/'fired')
    gc.collect()        # learners of other tests, which `written` holds weakly
    cb, steps = writer()
    learn = make_learner(cbs=[cb, *([OneFault(*fault, marker=marker)] if fault else [])], model=with_dropout)
    written[learn] = steps
    learn.recorder.lrs, learn.recorder.values = [], []
    return learn


def train(learn, **kwargs): learn.distrib_fit_one_cycle(3, 0.05, nprocs=2, **dict(timeout=40) | kwargs)


def history(learn):
    rec = learn.recorder
    return dict(lrs=rec.lrs, losses=[float(o) for o in rec.losses], values=[[*o] for o in rec.values], iters=rec.iters,
                lr_plot=rec.hps['lr'], mom_plot=rec.hps['mom'], steps=learn.train_iter,
                weights=[p.tolist() for p in learn.model.parameters()], written=written[learn])


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    learn = learner(tmp_path_factory.mktemp('whole'), 'nothing', 'before_fit', 9)
    train(learn)
    return history(learn)


@pytest.mark.parametrize('cut', long_but(CUTS, 'interrupt in an epoch', 'exception', 'death'))
def test_goes_on(cut, tmp_path, undisturbed):
    *fault, raised, epochs, batches = CUTS[cut]
    learn = learner(tmp_path, *fault)
    with pytest.raises(raised): train(learn)
    # no door of the workers' came along
    assert not [k for k in vars(learn) if callable(getattr(type(learn), k, None))]
    assert len(learn.recorder.values) == epochs and len(learn.recorder.lrs) == batches
    learn.distrib_resume()
    assert history(learn) == undisturbed
    with pytest.raises(CantDistribute, match='Nothing to resume'): learn.distrib_resume()


class Predicts(Callback):
    "Predicts on all ranks at the end of each epoch"
    order = 70
    def before_fit(self): self.seen = []
    def after_epoch(self): self.seen.append(float(self.learn.get_preds(dl=self.dls.valid, inner=True)[0].sum()))


def test_a_resumed_fit_with_a_callback_that_predicts(tmp_path):
    def make(*fault):
        return make_learner(cbs=[Predicts(), OneFault(*fault, marker=str(tmp_path/'fired'))], model=with_dropout)
    learn = make('exception', 'after_pred', 1, 1, 3)
    with pytest.raises(RankRaised): train(learn)
    learn.distrib_resume()
    train(whole := make('nothing', 'before_fit', 9))
    assert learn.predicts.seen == whole.predicts.seen and len(learn.predicts.seen) == 3
    assert [p.tolist() for p in learn.model.parameters()] == [p.tolist() for p in whole.model.parameters()]


@pytest.mark.parametrize('cut', ['interrupt in an epoch', 'death'])
def test_a_second_interrupt_while_the_place_is_noted(cut, tmp_path, undisturbed, monkeypatch):
    *fault, raised, _, _ = CUTS[cut]
    learn, noted = learner(tmp_path, *fault), session.FitCall.save
    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return noted(*args)
    with monkeypatch.context() as m:
        m.setattr(session.FitCall, 'save', interrupted)
        with pytest.raises(raised): train(learn)
    learn.distrib_resume()
    assert history(learn) == undisturbed


def test_goes_on_by_itself(tmp_path, undisturbed, capsys):
    learn = learner(tmp_path, 'SIGKILL', 'before_batch/train', 1, 1, 4)
    train(learn, restarts=1)
    assert history(learn) == undisturbed
    said = capsys.readouterr().out
    assert 'RankDied: rank 1 died: killed by SIGKILL (epoch 1, batch 4). Going on with epoch 1' in said
    assert [o for o in learn.distrib_report.phases if o in ('failed', 'back')] == ['failed', 'back']


class FailsAlways(Callback):
    """Fails in the second epoch, each time; the file `log` has a line for every try: the worker's pid and the epoch
    it begins with"""
    def __init__(self, log): self.log, self.pid = log, None
    def before_batch(self):
        if os.environ['RANK'] != '0' or not self.training: return
        if self.pid != os.getpid(): self._note()
        if self.epoch == 1: raise ValueError('wrong on purpose')
    def _note(self):
        self.pid = os.getpid()
        with open(self.log, 'a') as f: f.write(f'{self.pid} {self.epoch}\n')


@pytest.mark.parametrize('restarts', [0, 2])
def test_restarts_are_counted(restarts, tmp_path, capsys):
    "So many times the fit begins again, on workers of its own, with the epoch that is not complete; then it fails"
    learn = learner(tmp_path)
    learn.add_cb(FailsAlways(tmp_path/'log'))
    with pytest.raises(RankRaised, match='wrong on purpose'): train(learn, restarts=restarts)
    pids, epochs = zip(*(o.split() for o in (tmp_path/'log').read_text().splitlines()))
    assert epochs == ('0', *['1']*restarts) and len({*pids}) == 1+restarts
    left = re.findall(r'Going on with epoch 1 on fresh workers \((\d+) restart', capsys.readouterr().out)
    assert left == [str(o) for o in reversed(range(restarts))]
    assert len(learn.recorder.values) == 1


def test_fine_tune_goes_on_with_its_second_fit(tmp_path):
    "Interrupted in the second of its two fits: the first one isn't trained again"
    def run(learn): learn.distrib('fine_tune', 2, 1e-2, nprocs=2)
    whole = learner(tmp_path, 'nothing', 'before_fit', 9)
    run(whole)
    cut = learner(tmp_path, 'interrupt', 'before_batch/train', 0, 1, 1)
    with pytest.raises(KeyboardInterrupt): run(cut)
    cut.distrib_resume()
    assert history(cut) == history(whole)


def test_in_a_block(tmp_path, undisturbed):
    "Inside the block as outside of it, with the block's workers"
    learn = learner(tmp_path, 'interrupt', 'before_batch/train', 0, 1, 1)
    with learn.distrib_ctx(nprocs=2):
        with pytest.raises(KeyboardInterrupt): learn.fit_one_cycle(3, 0.05)
        learn.distrib_resume()
    assert history(learn) == undisturbed


def test_after_an_lr_find(tmp_path, undisturbed):
    "A complete `lr_find` leaves the resume point of the fit"
    learn = learner(tmp_path, 'interrupt', 'before_batch/train', 0, 1, 1)
    learn.path = tmp_path
    with pytest.raises(KeyboardInterrupt): train(learn)
    learn.distrib_lr_find(nprocs=2, show_plot=False, num_it=5)
    learn.distrib_resume()
    assert history(learn) == undisturbed


def test_a_fit_of_another_thread_is_not_counted(tmp_path, undisturbed):
    "It is refused, and the call of the block's thread goes on with its own fit"
    learn, refused = learner(tmp_path, 'exception', 'after_pred', 1, 1, 3), []
    def fit():
        try: learn.fit(1)
        except CantDistribute as e: refused.append(e)
    def beside(*args):
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join(60)
    with learn.distrib_ctx(nprocs=2, timeout=40):
        learn.distrib_session['session'].on_epoch.append(beside)
        with pytest.raises(RankRaised): train(learn)
        del learn.distrib_session['session'].on_epoch[:]
        learn.distrib_resume()
    assert len(refused) == 1 and history(learn) == undisturbed


def test_what_was_exchanged_is_refused(tmp_path):
    learn = learner(tmp_path, 'interrupt', 'before_batch/train', 0, 1, 1)
    with pytest.raises(KeyboardInterrupt): train(learn)
    learn.model = nn.Linear(8, 2)
    with pytest.raises(CantDistribute, match=r"its weights differ, such as \['weight'"): learn.distrib_resume()


BUGGY = """
class Sums(Callback):
    run_valid = False
    def __init__(self): self.n = 0
    def before_batch(self):
        self.n += 1
        if self.epoch == 1 and self.iter == 1: raise RuntimeError('a bug')
"""
MENDED = BUGGY.replace("if self.epoch == 1 and self.iter == 1: raise RuntimeError('a bug')", 'self.mended = True')


class Counts(Callback):
    "Counts the epochs that begin"
    def __init__(self): self.n = 0
    def before_epoch(self): self.n += 1


@pytest.mark.few(4)
@pytest.mark.parametrize('how', ['removed', 'another', 'defined anew', 'in another place'])
@pytest.mark.parametrize('rank', [None, 1])
def test_a_callback_that_failed_is_exchanged(how, rank, capsys):
    cell = dict(Callback=Callback, __name__='__main__', group=group)
    exec(BUGGY if rank is None else BUGGY.replace('== 1:', f'== 1 and group.rank() == {rank}:'), cell)
    learn = make_learner(cbs=[cell['Sums'](), Counts()])
    with pytest.raises(RankRaised, match=r'a bug[\s\S]*learn.remove_cb\(learn.sums\)'):
        learn.distrib_fit(3, nprocs=2, timeout=40)
    failed, counts = learn.sums, learn.counts
    exec(MENDED, cell)
    learn.remove_cb(failed)
    if how == 'another': learn.add_cb(GradientClip(.1))
    if how == 'defined anew': learn.add_cb(cell['Sums']())
    if how == 'in another place':
        learn.remove_cb(counts)
        learn.add_cbs([counts, cell['Sums']()])
    capsys.readouterr()
    learn.distrib_resume()
    out = capsys.readouterr().out
    assert learn.epoch == 2 and len(learn.recorder.values) == 3
    assert learn.counts is counts and counts.n == 3 and not any(o is failed for o in learn.cbs)
    if how in ('removed', 'another'):
        assert 'goes on without Sums'+(' and with GradientClip' if how == 'another' else '') in out
        assert not hasattr(learn, 'sums') and hasattr(learn, 'gradient_clip') == (how == 'another')
    else: assert 'goes on with' not in out and learn.sums.mended and learn.sums.n > 10


def fails(p, y): return p.nope
def right(p, y): return (p.argmax(-1) == y).float().mean()


class Counted(Metric):
    "Counts the validations: its state goes on"
    n, value, name = 0, 0., 'counted'
    def reset(self): self.n += 1
    def accumulate(self, learn): self.value = float(self.n)


MENDED_METRICS = dict(another=lambda: [right], none=list,
                      more=lambda: [right, Counted(), AccumMetric(right, flatten=False)])


@pytest.mark.parametrize('mended', MENDED_METRICS.values(), ids=MENDED_METRICS)
def test_a_metric_that_failed_is_exchanged(mended):
    "The learner's present metrics count, as its callbacks do; another number of them is no other learner"
    calls = []
    def metric(p, y):
        calls.append(1)
        return fails(p, y) if len(calls) > 5 else right(p, y)
    learn = make_learner(metrics=[metric])
    with pytest.raises(RankRaised, match='nope'): learn.distrib_fit(3, .05, nprocs=2)
    learn.metrics = mended()
    own = [*learn.metrics]
    learn.distrib_resume()
    names = [o.name for o in own]
    assert [*map(id, learn.metrics)] == [*map(id, own)] and learn.recorder.metric_names[3:-1] == names
    assert len(learn.recorder.values) == 3 and len(learn.recorder.values[-1]) == 2+len(names)


class Above(Metric):
    "Its threshold is an attribute"
    name = 'above'
    def __init__(self, threshold): self.threshold = threshold
    def reset(self): pass
    def accumulate(self, learn):
        if self.threshold is None: raise RuntimeError('no threshold')
    @property
    def value(self): return self.threshold


def test_another_metric_of_the_same_class():
    learn = make_learner(metrics=Above(None))
    with pytest.raises(RankRaised, match='no threshold'): learn.distrib_fit(2, .05, nprocs=2)
    learn.metrics = Above(.5)
    learn.distrib_resume()
    assert [row[-1] for row in learn.recorder.values] == [.5, .5] and learn.metrics[0].threshold == .5


def test_the_state_of_a_metric_goes_on(tmp_path):
    fault = OneFault('exception', 'after_pred', 1, 1, 3, marker=str(tmp_path/'f'))
    learn = make_learner(metrics=[Counted()], cbs=fault)
    with pytest.raises(RankRaised): learn.distrib_fit(3, .05, nprocs=2)
    learn.distrib_resume()
    assert [row[-1] for row in learn.recorder.values] == [1, 2, 3]


@pytest.mark.parametrize('n', [3, 1])
def test_with_another_number_of_workers(n, tmp_path):
    "Two GPUs yesterday, others today. With whole batches divided among the workers the result is the same"
    one = make_learner()
    one.fit_one_cycle(3, .05)
    learn = make_learner(cbs=OneFault('exception', 'after_pred', 1, 1, 3, marker=str(tmp_path/'fired')))
    with pytest.raises(RankRaised): learn.distrib_fit_one_cycle(3, .05, nprocs=2, batch='global')
    with pytest.raises(CantDistribute, match="has batch='global'"): learn.distrib_resume(batch='per_worker')
    with pytest.raises(CantDistribute, match="Did you mean 'nprocs'"): learn.distrib_resume(nproc=3)
    learn.distrib_resume(nprocs=n)
    for a, b in zip(one.model.parameters(), learn.model.parameters(), strict=True): assert (a-b).abs().max() < 1e-5


def test_cut_learner_is_let_go(tmp_path):
    "What is remembered to go on doesn't keep a learner that nobody wants any more, nor its data"
    def cut(*fault):
        learn = learner(tmp_path/fault[0], *fault)
        try: train(learn)
        except (KeyboardInterrupt, RankRaised): return [weakref.ref(o) for o in (learn, learn.model, learn.dls)]
    for fault in ('interrupt', 'exception'): (tmp_path/fault).mkdir()
    left = cut('interrupt', 'before_batch/train', 0, 1, 1)+cut('exception', 'before_batch/train', 0, 1, 1)
    gc.collect()
    assert not any(o() for o in left)


# Interrupts at any moment of a call

def interrupt_at(monkeypatch, kinds):
    "Ctrl-C when rank 0's next payload of the first of `kinds` is here, and so on; what is left of `kinds`"
    todo, real = list(kinds), Workers._store_payload
    def received(self, r, what, *values):
        res = real(self, r, what, *values)
        if r == 0 and todo and (what, *values[:1]) == ('put', todo[0]):
            todo.pop(0)
            signal.raise_signal(signal.SIGINT)
        return res
    monkeypatch.setattr(Workers, '_store_payload', received)
    return todo


KINDS = [('epoch',), ('epoch', 'cut'), ('state',), ('epoch', 'epoch'), ('epoch', 'cut', 'epoch', 'cut')]


@pytest.mark.full
@pytest.mark.parametrize('kinds', KINDS, ids=', '.join)
def test_interrupts_at_any_time(kinds, tmp_path, undisturbed, monkeypatch):
    """One, or two so close that the second one finds the state of a fit that was cut off, but no result; behind the
    last batch; in the fit that goes on. However it was cut, it goes on as if nothing had happened"""
    todo, learn = interrupt_at(monkeypatch, kinds), learner(tmp_path, 'nothing', 'before_fit', 9)
    with pytest.raises(KeyboardInterrupt): train(learn)
    for _ in kinds:
        try: learn.distrib_resume()
        except KeyboardInterrupt: continue
        break
    assert not todo and history(learn) == undisturbed


ENDS = [('fastddp.fastai2.session', 'apply', False), ('fastddp.process.workers', 'remove_folder', False),
        ('fastddp.process.workers', 'remove_folder', True)]


@pytest.mark.parametrize('module,name,block', ENDS)
def test_interrupt_while_the_call_ends(module, name, block, tmp_path, undisturbed, monkeypatch):
    "Or a block. What came back is put in its place, and all is ended, before KeyboardInterrupt is raised"
    module = importlib.import_module(module)
    real, calls = getattr(module, name), []
    def interrupted(*args, **kwargs):
        if not calls: signal.raise_signal(signal.SIGINT)
        calls.append(args)
        return real(*args, **kwargs)
    monkeypatch.setattr(module, name, interrupted)
    learn = learner(tmp_path, 'nothing', 'before_fit', 9)
    with pytest.raises(KeyboardInterrupt), learn.distrib_ctx(nprocs=2) if block else contextlib.nullcontext():
        learn.fit_one_cycle(3, 0.05) if block else train(learn)
    assert calls and history(learn) == undisturbed
    if name == 'apply': learn.distrib_resume()      # the call may have had more to do
    assert history(learn) == undisturbed


def test_interrupt_between_the_fits_of_a_call(tmp_path, monkeypatch):
    "What `fine_tune` does between its two fits isn't undone when it goes on"
    def run(learn): learn.distrib('fine_tune', 1, 1e-2, nprocs=2)
    whole = learner(tmp_path, 'nothing', 'before_fit', 9)
    run(whole)
    cut = learner(tmp_path, 'nothing', 'before_fit', 9)
    real = type(cut).unfreeze
    def unfreeze(self):
        monkeypatch.undo()
        raise KeyboardInterrupt
    monkeypatch.setattr(type(cut), 'unfreeze', unfreeze)
    with pytest.raises(KeyboardInterrupt): run(cut)
    assert type(cut).unfreeze is real
    cut.distrib_resume()
    assert history(cut) == history(whole)


class Full(io.StringIO):
    "A file on a disk that is full as soon as `full` is set"
    full = False
    def write(self, s):
        if self.full: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(s)


@pytest.mark.full
def test_output_that_fails_costs_no_complete_epoch(tmp_path, undisturbed, monkeypatch):
    "The notebook's stdout: a full disk, or a pipe that nobody reads any more"
    out, real = Full(), Workers._store_payload
    def received(self, r, what, *values):
        if what == 'put': out.full = values[0] == 'epoch'
        return real(self, r, what, *values)
    learn = learner(tmp_path, 'nothing', 'before_fit', 9)
    with monkeypatch.context() as m, contextlib.redirect_stdout(out):
        m.setattr(Workers, '_store_payload', received)
        with pytest.raises(OSError, match='No space left'): train(learn)
    n = len(learn.recorder.values)
    assert n > 0
    learn.distrib_resume()
    assert history(learn) == undisturbed


@pytest.mark.parametrize('n', [0, 1])
def test_interrupt_as_soon_as_it_is_heard_again(n, tmp_path, undisturbed, monkeypatch):
    "At the moment at which the handler is set back, for the first and the second time in a call"
    real, left = signal.signal, [n]
    def set_back(signum, handler):
        old = real(signum, handler)
        if (signum, handler) == (signal.SIGINT, signal.default_int_handler):
            left[0] -= 1
            if left[0] == -1: signal.raise_signal(signal.SIGINT)
        return old
    learn = learner(tmp_path, 'nothing', 'before_fit', 9)
    with monkeypatch.context() as m:
        m.setattr(signal, 'signal', set_back)
        with pytest.raises(KeyboardInterrupt): train(learn)
    with contextlib.suppress(CantDistribute): learn.distrib_resume()     # nothing, if all had come back
    assert left[0] < 0 and history(learn) == undisturbed


def test_a_callback_defined_anew_without_the_method_that_failed():
    "The class of the new cell has the methods that it has there"
    def define(fails):
        class Fails(Callback):
            if fails:
                def after_batch(self):
                    if (self.epoch, self.iter) == (1, 0): raise RuntimeError('on purpose')
        Fails.__module__, Fails.__qualname__ = '__main__', 'Fails'
        sys.modules['__main__'].Fails = Fails
        return Fails
    learn = make_learner(cbs=define(True)())
    with learn.no_bar(), learn.no_logging():
        with pytest.raises(RankRaised) as e: learn.distrib_fit(2, nprocs=2)
        assert 'learn.remove_cb(learn.fails)' in str(e.value)
        new = define(False)
        learn.remove_cb(learn.fails)
        learn.add_cb(new())
        learn.distrib_resume()
    assert 'after_batch' not in vars(new) and len(learn.recorder.values) == 2


@pytest.mark.parametrize('file', [(), ('distrib',)])
def test_a_callback_of_a_function_is_the_same_object(file, tmp_path):
    "Its class is loaded by value, under another `__qualname__`"
    class Fails(Callback):
        may = False
        def before_batch(self):
            if self.epoch == 1 and not self.may: raise RuntimeError('on purpose')
    learn = make_learner(cbs=(cb := Fails()))
    learn.path = tmp_path
    with pytest.raises(RankRaised): learn.distrib_fit(2, nprocs=2, checkpoint='epoch')
    cb.may = True
    learn.distrib_resume(*file)
    assert learn.fails is cb and cb.may and learn.epoch == 1


def test_a_failed_callback_that_was_given_to_the_fit():
    "The error says how the fit goes on with a mended one"
    class Fails(Callback):
        def after_batch(self):
            if (self.epoch, self.iter) == (1, 0): raise RuntimeError('on purpose')
    learn = make_learner()
    with learn.no_bar(), learn.no_logging(), pytest.raises(RankRaised) as e:
        learn.distrib_fit(2, nprocs=2, cbs=Fails())
    assert 'learn.distrib_fit(..., cbs=Fails(), start_epoch=1)' in ' '.join(str(e.value).split())


@pytest.mark.parametrize('how', [dict(), dict(nprocs=1)])
def test_one_process_writes_checkpoints(how, tmp_path, capsys):
    "As on a laptop and on Colab: another kernel goes on as if nothing had happened"
    def make(*fault):
        learn = learner(tmp_path, *fault)
        learn.path = tmp_path
        return learn
    fault = 'exception', 'after_pred', 0, 1, 3
    whole = make()
    whole.distrib_fit_one_cycle(3, .05, checkpoint='epoch', **how)
    (tmp_path/'models'/'distrib.ckpt').unlink()
    with pytest.raises(Exception, match='on purpose'):
        make(*fault).distrib_fit_one_cycle(3, .05, checkpoint='epoch', restarts=2, **how)
    said = capsys.readouterr().out
    assert 'running in this process' in said and 'Without workers restarts= has no effect.' in said
    learn = make(*fault)        # which doesn't come again
    learn.distrib_resume('distrib')
    assert history(learn) == history(whole)


def test_another_kernel_that_writes_the_same_checkpoint(tmp_path):
    "Each would delete what the other one is writing"
    folder = tmp_path/'models'
    folder.mkdir()
    script = ('import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX);'
              'print(1, flush=True); input()')
    other = subprocess.Popen([sys.executable, '-c', script, folder], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    learn = learner(tmp_path)
    learn.path = tmp_path
    with other:
        other.stdout.read(1)
        with pytest.raises(CantDistribute, match='Another fit writes its checkpoints'): train(learn, checkpoint='epoch')
    train(learn, checkpoint='epoch')
    assert (folder/'distrib.ckpt').exists()


def test_a_path_is_no_state(tmp_path):
    "As on Kaggle: the file of the last session is read-only, and the next one goes to the new learner's folder"
    def make(folder):
        learn = learner(tmp_path, 'exception', 'after_pred', 0, 1, 3)
        learn.path = tmp_path/folder
        return learn
    with pytest.raises(RankRaised): train(make('input'), checkpoint='epoch')
    file = tmp_path/'input'/'models'/'distrib.ckpt'
    was = file.read_bytes()
    learn = make('working')
    learn.distrib_resume(file)
    assert learn.path == tmp_path/'working' and len(learn.recorder.values) == 3
    assert file.read_bytes() == was and (tmp_path/'working'/'models'/'distrib.ckpt').exists()
