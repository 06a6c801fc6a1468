"Every word of a fastai v1 learner in a script: as one process says it, or all ranks under torchrun."
import json, os, sys
from pathlib import Path
from learners_v1 import *
from fastai.callbacks import SaveModelCallback
from test_v1_apps import AWD_LSTM, CONFIG, language_model_learner, lm_data
import fastddp.base.group
from fastddp.fastai1.loaders import old_numpy

old_numpy()


def numbers(o):
    "Nested tensors, tuples and lists as JSON can hold them"
    if isinstance(o, torch.Tensor): return o.tolist()
    return [numbers(v) for v in o] if isinstance(o, (tuple, list)) else float(o)


def weights(learn): return numbers(list(learn.model.state_dict().values()))


def words(bs, path):
    "What fits, validation, predictions and `lr_find` give"
    # a metric that was made under torchrun would average over ranks by itself, in each batch
    res, learn = {}, plain(bs, path=path, metrics=[AverageMetric(accuracy)],
                           callback_fns=partial(SaveModelCallback, monitor='accuracy'))
    seed(int(os.environ.get('RANK', 0)))
    learn.distrib_fit_one_cycle(2, 1e-2)
    learn.save('stage-1')
    learn.distrib_fit(1, 1e-3)
    res['fit'] = weights(learn)
    res['losses'], res['metrics'] = numbers(learn.recorder.losses), numbers(learn.recorder.metrics)
    learn.load('stage-1')       # between two fits, when no group stands
    learn.callback_fns = learn.callback_fns[:1]
    with learn.distrib_ctx():
        res['validate'] = numbers(learn.validate())
        res['preds'] = numbers(learn.get_preds(with_loss=True))
    learn.distrib_lr_find(num_it=12)
    res['loaded'] = weights(learn)
    data = lm_data(path, bs)
    data.valid_dl = lm_data(path, 4).valid_dl       # a validation keeps the batch
    seed()
    learn = language_model_learner(data, AWD_LSTM, config=CONFIG, pretrained=False, drop_mult=0., path=path, alpha=0.,
                                   beta=0.)
    learn.distrib_fit(1, 1e-2)
    res['text'], res['text losses'] = weights(learn), numbers(learn.recorder.losses+learn.recorder.val_losses)
    res['text validated'] = numbers(learn.distrib_validate())
    learn.save_encoder('encoder')
    learn.load_encoder('encoder')
    return res | dict(files=sorted(o.name for o in (path/'models').iterdir()))


if __name__ == '__main__':
    out = Path(sys.argv[1])
    res = words(4, out/'of ranks')
    (out/f"words{os.environ['RANK']}.json").write_text(json.dumps(res | dict(
        variables=[o for o in os.environ if 'IFNAME' in o], stands=fastddp.base.group.in_group())))
