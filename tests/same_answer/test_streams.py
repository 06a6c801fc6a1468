"""A language model on N workers with b streams each is one process with N*b streams: hidden state goes on from batch
to batch."""
import pytest, torch
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import Perplexity
from fastai.optimizer import SGD
from fastai.text.data import LMDataLoader
from fastai.text.models import AWD_LSTM, awd_lstm_lm_config, get_language_model
from torch import nn
from fastddp.all import *
from learners import seed_all

# No dropout at all. (With a weight dropout of exactly 0 torch gives back the parameter itself, and fastai's AWD-LSTM
# fails.)
SMALL = awd_lstm_lm_config | dict(emb_sz=12, n_hid=16, n_layers=2, output_p=0., hidden_p=0., input_p=0., embed_p=0.,
                                  weight_p=1e-30)


def texts(n, seed):
    return [torch.randint(0, 20, (k,))
            for k in torch.randint(20, 60, (n,), generator=torch.Generator().manual_seed(seed)).tolist()]


def lm_learner(bs):
    "AWD-LSTM without dropout, over texts as numbers"
    seed_all(0)
    dls = DataLoaders(LMDataLoader(texts(40, 0), bs=bs, seq_len=8, shuffle=True),
                      LMDataLoader(texts(12, 1), bs=4, seq_len=8), device='cpu')
    model = get_language_model(AWD_LSTM, 20, config=SMALL)
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=Perplexity(),
                   cbs=[ModelResetter, RNNCallback, RNNRegularizer(2., 1.)])


@pytest.mark.holds('Weights', "A language model (AWD-LSTM): N workers with b streams are one process with N·b "
                   "streams, hidden state and regularization included")
@pytest.mark.parametrize('n', [2, 3])
def test_a_language_model_equals_one_process(n):
    many, one = lm_learner(12//n), lm_learner(12)
    seed_all(5)
    many.distrib_fit(2, 0.5, nprocs=n)
    seed_all(5)
    one.fit(2, 0.5)
    assert len(many.recorder.losses) == len(one.recorder.losses) > 10
    for a, b in zip(many.recorder.losses, one.recorder.losses): torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for a, b in zip(many.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for a, b in zip(many.recorder.values, one.recorder.values, strict=True):
        assert list(a[1:]) == pytest.approx(list(b[1:]), rel=1e-5)


class FixedRows(nn.Module):
    "Its state has the batch size built in"
    def __init__(self, bs):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(20, 6), nn.RNN(6, 8, batch_first=True), nn.Linear(8, 20)
        self.h = torch.zeros(1, bs, 8)
    def reset(self): self.h.zero_()
    def forward(self, x):
        res, h = self.rnn(self.emb(x), self.h)
        self.h = h.detach()
        return self.out(res)


def test_a_language_model_for_its_batch_size_alone():
    "Each worker has b of the streams, and outside of a fit b streams are validated in the notebook"
    learn = lm_learner(4)
    learn.remove_cbs([o for o in learn.cbs if isinstance(o, (RNNCallback, RNNRegularizer))])
    learn.model = FixedRows(4)
    with learn.distrib_ctx(nprocs=2):
        learn.fit(1, .1)
        got = list(learn.validate())
    assert got == pytest.approx(list(learn.validate()), abs=1e-6)
