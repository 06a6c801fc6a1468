"""A fit of fastai v1 on 2 workers is one process with twice the batch, and everything comes back."""
import random
import numpy as np, pytest, torch
from learners_v1 import *
from fastai.metrics import FBeta


def test_one_cycle(tmp_path):
    "Weights, optimizer, recorder, metrics, random streams and identities"
    parts = {}
    def run(learn):
        parts[id(learn)] = dict(model=learn.model, params=list(learn.model.parameters()), data=learn.data)
        learn.fit_one_cycle(2, 1e-2)
        parts[id(learn)]['rng'] = torch.rand(1).item(), np.random.rand(), random.random()
    two, one = pair(plain, run, metrics=[accuracy, FBeta(average='macro'), squared], path=tmp_path)
    same_weights(two, one)
    same_recorder(two, one)
    assert len(two.recorder.val_losses) == 2 and len(two.recorder.metrics[0]) == 3
    assert parts[id(two)]['rng'] == parts[id(one)]['rng']
    had = parts[id(two)]
    assert two.model is had['model'] and all(p is q for p, q in zip(two.model.parameters(), had['params']))
    assert two.data is had['data'] and two.data.train_dl.batch_size == 4
    assert not {'fit', 'validate', 'get_preds'} & set(vars(two))
    for p, q in zip(two.model.parameters(), one.model.parameters()):
        a, b = two.opt.opt.state[p], one.opt.opt.state[q]
        for k in b: torch.testing.assert_close(torch.as_tensor(a[k]), torch.as_tensor(b[k]), rtol=1e-4, atol=1e-6)
    assert (two.opt.lr, two.opt.mom, two.opt.wd, two.opt.beta) == (one.opt.lr, one.opt.mom, one.opt.wd, one.opt.beta)
    assert two.recorder.plot_lr(show_moms=True, return_fig=True)
    for plot in 'plot', 'plot_losses', 'plot_lr', 'plot_metrics':
        assert getattr(two.recorder,
                       plot)(**(dict(skip_start=0, skip_end=0, return_fig=True) if plot != 'plot_metrics'
                                else dict(return_fig=True)))
    before = [p.clone() for p in two.model.parameters()]
    two.fit(1, 1e-3)       # and goes on in the notebook
    assert len(two.recorder.val_losses) == 1
    assert not any(torch.equal(p, q) for p, q in zip(before, two.model.parameters()))


def test_a_method_that_is_replaced_in_one_learner_is_called():
    learn, calls = plain(4), []
    fit = learn.fit
    def own(*args, **kwargs):
        calls.append(args)
        return fit(*args, **kwargs)
    learn.fit = own
    with learn.distrib_ctx(nprocs=2): learn.fit(1, 1e-2)
    assert calls == [(1, 1e-2)] and len(learn.recorder.val_losses) == 1 and learn.fit is own


def test_running_means_are_those_of_the_global_batch():
    def make(bs):
        learn = plain(bs=bs, n=48)
        learn.model = nn.Sequential(nn.BatchNorm1d(3), *learn.model)
        return learn
    two, one = pair(make, lambda learn: learn.fit(1))
    torch.testing.assert_close(two.model[0].running_mean, one.model[0].running_mean)


def test_methods(tmp_path):
    "`validate`, `get_preds`, `lr_find`, a callback's refusal of other options; sizes that don't divide"
    two, one = plain(4, path=tmp_path/'a'), plain(8, path=tmp_path/'b')
    with two.distrib_ctx(nprocs=2):
        got = two.validate()
        preds = two.get_preds(with_loss=True)
        fix = two.get_preds(ds_type=DatasetType.Fix, n_batch=3)
        before = [p.clone() for p in two.model.parameters()]
        two.lr_find(num_it=20)
        assert two.recorder.plot(suggestion=True, return_fig=True) and two.recorder.min_grad_lr in two.recorder.lrs
        lrs = two.recorder.lrs      # in v1, `get_preds` makes a new recorder
        with pytest.raises(Exception, match="batch can't change"): two.distrib_fit(1, batch='global')
    np.testing.assert_allclose([float(o) for o in got], [float(o) for o in one.validate()], atol=1e-6)
    for a, b in zip(preds, one.get_preds(with_loss=True)): torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    alone = two.get_preds(ds_type=DatasetType.Fix, n_batch=3)
    for a, b in zip(fix, alone): torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(before, two.model.parameters()))
    assert 10 <= len(lrs) <= 20 and lrs[0] < lrs[-1]
    assert [o.name for o in (tmp_path/'a'/'models').iterdir()] == ['tmp.pth']


class Every2nd(torch.utils.data.DataLoader):
    "A loader with its own `__iter__`, which can't be sharded"
    def __iter__(self):
        for i, b in enumerate(super().__iter__()):
            if i%2 == 0: yield b


def test_validates_what_cannot_be_sharded():
    "Each worker goes over the whole loader"
    learn = plain(4)
    odd = Every2nd(Numbers(30, 2), batch_size=4)
    unbatched = torch.utils.data.DataLoader(Numbers(5, 2), batch_size=None,
                                            collate_fn=lambda b: (b[0][None], b[1][None]))
    alone = [learn.validate(dl) for dl in (odd, unbatched)]
    with learn.distrib_ctx(nprocs=2): got = [learn.validate(dl) for dl in (odd, unbatched)]
    np.testing.assert_allclose([[float(o) for o in r] for r in got], [[float(o) for o in r] for r in alone], atol=1e-6)


def test_global_batch_is_plain_fit():
    two, one = plain(8), plain(8)
    seed(5)
    two.distrib_fit(1, 1e-2, nprocs=2, batch='global')
    seed(5)
    one.fit(1, 1e-2)
    same_weights(two, one)
    same_recorder(two, one)


def test_a_batch_sampler_in_one_rank():
    "It decides about the batches, whichever size `batch` says"
    from fastddp.launch.engine import InProcess
    def make():
        learn = plain(4)
        batches = torch.utils.data.BatchSampler(range(50), 8, False)
        learn.data.train_dl = learn.data.train_dl.new(batch_size=1, shuffle=False, drop_last=False,
                                                      batch_sampler=batches)
        return learn
    ours, local = make(), make()
    ours.distrib_fit(1, 1e-2, launcher=InProcess())
    local.fit(1, 1e-2)
    same_weights(ours, local)
    same_recorder(ours, local)


def test_first_and_last_line(capsys):
    learn = plain(4)
    learn.distrib_fit(2, nprocs=2)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith(f', {len(learn.recorder.losses)//2} steps per epoch') and last.startswith('2 epochs in ')
    learn.silent = True
    learn.distrib_fit(1, nprocs=2)
    assert 'worker' not in (said := capsys.readouterr().out) and 'items/s' not in said
