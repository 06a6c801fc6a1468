from workflows import assert_same, loaders, needs, trained
VERSION = needs('mlflow-skinny', 'mlflow.fastai')
import mlflow, pytest, torch
from fastai.basics import *

x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 2).long()


def learner(bs):
    return Learner(loaders([*zip(x, y)], bs), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), metrics=accuracy,
                   opt_func=SGD)


def logged(monkeypatch, *args, **kwargs):
    "The learner and what one run has of its fit"
    with mlflow.start_run() as run:
        monkeypatch.setenv('MLFLOW_RUN_ID', run.info.run_id)
        learn, _ = trained(learner, *args, **kwargs)
    return learn, mlflow.get_run(run.info.run_id).data


@pytest.mark.libraries('mlflow', '`mlflow.fastai.autolog`', compared='weights, losses, metrics, what is logged',
                       know="Workers find the run by `os.environ['MLFLOW_RUN_ID'] = run.info.run_id`, set before the "
                            "fit; without it each logs hyperparameters in a run of its own.")
def test_autolog(tmp_path, monkeypatch):
    monkeypatch.setenv('MLFLOW_TRACKING_URI', f'file://{tmp_path}/runs')
    mlflow.fastai.autolog(log_models=False)
    one, theirs = logged(monkeypatch, 16, 'fit', (2, .1), {})
    learn, ours = logged(monkeypatch, 8, 'fit', (2, .1), {}, batch='per_worker')
    assert_same(one, learn)
    assert len(mlflow.search_runs(output_format='list')) == 2
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-4) and {'epoch', 'accuracy'} < ours.metrics.keys()
    # the size of a batch differs
    assert ours.params | dict(input_size='') == theirs.params | dict(input_size='')
