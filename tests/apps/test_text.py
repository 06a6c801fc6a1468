"Text: a language model, and a classifier that begins with its encoder."
import random
import pandas as pd, pytest, torch
from fastai.text.all import (AWD_LSTM, CategoryBlock, ColReader, ColSplitter, DataBlock, Perplexity, SGD, TextBlock,
                             accuracy,
                             awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner, text_classifier_learner)
import fastddp.all
from applications import check, same_preds
from learners import seed_all

WORDS = {'good': 'great lovely fine superb happy'.split(), 'bad': 'awful sad poor boring weak'.split()}
SMALL = dict(emb_sz=24, n_hid=32, n_layers=2)


def texts(n=160, seed=0):
    r, rows = random.Random(seed), []
    for i in range(n):
        kind = 'good' if i % 2 else 'bad'
        words = [r.choice(WORDS[kind]) if r.random() < .5
                 else r.choice('the a film was and of plot actor scene'.split())
                 for _ in range(r.randint(8, 40))]
        rows.append(dict(text=' '.join(words), kind=kind, is_valid=i >= n*3//4))
    return pd.DataFrame(rows)


def split(df): return ColSplitter()(df)


def lm(df, bs=8):
    dls = DataBlock(TextBlock.from_df('text', is_lm=True, seq_len=20), get_x=ColReader('text'),
                    splitter=ColSplitter()).dataloaders(
        df, bs=bs, seq_len=20, num_workers=0, device='cpu')
    return language_model_learner(dls, AWD_LSTM, config=awd_lstm_lm_config | SMALL, pretrained=False,
                                  metrics=[accuracy, Perplexity()])


def classifier(df, vocab, bs=8, **kwargs):
    dls = DataBlock((TextBlock.from_df('text', vocab=vocab, seq_len=20), CategoryBlock), get_x=ColReader('text'),
                    get_y=ColReader('kind'),
                    splitter=ColSplitter()).dataloaders(df, bs=bs, num_workers=0, device='cpu')
    return text_classifier_learner(dls, AWD_LSTM, config=awd_lstm_clas_config | SMALL, pretrained=False,
                                   metrics=accuracy, seq_len=20,
                                   drop_mult=0.3, **kwargs)


@pytest.mark.full
def test_encoder_of_one_in_the_other(tmp_path):
    "The language model learns on the workers, its encoder is saved, the classifier takes it and learns there, too"
    seed_all()
    df = texts()
    learn = lm(df)
    learn.path = tmp_path
    learn.distrib_fit_one_cycle(2, 1e-2, nprocs=2)
    learn.save_encoder('enc')
    assert [o[1] for o in learn.recorder.values][-1] < learn.recorder.values[0][1]
    vocab = learn.dls.vocab
    accuracies = []
    for fit in ('distrib_fit_one_cycle', 'fit_one_cycle'):
        seed_all(2)
        clas = classifier(df, vocab, path=tmp_path).load_encoder('enc')
        encoder = learn.model[0].encoder.weight
        assert torch.equal(encoder, clas.model[0].module.encoder.weight)
        more = dict(nprocs=2, batch='global') if fit.startswith('distrib') else {}
        clas.unfreeze()
        getattr(clas, fit)(6, 1e-2, **more)
        accuracies.append(clas.recorder.values[-1][2])
        if more:
            last = [*clas.recorder.values[-1][1:]]
            assert [*clas.validate()] == pytest.approx(last, abs=.05)     # padded otherwise
            same_preds(clas)
    assert accuracies[0] > .9 and accuracies[0] == pytest.approx(accuracies[1], abs=.1), accuracies


def test_language_model_predictions():
    "Streams stay in one process"
    seed_all()
    learn = lm(texts(60), bs=6)
    learn.distrib_fit(1, nprocs=2)
    a, b = learn.distrib_validate(nprocs=2), learn.validate()
    assert [*a] == pytest.approx([*b], rel=1e-4)
    assert learn.predict('the film', 5, no_bar=True).startswith('the film')
