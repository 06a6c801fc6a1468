from workflows import loaders, needs, same
VERSION = needs('transformers', 'transformers')
import pytest, torch
from fastai.basics import *
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

ids = torch.randint(5, 100, (60, 12), generator=torch.Generator().manual_seed(0))
labels = (ids.float().mean(1) > 52).long()
config = BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    hidden_dropout_prob=0., attention_probs_dropout_prob=0.)


class Logits(nn.Module):
    "The usual wrapper"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(input_ids=x).logits


class TakeLogits(Callback):
    "The other usual way: a callback takes the logits out of the output"
    def after_pred(self): self.learn.pred = self.pred.logits


class Labelled(Callback):
    "Gives the model its labels, so that it computes the loss"
    def before_batch(self): self.learn.xb = (dict(input_ids=self.xb[0], labels=self.yb[0]),)


class ByKeywords(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, batch): return self.model(**batch)


def logits_loss(out, y): return F.cross_entropy(out.logits, y)
def model_loss(out, y): return out.loss
def right(out, y): return (out.logits.argmax(1) == y).float().mean()
def bert(): return BertForSequenceClassification(config)


def learner(bs, model, **kwargs):
    return Learner(loaders([*zip(ids, labels)], bs), model, **{**dict(opt_func=SGD, metrics=accuracy,
                   loss_func=CrossEntropyLossFlat()), **kwargs})


@pytest.mark.libraries('transformers', 'BERT in a module that returns its logits')
def test_wrapper(): same(lambda bs: learner(bs, Logits(bert())), 'fit_one_cycle', 2, .05)


@pytest.mark.libraries('transformers', 'a callback takes the logits')
def test_callback(): same(lambda bs: learner(bs, bert(), cbs=TakeLogits()), 'fit', 2, .05)


@pytest.mark.libraries('transformers', 'loss and metrics read the output (`ModelOutput`)')
def test_loss_on_the_output():
    same(lambda bs: learner(bs, bert(), loss_func=logits_loss, metrics=right), 'fit', 1, .05)


@pytest.mark.libraries('transformers', 'the model computes its loss from labels',
                       know='The mean over workers of their losses.')
def test_loss_of_the_model():
    make = lambda bs: learner(bs, ByKeywords(bert()), loss_func=model_loss, metrics=right, cbs=Labelled())
    same(make, 'fit', 1, .05)


@pytest.mark.libraries('transformers', '`fine_tune` with two groups of parameters')
def test_fine_tune():
    split = lambda m: L(m.model.bert, m.model.classifier).map(params)
    same(lambda bs: learner(bs, Logits(bert()), splitter=split, opt_func=Adam), 'fine_tune', 1, 1e-3)


@pytest.mark.libraries('transformers', '`from_pretrained` of a saved model, gradient checkpointing')
def test_saved(tmp_path):
    bert().save_pretrained(tmp_path)
    def make(bs):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        model.gradient_checkpointing_enable()
        return learner(bs, Logits(model))
    same(make, 'fit', 1, .05)
