from workflows import loaders, needs, same
VERSION = needs('tensorboard', 'tensorboard')
import pytest, torch
from fastai.basics import *
from fastai.callback.tensorboard import TensorBoardCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


@pytest.mark.libraries('tensorboard', "fastai's `TensorBoardCallback`",
                       compared='weights, losses, metrics, scalars in the file')
def test_callback(tmp_path):
    folders = iter((tmp_path/'one', tmp_path/'workers'))
    same(lambda bs: Learner(loaders([*zip(x, y)], bs), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(),
                            metrics=accuracy,
                            opt_func=SGD, cbs=TensorBoardCallback(next(folders), trace_model=False,
                                                                  log_preds=False)), 'fit', 2, .1)
    found = []
    for o in 'one', 'workers':
        events = EventAccumulator(str(tmp_path/o))
        events.Reload()
        names = [k for k in events.Tags()['scalars'] if 'loss' in k or 'accuracy' in k]
        found.append({k: {v.step: v.value for v in events.Scalars(k)} for k in names})
    assert found[0].keys() == found[1].keys() and found[0]
    for k, a in found[0].items():
        b = found[1][k]     # fastai writes the loss of training in each batch of a validation, too
        assert a.keys() == b.keys() and np.allclose([*a.values()], [*b.values()], atol=1e-4), k
