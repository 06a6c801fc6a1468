"""Precisions, memory formats, compiled models, and what is not a fit: that each works on ranks and comes back"""
import torch
from fastai.callback.channelslast import *
from fastai.callback.training import GradientClip
from fastddp.all import *
from . import machine
from .learners import learner


def compiled(learn):
    # what inductor makes for a CPU takes minutes, and isn't what runs on a GPU
    learn.model = torch.compile(learn.model, backend='eager' if machine.DRY or machine.SIMULATED else 'inductor')
    return learn


KINDS = {
    'to_fp16': lambda learn: learn.to_fp16(),
    'to_bf16': lambda learn: learn.to_bf16(),
    'to_fp16 with gradient clipping': lambda learn: learn.to_fp16().add_cb(GradientClip(.5)),
    'channels last': lambda learn: learn.to_channelslast(),
    'torch.compile': compiled,
}


def trains(learn, options):
    "Does a fit on ranks change the weights, leave them finite, and fill the recorder?"
    before = [p.detach().clone() for p in learn.model.parameters()]
    with learn.no_bar(), learn.no_logging(): learn.distrib_fit(1, 1e-2, **options)
    now = list(learn.model.parameters())
    return (any(not torch.equal(a, b) for a, b in zip(before, now)) and all(p.isfinite().all() for p in now)
            and len(learn.recorder.values) == 1)


def check(table):
    for where, options in {'one rank': machine.ranks(1), 'two ranks': machine.two()}.items():
        for name, change in KINDS.items(): table.add(f'{name}, {where}: trains', trains(change(learner()), options))
    words(table, machine.two())


def words(table, options):
    "`get_preds`, `validate`, `tta` and `lr_find` on two ranks against this process"
    learn = learner()
    with learn.no_bar(), learn.no_logging():
        preds, targs = learn.get_preds()
        there = learn.distrib_get_preds(**options)
        table.add('get_preds: those of this process, in order',
                  torch.allclose(preds.cpu(), there[0].cpu(), atol=1e-4) and torch.equal(targs.cpu(), there[1].cpu()))
        a, b = list(learn.validate()), list(learn.distrib_validate(**options))
        table.add('validate: that of this process', all(abs(x-y) < 1e-4 for x, y in zip(a, b)), f'{a} {b}')
        tta = learn.distrib_tta(n=2, **options)
        table.add('tta: as many predictions', len(tta[0]) == len(preds))
        before = [p.detach().clone() for p in learn.model.parameters()]
        found = learn.distrib_lr_find(show_plot=False, num_it=machine.size(60, 12), **options)
        table.add('lr_find: a suggestion, and the weights as before', found.valley > 0 and
                  all(torch.equal(p, q) for p, q in zip(before, learn.model.parameters())), found)
