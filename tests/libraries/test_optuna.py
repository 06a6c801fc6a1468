from workflows import loaders, needs, quiet, seed
VERSION = needs('optuna', 'optuna')
import optuna, pytest, torch
from fastai.basics import *

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


class Prune(Callback):
    "As optuna's integration with fastai: reports each epoch, and raises `TrialPruned`"
    order = 60      # after the Recorder
    def __init__(self, trial): self.trial = trial
    def after_epoch(self):
        self.trial.report(float(self.recorder.values[-1][1]), self.epoch)
        if self.trial.should_prune(): raise optuna.TrialPruned(f'pruned at epoch {self.epoch}')


def learner(bs, cbs=()):
    seed()
    return quiet(Learner(loaders([*zip(x, y)], bs), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), opt_func=SGD,
                         cbs=cbs))


def study(fit, n=4, with_cb=False):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    def objective(trial):
        lr = trial.suggest_float('lr', 1e-4, 1., log=True)
        learn = learner(8, [Prune(trial)] if with_cb else [])
        fit(learn, lr)
        return float(learn.recorder.values[-1][1])
    res = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0),
                              pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    res.optimize(objective, n_trials=n)
    return res


def plain(learn, lr): learn.fit(2, lr)
def on_workers(learn, lr): learn.distrib_fit(2, lr, nprocs=2, batch='global')


@pytest.mark.libraries('optuna', 'a study around fits', compared="the trials' parameters and values")
def test_study():
    a, b = study(plain), study(on_workers)
    for s, t in zip(a.trials, b.trials):
        assert abs(s.params['lr']-t.params['lr']) < 1e-4 and abs(s.value-t.value) < 1e-4


@pytest.mark.libraries('optuna', 'a callback that reports to the trial and prunes', compared="the trials' states")
def test_prune():
    a, b = study(plain, 6, True), study(on_workers, 6, True)
    assert any(o.state == optuna.trial.TrialState.PRUNED for o in a.trials)
    assert [o.state for o in a.trials] == [o.state for o in b.trials]
