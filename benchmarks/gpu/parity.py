"""Weights of N ranks against those of one process with the same global batches"""
import torch
from fastai.optimizer import OptimWrapper
from functools import partial
from torch import nn
from fastddp.all import *
from . import machine
from .learners import convnet, learner


def plain_norm(c): return nn.GroupNorm(1, c)        # batch norm on the CPU is averaged: see docs/same_answer.md
def sgd(): return partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9))


def pair(n, batch, dtype=torch.float32, bf16=False, norm=plain_norm, **options):
    "Weights and losses after the same fit, in one process with the global batch, and on the ranks"
    found = []
    for here in (True, False):
        learn = learner(model=partial(convnet, norm, 16), n=machine.size(1000, 60), bs=batch, opt_func=sgd())
        learn.model.to(dtype)
        if bf16: learn.to_bf16()
        with learn.no_bar(), learn.no_logging():
            torch.manual_seed(1)
            learn.dls.train.rng.seed(1)
            if here: learn.fit(2, 1e-2)
            else: learn.distrib_fit(2, 1e-2, batch='global', **options)
        found.append(([p.detach().float().cpu() for p in learn.model.parameters()],
                      [float(v) for row in learn.recorder.values for v in row[:2]]))
    return found


def apart(found):
    "The largest difference between weights, and that between losses"
    (wa, la), (wb, lb) = found
    return max((a-b).abs().max().item() for a, b in zip(wa, wb)), max(abs(a-b) for a, b in zip(la, lb))


def check(table):
    matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bs = machine.size(128, 12)
    try:
        kinds = {'2 gloo ranks on one GPU': machine.ranks(2, shared=True)}
        if machine.n_gpus() > 1: kinds[f'{machine.n_gpus()} ranks'] = machine.ranks(machine.n_gpus())
        for name, options in kinds.items():
            weights, losses = apart(pair(2, bs, **options))
            table.add(f'{name}, float32 without TF32: weights of one process to 1e-5', weights < 1e-5,
                      f'weights {weights:.1e}, losses {losses:.1e} apart')
            sync_bn = pair(2, bs, norm=nn.BatchNorm2d, **options)
            weights, losses = apart(sync_bn)
            table.add(f'{name}, batch norm synchronised: weights of one process to 1e-4',
                      None if machine.DRY or 'gloo' in name else weights < 1e-4,
                      f'weights {weights:.1e}, losses {losses:.1e} apart')
            weights, losses = apart(pair(2, bs, bf16=True, **options))
            table.add(f'{name}, bf16: losses of one process within 2 %', losses < .02*2.3,
                      f'weights {weights:.1e}, losses {losses:.1e} apart')
    finally: torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv
