"""Every kind of `DataBunch` of fastai v1 trains on 2 workers; where nothing is random, as one process with twice the batch."""
import numpy as np, pandas as pd, pytest, torch
from learners_v1 import *
from fastai.vision import *
from fastai.tabular import *
from fastai.collab import *
from fastai.text import *
from fastai.text.data import pad_collate
from fastai.vision.gan import *
from fastai.vision.data import PointsLabelList


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


def small_net(c): return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), AdaptiveConcatPool2d(1), Flatten(), nn.Linear(8, c))


def test_images(tmp_path):
    path = pictures(tmp_path)
    def make(bs):
        seed()
        il = ImageList.from_folder(path).split_by_idx(list(range(0, 24, 5))).label_from_folder()
        data = il.transform([[], []], size=16).databunch(bs=bs, num_workers=0).normalize(imagenet_stats)
        return Learner(data, small_net(2), opt_func=partial(optim.SGD, momentum=.9), metrics=[accuracy, error_rate], path=path)
    two, one = pair(make, lambda l: l.fit_one_cycle(2, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    with two.distrib_ctx(nprocs=2): interp = ClassificationInterpretation.from_learner(two)
    assert interp.confusion_matrix().sum() == len(two.data.valid_ds) and len(interp.top_losses()[0]) == 5
    assert str(two.predict(two.data.valid_ds[0][0])[0]) in 'lr'


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
    assert len(learn.recorder.metrics) == 1 and len(learn.opt.lr if is_listy(learn.opt.lr) else [learn.opt.lr]) and len(learn.opt._lr) == 3


def test_segmentation_and_points(tmp_path):
    path = pictures(tmp_path/'i', 12)
    for f in path.glob('*/*.png'):
        mask = np.zeros((16, 16), np.uint8)
        mask[:, :8] = f.parent.name == 'l'
        (tmp_path/'m').mkdir(exist_ok=True)
        PIL.Image.fromarray(mask).save(tmp_path/'m'/f.name)
    masks = {f.name: tmp_path/'m'/f.name for f in path.glob('*/*.png')}
    seg = (SegmentationItemList.from_folder(path).split_by_idx([0, 5, 7]).label_from_func(lambda f: masks[f.name], classes=['a', 'b'])
           .transform([[], []], tfm_y=True, size=16).databunch(bs=2, num_workers=0))
    learn = Learner(seg, nn.Conv2d(3, 2, 3, padding=1), metrics=[dice], path=tmp_path)
    learn.distrib_fit(2, 1e-2, nprocs=2)
    assert len(learn.recorder.metrics) == 2 and learn.get_preds()[0].shape[1:] == (2, 16, 16)
    points = (PointsItemList.from_folder(path).split_by_idx([0, 5, 7]).label_from_func(lambda f: tensor([[3., 4.]]), label_cls=TensorPoints)
              .transform([[], []], tfm_y=True, size=16).databunch(bs=2, num_workers=0))
    learn = Learner(points, nn.Sequential(small_net(2), Reshape()), path=tmp_path, loss_func=MSELossFlat())
    learn.distrib_fit(2, 1e-2, nprocs=2)
    assert learn.recorder.val_losses[1] < learn.recorder.val_losses[0]


class TensorPoints(PointsLabelList):
    "As fastai's, which takes numpy's arrays for tensors"
    def get(self, i): return ImagePoints(FlowField((16, 16), tensor(np.array(self.items[i], dtype=np.float32))), scale=True)


class Reshape(nn.Module):
    def forward(self, x): return x.view(-1, 1, 2)


def test_tabular(tmp_path):
    rng = np.random.RandomState(0)
    df = pd.DataFrame(dict(c=rng.choice(list('abc'), 60), x=rng.randn(60), z=rng.randn(60)))
    df['y'] = (df.x > 0).astype(int)
    def make(bs):
        seed()
        data = (TabularList.from_df(df, cat_names=['c'], cont_names=['x', 'z'], procs=[Categorify, Normalize]).split_by_idx(list(range(13)))
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
    df = pd.DataFrame(dict(user=rng.randint(0, 8, 90), item=rng.randint(0, 9, 90), rating=rng.randint(1, 6, 90).astype(float)))
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


def lm_data(path, bs): return TextLMDataBunch.from_df(path, texts()[:45], texts()[45:], bs=bs, bptt=5, tokenizer=TOKENIZER, min_freq=1)


CONFIG = dict(awd_lstm_lm_config, emb_sz=8, n_hid=10, n_layers=2)


def test_language_model_is_streams_and_its_encoder_classifies(tmp_path):
    "Without dropout, N x b streams are those of one process; the classifier with the encoder matches one process's"
    def make(bs):
        seed()
        learn = language_model_learner(lm_data(tmp_path, bs), AWD_LSTM, config=CONFIG, pretrained=False, drop_mult=0., path=tmp_path, alpha=0., beta=0.)
        return learn
    two, one = pair(make, lambda l: l.fit_one_cycle(2, 1e-2))
    same_weights(two, one)
    same_recorder(two, one)
    np.testing.assert_array_equal(two.data.train_dl.dataset.idx.idx, one.data.train_dl.dataset.idx.idx)
    assert two.data.train_dl.dataset.bs == 4
    with two.distrib_ctx(nprocs=2): got = two.validate()
    np.testing.assert_allclose([float(o) for o in got], [float(o) for o in two.validate()], atol=1e-5)
    two.save_encoder('two')
    one.save_encoder('one')
    def classifier(bs, name):
        seed()
        data = TextClasDataBunch.from_df(tmp_path, texts()[:45], texts()[45:], vocab=two.data.vocab, bs=bs, tokenizer=TOKENIZER)
        config = {k: v for k, v in dict(awd_lstm_clas_config, emb_sz=8, n_hid=10, n_layers=2).items()}
        learn = text_classifier_learner(data, AWD_LSTM, config=config, pretrained=False, drop_mult=0., path=tmp_path)
        learn.load_encoder(name)
        learn.freeze()
        return learn
    a, b = classifier(4, 'two'), classifier(8, 'one')
    seed(5); a.distrib_fit(2, 1e-2, nprocs=2)
    seed(5); b.fit(2, 1e-2)
    assert abs(a.recorder.val_losses[-1]-b.recorder.val_losses[-1]) < .02 and abs(float(a.recorder.metrics[-1][0]-b.recorder.metrics[-1][0])) < .15
    with a.distrib_ctx(nprocs=2): preds, ys = a.get_preds(ordered=True)
    alone, ys_alone = a.get_preds(ordered=True)
    torch.testing.assert_close(preds, alone, rtol=0, atol=1e-5)
    assert torch.equal(ys, ys_alone)


def test_wgan(tmp_path):
    "Critic and generator both train, with their optimizers; the ranks stay one"
    data = (GANItemList.from_folder(pictures(tmp_path, 24), noise_sz=4).split_none().label_from_func(noop)
            .transform([[], []], size=16, tfm_y=True).databunch(bs=4, num_workers=0))
    seed()
    gen, crit = basic_generator(in_size=16, n_channels=3, noise_sz=4, n_features=4), basic_critic(in_size=16, n_channels=3, n_features=4)
    learn = GANLearner.wgan(data, gen, crit, switch_eval=False, opt_func=partial(optim.Adam, betas=(0., .99)), wd=0., show_img=False)
    before = {k: v.clone() for k, v in learn.model.named_parameters()}
    learn.distrib_fit(4, 1e-3, nprocs=2)
    changed = {k.split('.')[0] for k, v in learn.model.named_parameters() if not torch.equal(v, before[k])}
    assert changed == {'generator', 'critic'} and all(torch.isfinite(p).all() for p in learn.model.parameters())
    assert learn.gan_trainer.glosses and learn.gan_trainer.closses and learn.model.gen_mode
    own = {id(p) for p in learn.model.parameters()}
    assert all(id(p) in own for o in (learn.gan_trainer.opt_gen, learn.gan_trainer.opt_critic) for g in o.opt.param_groups for p in g['params'])
    learn.fit(1, 1e-3)
