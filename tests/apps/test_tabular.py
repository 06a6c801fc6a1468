"Tables and recommendations: categories and numbers, classes and values, dot product and neural net."
import numpy as np, pandas as pd, pytest, torch
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.tabular.all import (Categorify, CategoryBlock, FillMissing, IndexSplitter, MSELossFlat, Normalize,
                                RegressionBlock, SGD,
                                TabularPandas, accuracy, rmse, tabular_learner)
from sklearn.datasets import load_diabetes
import fastddp.all
from applications import as_one, check, same_preds
from learners import seed_all


def table(n=150):
    d = load_diabetes(as_frame=True, scaled=False).frame.iloc[:n].copy()
    d['sex'] = d.sex.map({1.: 'a', 2.: 'b'})
    d['age group'] = pd.cut(d.age, [0, 30, 50, 100], labels=['young', 'middle', 'old']).astype(str)
    d['ill'] = (d.target > d.target.median()).map({True: 'yes', False: 'no'})
    d.loc[d.index[:5], 'bmi'] = np.nan
    d['target'] = (d.target/100).astype('float32')
    return d


def learner(regression, **kwargs):
    seed_all()
    df = table()
    y = dict(y_names='ill', y_block=CategoryBlock())
    if regression: y = dict(y_names='target', y_block=RegressionBlock())
    to = TabularPandas(df, [Categorify, FillMissing, Normalize], ['sex', 'age group'], ['age', 'bmi', 'bp', 's1', 's5'],
                       splits=IndexSplitter(list(range(110, 150)))(df), **y)
    loss = dict(loss_func=MSELossFlat(), metrics=rmse) if regression else dict(metrics=accuracy)
    return tabular_learner(to.dataloaders(bs=16, device='cpu'), layers=[20, 10], **loss, **kwargs)


@pytest.mark.parametrize('regression', [True, False])
def test_table(regression):
    learn = check(learner(regression))
    same_preds(learn, with_decoded=True)
    if not regression: assert learn.predict(table().iloc[3])[2].sum() == pytest.approx(1)


@pytest.mark.spread
@pytest.mark.parametrize('bn', [True, False])
@pytest.mark.parametrize('regression', [True, False])
def test_table_as_one_process(regression, bn):
    as_one(lambda: learner(regression, config=dict(use_bn=bn, bn_cont=bn), opt_func=SGD))


def ratings(n=400):
    r = np.random.RandomState(0)
    u, i = r.randint(0, 20, n), r.randint(0, 30, n)
    return pd.DataFrame(dict(user=u, item=i, rating=(1+(u*7+i*3) % 5).astype('float32')))


def collab(**kwargs):
    seed_all()
    dls = CollabDataLoaders.from_df(ratings(), bs=32, seed=1, device='cpu')
    return collab_learner(dls, y_range=(0.5, 5.5), opt_func=SGD, **kwargs)


def test_dot_product():
    learn = as_one(lambda: collab(n_factors=8))
    same_preds(learn)
    assert learn.model.bias([0, 3]).shape == (2,)


def test_neural_net(): as_one(lambda: collab(use_nn=True, layers=[16]))
