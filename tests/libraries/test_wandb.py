from workflows import both, loaders, needs, assert_same
VERSION = needs('wandb', 'wandb')
import os, pytest, torch, wandb
from fastai.basics import *

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


class Log(Callback):
    "Logs to the run of the notebook, from the process that has it"
    order = 60
    def after_epoch(self):
        if wandb.run is not None: wandb.log(dict(loss=float(self.recorder.values[-1][1])))


@pytest.mark.libraries('wandb', 'offline, the values of a fit logged afterwards', compared='weights, losses, metrics')
def test_offline(tmp_path, monkeypatch):
    monkeypatch.setenv('WANDB_MODE', 'disabled')
    with wandb.init(dir=tmp_path) as run:
        one, learn = both(lambda bs: Learner(loaders([*zip(x, y)], bs), nn.Linear(4, 2),
                                             loss_func=CrossEntropyLossFlat(),
                                             metrics=accuracy, opt_func=SGD, cbs=Log()), 'fit', 2, .1)
        for row in learn.recorder.values: run.log(dict(zip(learn.recorder.metric_names[1:], map(float, row))))
    assert_same(one, learn)
