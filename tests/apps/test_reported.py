"""What public reports of users of several processes are about: each trains as in one process, or is refused by one
sentence before anything starts."""
import pytest, torch
from torch import nn
from parity import fit_both, learner, warm


@pytest.fixture(scope='module')
def launcher():
    with warm(2) as w: yield w


class Share:
    "The share of right predictions, as an object without a name"
    def __call__(self, pred, y): return (pred.argmax(1) == y).float().mean()


@pytest.mark.parametrize('metric', [Share, nn.CrossEntropyLoss])
def test_a_metric_without_a_name(metric, launcher):
    many, one = fit_both(learner(metrics=metric()), 2, launcher, 2)
    assert [*many.recorder.metric_names] == [*one.recorder.metric_names]
    torch.testing.assert_close(torch.tensor(many.recorder.values), torch.tensor(one.recorder.values))
    assert metric.__name__ in many.distrib_report.to_dict()['ranks'][0]['metrics']
