from workflows import loaders, needs, same
VERSION = needs('peft', 'peft', 'transformers')
import pytest, torch
from fastai.basics import *
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

ids = torch.randint(5, 100, (60, 12), generator=torch.Generator().manual_seed(0))
labels = (ids.float().mean(1) > 52).long()
config = BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
lora = LoraConfig(task_type='SEQ_CLS', r=4, lora_alpha=8, lora_dropout=0., target_modules=['query', 'value'])


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(input_ids=x).logits


def learner(bs):
    model = Logits(get_peft_model(BertForSequenceClassification(config), lora))
    return Learner(loaders([*zip(ids, labels)], bs), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy,
                   opt_func=Adam)


@pytest.mark.libraries('peft', 'LoRA on a model of transformers', compared='weights, losses, metrics, saved adapter')
def test_lora(tmp_path):
    one, learn = same(learner, 'fit', 2, 1e-2, tol=1e-3)
    learn.model.model.save_pretrained(tmp_path)
    assert (tmp_path/'adapter_model.safetensors').exists()
    merged = learn.model.model.merge_and_unload()
    assert torch.allclose(merged(ids[:4]).logits, learn.model(ids[:4]), atol=1e-4)
