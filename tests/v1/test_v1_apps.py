"""Every kind of `DataBunch` of fastai v1 trains on 2 workers; where nothing is random, as one process with twice the
batch."""
import numpy as np, pandas as pd, pytest, torch
from learners_v1 import *
from fastai.vision import *
from fastai.tabular import *
from fastai.collab import *
from fastai.text import *
from fastai.text.data import pad_collate
from fastai.vision.gan import *
from fastai.vision.data import PointsLabelList
from fastddp.all import RankRaised


def pictures(path, n=24, size=16):
    "Two kinds of pictures: bright on the left, bright on the right"
    rng = np.random.RandomState(0)
    for i in range(n):
        kind = 'lr'[i%2]
        im = rng.randint(0, 100, (size, size, 3))
        im[:, :size//2] += 150 if kind == 'l' else 0
        im[:, size//2:] += 150 if kind == 'r' else 0
        (path/kind).mkdir(exist_ok=True, parents=True)
        PIL.Image.fromarray(im.astype(np.uint8)).save(path/kind/f'{i:02}.png')
    return path


def small_net(c):
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), AdaptiveConcatPool2d(1), Flatten(), nn.Linear(8, c))


@pytest.mark.full
def test_images(tmp_path):
    path = pictures(tmp_path)
    def make(bs):
        seed()
        il = ImageList.from_folder(path).split_by_idx(list(range(0, 24, 5))).label_from_folder()
        data = il.transform([[], []], size=16).databunch(bs=bs, num_workers=0).normalize(imagenet_stats)
        return Learner(data, small_net(2), opt_func=partial(optim.SGD, momentum=.9), metrics=[accuracy, error_rate],
                       path=path)
    two, one = pair(make, lambda l: l.fit_one_cycle(2, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    with two.distrib_ctx(nprocs=2): interp = ClassificationInterpretation.from_learner(two)
    assert interp.confusion_matrix().sum() == len(two.data.valid_ds) and len(interp.top_losses()[0]) == 5
    assert str(two.predict(two.data.valid_ds[0][0])[0]) in ('l', 'r')
    two.export()
    again = load_learner(path).predict(two.data.valid_ds[0][0])[2]
    torch.testing.assert_close(again, two.predict(two.data.valid_ds[0][0])[2])


@pytest.mark.full
def test_resnet_with_augmentation_frozen_and_unfrozen(tmp_path):
    "Layer groups, batch norm, DataLoader workers, random transforms"
    data = (ImageList.from_folder(pictures(tmp_path, 16)).split_by_rand_pct(.25, seed=1).label_from_folder()
            .transform(get_transforms(max_warp=0), size=16).databunch(bs=3, num_workers=1).normalize(imagenet_stats))
    learn = cnn_learner(data, models.resnet18, pretrained=False, metrics=accuracy, callback_fns=ShowGraph)
    learn.freeze()
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    learn.distrib_fit_one_cycle(1, 1e-3, nprocs=2)
    changed = {k for k, v in learn.model.state_dict().items() if not torch.equal(v, before[k])}
    assert '1.8.weight' in changed and '0.0.weight' not in changed and '0.1.running_mean' in changed
    learn.unfreeze()
    learn.distrib_fit(1, slice(1e-5, 1e-3), nprocs=2)
    assert not torch.equal(learn.model.state_dict()['0.0.weight'], before['0.0.weight'])
    assert len(learn.recorder.metrics) == 1 and len(learn.opt._lr) == 3


def masked(path):
    "For each picture a mask of its bright half"
    masks = path.parent/'m'
    masks.mkdir()
    for f in path.glob('*/*.png'):
        mask = np.zeros((16, 16), np.uint8)
        mask[:, :8], mask[:, 8:] = f.parent.name == 'l', f.parent.name == 'r'
        PIL.Image.fromarray(mask).save(masks/f.name)
    return masks


SGD = partial(optim.SGD, momentum=.9)


VALID = list(range(0, 32, 3))      # 11 of 32 pictures: nothing divides by the batches


def test_segmentation(tmp_path):
    path = pictures(tmp_path/'i', 32)
    masks = masked(path)
    def make(bs):
        seed()
        data = (SegmentationItemList.from_folder(path).split_by_idx(VALID).label_from_func(lambda f: masks/f.name,
                                                                                           classes=['a', 'b'])
                .transform([[], []], tfm_y=True, size=16).databunch(bs=bs, val_bs=4, num_workers=0))
        model = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 2, 5, padding=2))
        return Learner(data, model, opt_func=SGD, metrics=[dice, foreground], path=path)
    two, one = pair(make, lambda l: l.fit_one_cycle(3, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    with two.distrib_ctx(nprocs=2): preds, ys = two.get_preds()
    alone, ys_alone = one.get_preds()
    assert preds.shape == (11, 2, 16, 16) and torch.equal(ys, ys_alone)
    torch.testing.assert_close(preds, alone, rtol=0, atol=1e-5)


def test_unet(tmp_path):
    "The course's lessons on segmentation and super-resolution: hooks of its encoder's modules travel along"
    path = pictures(tmp_path/'i', 16)
    masks = masked(path)
    data = (SegmentationItemList.from_folder(path).split_by_idx(VALID[:4])
            .label_from_func(lambda f: masks/f.name, classes=['a', 'b'])
            .transform([[], []], tfm_y=True, size=32).databunch(bs=3, num_workers=0).normalize(imagenet_stats))
    learn = unet_learner(data, models.resnet18, pretrained=False, metrics=dice)
    for _ in range(2):
        before = [p.clone() for p in learn.model.parameters()]
        learn.distrib_fit_one_cycle(1, 1e-3, nprocs=2)
        assert any(not torch.equal(p, q) for p, q in zip(before, learn.model.parameters()))
    got, here = learn.recorder.val_losses[-1], learn.validate()[0]
    assert float(got) == pytest.approx(float(here), rel=1e-4)


def foreground(out, y):
    "A metric of the lesson's kind: a mean over the pixels of a batch that are not background"
    y = y.squeeze(1)
    return (out.argmax(1)[y != 0] == y[y != 0]).float().mean()


def test_points(tmp_path):
    path = pictures(tmp_path, 32)
    def make(bs):
        seed()
        data = (PointsItemList.from_folder(path).split_by_idx(VALID)
                .label_from_func(lambda f: tensor([[3., 4.]]) if f.parent.name == 'l' else tensor([[9., 12.]]),
                                 label_cls=TensorPoints)
                .transform([[], []], tfm_y=True, size=16).databunch(bs=bs, num_workers=0))
        return Learner(data, nn.Sequential(small_net(2), Reshape()), opt_func=SGD, path=path, loss_func=MSELossFlat(),
                       metrics=[mean_absolute_error])
    two, one = pair(make, lambda l: l.fit(3, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    assert two.recorder.val_losses[-1] < two.recorder.val_losses[0]
    torch.testing.assert_close(two.distrib_get_preds(nprocs=2)[0], one.get_preds()[0], rtol=0, atol=1e-5)


class TensorPoints(PointsLabelList):
    "As fastai's, which takes numpy's arrays for tensors"
    def get(self, i):
        return ImagePoints(FlowField((16, 16), tensor(np.array(self.items[i], dtype=np.float32))), scale=True)


class Reshape(nn.Module):
    def forward(self, x): return x.view(-1, 1, 2)


def test_tabular(tmp_path):
    rng = np.random.RandomState(0)
    df = pd.DataFrame(dict(c=rng.choice(list('abc'), 60), x=rng.randn(60), z=rng.randn(60)))
    df['y'] = (df.x > 0).astype(int)
    def make(bs):
        seed()
        data = (TabularList.from_df(df, cat_names=['c'], cont_names=['x', 'z'],
                                    procs=[Categorify, Normalize]).split_by_idx(list(range(13)))
                .label_from_df('y').databunch(bs=bs, num_workers=0))
        return tabular_learner(data, layers=[8], emb_szs={'c': 3}, metrics=accuracy, path=tmp_path, use_bn=False)
    two, one = make(4), make(8)
    for l in (two, one): l.model.bn_cont = nn.Identity()    # each worker normalizes its own part
    seed(5); two.distrib_fit(2, 1e-2, nprocs=2)
    seed(5); one.fit(2, 1e-2)
    same_weights(two, one)
    same_recorder(two, one)
    assert two.predict(df.iloc[0])[1] in (0, 1)


def test_collab(tmp_path):
    rng = np.random.RandomState(0)
    df = pd.DataFrame(dict(user=rng.randint(0, 8, 90), item=rng.randint(0, 9, 90),
                           rating=rng.randint(1, 6, 90).astype(float)))
    def make(bs):
        seed()
        data = CollabDataBunch.from_df(df, seed=1, bs=bs, num_workers=0, path=tmp_path)
        return collab_learner(data, n_factors=5, y_range=[0, 5.5])
    two, one = pair(make, lambda l: l.fit_one_cycle(2, 1e-2, wd=.1))
    same_weights(two, one)
    same_recorder(two, one)


# fastai's own tokenizer asks for a spacy that no longer exists
TOKENIZER = Tokenizer(tok_func=BaseTokenizer, n_cpus=1)
WORDS = 'good fine great bad awful poor film plot cast the a is was very'.split()


def texts(n=60):
    rng = np.random.RandomState(0)
    rows = []
    for i in range(n):
        words = [str(o) for o in rng.choice(WORDS[6:], rng.randint(3, 25))]
        words.insert(rng.randint(len(words)), str(rng.choice(WORDS[:3] if i%2 else WORDS[3:6])))
        rows.append((i%2, ' '.join(words)))
    return pd.DataFrame(rows, columns=['label', 'text'])


def lm_data(path, bs):
    return TextLMDataBunch.from_df(path, texts()[:45], texts()[45:], bs=bs, bptt=5, tokenizer=TOKENIZER, min_freq=1)


CONFIG = dict(awd_lstm_lm_config, emb_sz=8, n_hid=10, n_layers=2)


def test_language_model_is_streams(tmp_path):
    "Without dropout, N x b streams are those of one process"
    def make(bs):
        seed()
        data = lm_data(tmp_path, bs)
        data.valid_dl = lm_data(tmp_path, 4).valid_dl
        seed()
        return language_model_learner(data, AWD_LSTM, config=CONFIG, pretrained=False, drop_mult=0., path=tmp_path,
                                      alpha=0., beta=0.)
    two, one = pair(make, lambda l: l.fit_one_cycle(2, 1e-2))
    same_weights(two, one)
    np.testing.assert_allclose(two.recorder.losses, one.recorder.losses, atol=1e-5)
    # they begin without the hidden state of training, which is that of each rank's rows
    np.testing.assert_allclose(two.recorder.val_losses, one.recorder.val_losses, atol=1e-6)
    np.testing.assert_array_equal(two.data.train_dl.dataset.idx.idx, one.data.train_dl.dataset.idx.idx)
    assert two.data.train_dl.dataset.bs == 4
    # the next local fit draws its order from the notebook's streams
    assert 'on_epoch_begin' not in vars(two.data.train_dl.dataset)
    with two.distrib_ctx(nprocs=2): got = two.validate()
    np.testing.assert_allclose([float(o) for o in got], [float(o) for o in two.validate()], atol=1e-5)


class Fails(LearnerCallback):
    "In the second epoch, on these ranks"
    def __init__(self, learn, ranks):
        super().__init__(learn)
        self.ranks = ranks
    def on_batch_end(self, epoch, train, **kwargs):
        if train and epoch == 1 and os.environ['RANK'] in self.ranks: raise ValueError('no such luck')


@pytest.mark.parametrize('ranks, kept', [('1', 'last complete epoch'), ('01', 'last finished batch')])
def test_a_fit_that_fails_leaves_a_language_model_its_streams(ranks, kept, tmp_path):
    "The last complete epoch comes from within the fit, whose loaders have the streams of all ranks"
    seed()
    learn = language_model_learner(lm_data(tmp_path, 4), AWD_LSTM, config=CONFIG, pretrained=False, path=tmp_path)
    dl = learn.data.train_dl.dl
    with learn.distrib_ctx(nprocs=2):
        with pytest.raises(RankRaised, match=kept): learn.fit(2, 1e-2, callbacks=[Fails(learn, ranks)])
    pre = learn.data.train_dl.dataset
    assert learn.data.train_dl.dl is dl and dl.dataset is pre and pre.bs == dl.batch_size == 4
    assert {*pre.idx.idx} == {*range(len(pre.dataset.x.items))} and 'on_epoch_begin' not in vars(pre)
    learn.fit(1, 1e-2)      # goes on in the notebook
    assert pre.batch.shape[0] == 4


class FixedRows(nn.Module):
    "The course's RNN from scratch: its state has the batch size built in"
    def __init__(self, n_words, bs, nh=6):
        super().__init__()
        self.i_h, self.h_h, self.h_o = nn.Embedding(n_words, nh), nn.Linear(nh, nh), nn.Linear(nh, n_words)
        self.h = torch.zeros(bs, nh)
    def train(self, mode=True):
        self.h = torch.zeros_like(self.h)
        return super().train(mode)
    def forward(self, x):
        res, h = [], self.h
        for i in range(x.shape[1]):
            h = torch.tanh(self.h_h(h+self.i_h(x[:, i])))
            res.append(h)
        self.h = h.detach()
        return self.h_o(torch.stack(res, dim=1))


def test_a_state_with_the_batch_size_built_in(tmp_path):
    seed()
    data = lm_data(tmp_path, 4)
    learn = Learner(data, FixedRows(len(data.vocab.itos), 4), loss_func=CrossEntropyFlat(), metrics=accuracy)
    learn.distrib_fit(2, 1e-2, nprocs=2)
    with learn.distrib_ctx(nprocs=2): got = learn.validate()
    assert [float(o) for o in got] == pytest.approx([float(o) for o in learn.validate()], abs=1e-6)


def reviews(n, lengths):
    """Good and bad ones, told apart by one word among many; no word comes twice in a row, which fastai's rules would
    shorten"""
    rng = np.random.RandomState(0)
    rows = []
    for i in range(n):
        size = rng.choice(lengths)
        words = [WORDS[6:][o]
                 for o in np.concatenate([np.roll(rng.permutation(8), k) for k in range(-(-size//8))])[:size]]
        words.insert(rng.randint(len(words)+1), str(rng.choice(WORDS[:3] if i%2 else WORDS[3:6])))
        rows.append((i%2, ' '.join(words)))
    return pd.DataFrame(rows, columns=['label', 'text'])


def lesson3(path, df, bs, n, plain=True):
    """A language model, and a classifier with its encoder, trained by `n` workers; `plain`: without dropout and
    batch norm"""
    def fit(learn, epochs, lr):
        seed(5)
        learn.distrib('fit' if plain else 'fit_one_cycle', epochs, lr, nprocs=n)
    train, valid, sizes, name = df[:-37], df[-37:], dict(emb_sz=8, n_hid=10, n_layers=2), f'of {n}'
    seed()
    data = TextLMDataBunch.from_df(path, train, valid, bs=bs, bptt=5, tokenizer=TOKENIZER, min_freq=1)
    less = dict(alpha=0., beta=0., opt_func=SGD) if plain else {}
    lm = language_model_learner(data, AWD_LSTM, config=CONFIG, pretrained=False, drop_mult=0., path=path, **less)
    fit(lm, 2, .1 if plain else 1e-2)
    lm.save_encoder(name)
    seed()
    data = TextClasDataBunch.from_df(path, train, valid, vocab=data.vocab, bs=bs, tokenizer=TOKENIZER)
    config = dict(awd_lstm_clas_config, **sizes)
    learn = text_classifier_learner(data, AWD_LSTM, config=config, pretrained=False, drop_mult=0., path=path, **less)
    head = learn.model[1]
    if plain: head.layers = nn.Sequential(*(o for o in head.layers if not isinstance(o, (nn.BatchNorm1d, nn.Dropout))))
    learn.load_encoder(name)
    learn.unfreeze()
    fit(learn, 5, .3 if plain else 3e-2)
    return lm, learn


@pytest.mark.full
def test_the_encoder_of_a_language_model_classifies(tmp_path):
    "Reviews of one length, without batch norm and dropout: encoder and classifier of workers are those of one process"
    df = reviews(197, [8])
    (lm, two), (lm_one, one) = (lesson3(tmp_path, df, bs, n) for bs, n in ((4, 2), (8, 1)))
    same_weights(lm, lm_one)
    a, b = (torch.load(tmp_path/'models'/f'of {n}.pth') for n in (2, 1))
    for k in b: torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-5)
    same_weights(two, one)
    same_recorder(two, one)


def test_a_classifier_is_as_good_as_one_process(tmp_path):
    """As users train it, with reviews of many lengths: 2 of 37 may differ, since each worker pads and normalizes its
    own part. With a language model whose streams were cut wrongly, an older tool stayed at 49 %"""
    df = reviews(357, range(3, 25))
    (_, two), (_, one) = (lesson3(tmp_path, df, bs, n, False) for bs, n in ((16, 2), (32, 1)))
    good, alone = (float(l.recorder.metrics[-1][0]) for l in (two, one))
    assert good > .9 and alone > .9 and abs(good-alone) < 2.5/37
    preds, ys = two.distrib_get_preds(ordered=True, nprocs=2)
    here, ys_here = two.get_preds(ordered=True)
    torch.testing.assert_close(preds, here, rtol=0, atol=1e-5)
    assert torch.equal(ys, ys_here) and float(accuracy(preds, ys)) == pytest.approx(good, abs=1e-6)


def test_wgan(tmp_path):
    "Critic and generator both train, with their optimizers; the ranks stay one"
    data = (GANItemList.from_folder(pictures(tmp_path, 24), noise_sz=4).split_none().label_from_func(noop)
            .transform([[], []], size=16, tfm_y=True).databunch(bs=4, num_workers=0))
    seed()
    gen, crit = basic_generator(in_size=16, n_channels=3, noise_sz=4,
                                n_features=4), basic_critic(in_size=16, n_channels=3, n_features=4)
    learn = GANLearner.wgan(data, gen, crit, switch_eval=False, opt_func=partial(optim.Adam, betas=(0., .99)), wd=0.,
                            show_img=False)
    before = {k: v.clone() for k, v in learn.model.named_parameters()}
    learn.distrib_fit(4, 1e-3, nprocs=2)
    changed = {k.split('.')[0] for k, v in learn.model.named_parameters() if not torch.equal(v, before[k])}
    assert changed == {'generator', 'critic'} and all(torch.isfinite(p).all() for p in learn.model.parameters())
    assert learn.gan_trainer.glosses and learn.gan_trainer.closses and learn.model.gen_mode
    own = {id(p) for p in learn.model.parameters()}
    assert all(id(p) in own for o in (learn.gan_trainer.opt_gen, learn.gan_trainer.opt_critic)
               for g in o.opt.param_groups for p in g['params'])
    learn.fit(1, 1e-3)
