"Every word of a learner in a script: as one process says it, or all ranks under torchrun."
import json, os, sys
from pathlib import Path
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import slide, valley
from fastai.callback.tracker import SaveModelCallback
from fastcore.foundation import L
from learners import make_learner, points, seed_all
from fastddp.all import *


def plain(o):
    "Nested tensors, tuples and lists as JSON can hold them"
    if isinstance(o, torch.Tensor): return o.tolist()
    return [plain(v) for v in o] if isinstance(o, (tuple, list, L)) else o


class InTheMidst(Callback):
    "Validates and predicts with a loader of its own, whose order each rank would draw by itself, and goes over one"
    def __init__(self): self.got = []
    def after_train(self):
        learn = self.learn
        own = learn.dls.train.new(shuffle=True, drop_last=False)
        targets = learn.get_preds(dl=own, inner=True)[1]
        self.got.append(plain([learn.validate(dl=own), targets.sort()[0], sum(y.sum() for _, y in learn.dls.valid)]))


def weights(learn): return plain(list(learn.model.state_dict().values()))


def in_the_midst(bs, context):
    learn, cb = make_learner(n=160, n_valid=41, bs=bs, lr=.1), InTheMidst()
    learn.remove_cb(ProgressCallback)
    seed_all(3+int(os.environ.get('RANK', 0)))      # rank 0's counts
    with context(learn): learn.fit(2, cbs=cb)
    return cb.got


def words(bs, folder, context):
    "What a fit, validation, predictions and `lr_find` give"
    learn, res = make_learner(n=160, n_valid=41, bs=bs, path=folder, lr=.3), {}
    learn.remove_cb(ProgressCallback)
    seed_all(3+int(os.environ.get('RANK', 0)))      # rank 0's counts
    with context(learn):
        learn.fit(3, cbs=SaveModelCallback(monitor='accuracy'))
        res['fit'], res['values'] = weights(learn), plain(learn.recorder.values)
        res['validate'] = plain(learn.validate())
        res['preds'] = plain(learn.get_preds(with_input=True, with_loss=True, with_decoded=True))
        res['small'] = plain(learn.get_preds(dl=learn.dls.valid.new(points(1, seed=7), bs=4)))
        res['lrs'] = [type(o).__name__
                      for o in learn.lr_find(show_plot=False, stop_div=False, suggest_funcs=(valley, slide))]
        before = weights(learn), plain(learn.validate())
        learn.lr_find(num_it=12, show_plot=False, suggest_funcs=valley)
        res['untouched'] = before == (weights(learn), plain(learn.validate()))
    res['midst'] = in_the_midst(bs, context)
    res['files'] = sorted(str(o.relative_to(folder)) for o in Path(folder).rglob('*') if o.is_file())
    res['own'] = sorted({'fit', '_do_epoch_validate', 'load', 'distrib_session'} & set(vars(learn)))
    return res


if __name__ == '__main__':
    out, rank = Path(sys.argv[1]), os.environ['RANK']
    res = words(16, out/'models of ranks', lambda learn: learn.distrib_ctx())
    (out/f'words{rank}.json').write_text(json.dumps(res))
