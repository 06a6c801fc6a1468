from workflows import needs, same
import fastcore.script
# tsai 1.0.1 imports it, and fastcore no longer has it
if not hasattr(fastcore.script, 'Param'): fastcore.script.Param = lambda *args, **kwargs: None
VERSION = needs('tsai', 'tsai.all')
import pytest
from tsai.all import *

rng = np.random.RandomState(0)
X, y = rng.randn(160, 2, 20).astype('float32'), np.arange(160)%2
X[y == 1] += .5
splits = list(range(80)), list(range(80, 160))
MLP_CONFIG = dict(layers=[20], ps=[0.], use_bn=False)


@pytest.mark.libraries('tsai', '`TSClassifier` with its default batch size to validate, `fit_one_cycle`')
def test_classifier():
    def make(bs):
        return TSClassifier(X, y, splits=splits, arch=MLP, arch_config=MLP_CONFIG, bs=[bs, 128], metrics=accuracy,
                            tfms=[None, TSClassification()], device='cpu', opt_func=SGD)
    same(make, 'fit_one_cycle', 2, 1e-2)


@pytest.mark.libraries('tsai', '`get_ts_dls` and `ts_learner`, an LSTM, `TSStandardize(by_sample=True)`',
                       know='Otherwise the statistics are those of a batch, whose size differs.')
def test_learner():
    def make(bs):
        dls = get_ts_dls(X, y, splits=splits, tfms=[None, TSClassification()], batch_tfms=TSStandardize(by_sample=True),
                         bs=[bs, 16], device='cpu', num_workers=0)
        return ts_learner(dls, LSTM, hidden_size=8, metrics=accuracy, opt_func=SGD)
    same(make, 'fit', 1, 1e-2, tol=1e-3)


@pytest.mark.libraries('tsai', '`TSForecaster` over sliding windows')
def test_forecaster():
    series = np.sin(np.arange(300)/7).astype('float32')
    a, b = SlidingWindow(30, horizon=5)(series)
    parts = TimeSplitter(60, show_plot=False)(b)
    def make(bs):
        return TSForecaster(a, b, splits=parts, arch=LSTMPlus, arch_config=dict(hidden_size=8), bs=[bs, 32],
                            metrics=mae,
                            tfms=[None, TSForecasting()], device='cpu', opt_func=SGD)
    same(make, 'fit', 2, 1e-3)


@pytest.mark.libraries('tsai', '`get_X_preds` after a fit on workers', compared='predictions')
def test_predictions():
    def make(bs):
        return TSClassifier(X, y, splits=splits, arch=MLP, arch_config=MLP_CONFIG, bs=[bs, 128], metrics=accuracy,
                            tfms=[None, TSClassification()], device='cpu', opt_func=SGD)
    one, learn = same(make, 'fit', 1, 1e-2)
    a, b = (o.get_X_preds(X[:20])[0] for o in (one, learn))
    assert torch.allclose(a, b, atol=1e-4)
