"""What is trained when steps are measured: each case once as a fastai learner, once for a hand-written loop.

Both have the same model, batch, data in memory, loss and optimizer (torch's SGD with momentum), one thread per rank.
"""
from types import SimpleNamespace
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from common import convnet, mlp, seed_all, sgd


def numbers(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
def classes(n, of, seed=1):
    size = n if isinstance(n, tuple) else (n,)
    return torch.randint(0, of, size, generator=torch.Generator().manual_seed(seed))


class InMemory:
    "Items in tensors, and torch's own DataLoader over them on both sides"
    def __init__(self, model, data, bs, epochs):
        self.model, self.data = model, data
        self.bs, self.epochs = bs, epochs
        self.loss_func = nn.CrossEntropyLoss()
    def learner(self, ranks=2, **kwargs):
        seed_all()
        ts = self.data()
        dls = DataLoaders(DataLoader(TensorDataset(*ts), self.bs, shuffle=True, drop_last=True),
                          DataLoader(TensorDataset(*(t[:self.bs] for t in ts)), self.bs))
        return Learner(dls, self.model(), loss_func=self.loss_func, opt_func=sgd, lr=0.01, **kwargs)
    def script(self, rank, n):
        "Model, and a function that gives an epoch's batches"
        seed_all()
        ds = TensorDataset(*self.data())
        sampler = DistributedSampler(ds, n, rank)
        dl = DataLoader(ds, self.bs, sampler=sampler, drop_last=True)
        def epoch(i):
            sampler.set_epoch(i)
            for *xs, y in dl: yield xs, y
        return SimpleNamespace(model=self.model(), epoch=epoch, loss=lambda out, y: self.loss_func(out, y))


class Text:
    "AWD-LSTM as a language model over one long stream, its state carried from batch to batch; no regularizers"
    bs, seq_len, epochs, words = 16, 35, 3, 2000
    def __init__(self, steps): self.steps = steps
    def model(self):
        from fastai.text.models import AWD_LSTM, awd_lstm_lm_config, get_language_model
        config = awd_lstm_lm_config | dict(emb_sz=100, n_hid=200, n_layers=2)
        return get_language_model(AWD_LSTM, self.words, config=config)
    @property
    def loss_func(self):
        from fastai.losses import CrossEntropyLossFlat
        return CrossEntropyLossFlat()
    def stream(self, ranks): return classes(self.bs*ranks*(self.seq_len*self.steps)+1, self.words)
    def learner(self, ranks=2, **kwargs):
        from fastai.callback.rnn import ModelResetter, RNNCallback
        from fastai.text.data import LMDataLoader
        seed_all()
        lm = lambda t: LMDataLoader([t], bs=self.bs, seq_len=self.seq_len)
        dls = DataLoaders(lm(self.stream(ranks)), lm(self.stream(ranks)[:self.bs*ranks*self.seq_len+1]), device='cpu')
        return Learner(dls, self.model(), loss_func=self.loss_func, opt_func=sgd, lr=0.01,
                       cbs=[ModelResetter, RNNCallback], **kwargs)
    def script(self, rank, n):
        seed_all()
        model, loss_func, t = self.model(), self.loss_func, self.stream(n)
        rows = t[:-1].reshape(self.bs*n, -1), t[1:].reshape(self.bs*n, -1)
        x, y = (o[rank*self.bs:(rank+1)*self.bs] for o in rows)
        def epoch(i):
            model.reset()
            for k in range(0, x.shape[1], self.seq_len): yield [x[:, k:k+self.seq_len]], y[:, k:k+self.seq_len]
        return SimpleNamespace(model=model, epoch=epoch, loss=lambda out, y: loss_func(out[0], y))


def tabular_model():
    "The layers of fastai's Rossmann lesson"
    from fastai.tabular.model import TabularModel
    return TabularModel([(1000, 50), (100, 30), (12, 6), (7, 4)], 16, 10, [1000, 500])


def tabular_data(n):
    cats = torch.stack([classes(n, of, i) for i, of in enumerate((1000, 100, 12, 7))], 1)
    return cats, numbers(n, 16), classes(n, 10)


CASES = {'convnet': InMemory(convnet, lambda: (numbers(2048, 3, 32, 32), classes(2048, 10)), 32, 3),
         'text': Text(30),
         'tabular': InMemory(tabular_model, lambda: tabular_data(20480), 256, 3),
         'mlp': InMemory(mlp, lambda: (numbers(16384, 64), classes(16384, 10)), 32, 3)}
