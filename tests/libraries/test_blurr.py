from workflows import loaders, needs, same
import datasets
# its import loads metrics by a function that `datasets` no longer has, and which reached for the network
if not hasattr(datasets, 'load_metric'): datasets.load_metric = lambda *args, **kwargs: None
VERSION = needs('ohmeow-blurr', 'blurr.text.data.all', 'blurr.text.modeling.all')
import pytest, torch
from blurr.text.data.all import *
from blurr.text.modeling.all import *
from fastai.text.all import *
from transformers import BertConfig, BertForSequenceClassification

ids = torch.randint(5, 100, (60, 12), generator=torch.Generator().manual_seed(0))
labels = (ids.float().mean(1) > 52).long()
config = BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    hidden_dropout_prob=0., attention_probs_dropout_prob=0.)


@pytest.mark.libraries('blurr', '`BaseModelWrapper` and `BaseModelCallback`')
def test_wrapper():
    items = [(dict(input_ids=o, attention_mask=torch.ones_like(o)), y) for o, y in zip(ids, labels)]
    make = lambda bs: Learner(loaders(items, bs), BaseModelWrapper(BertForSequenceClassification(config)),
                              opt_func=SGD,
                              loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=[BaseModelCallback])
    same(make, 'fit', 1, .05)
