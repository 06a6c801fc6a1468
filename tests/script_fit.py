"A training script, for torchrun and for plain python: the same code as in a notebook."
import gc, json, os, sys, warnings
gc.disable()    # what it imports takes less time so
import psutil, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from learners import Anneals, make_learner, seed_all
from fastddp.all import *
gc.enable()

listening = set()


class Listens(Callback):
    "The addresses at which this rank listens in a fit"
    def after_epoch(self):
        here = psutil.Process().net_connections('inet')
        listening.update(o.laddr.ip for o in here if o.status == psutil.CONN_LISTEN)


class OnRank0(Callback):
    "As one that logs"
    rank0_only = True
    events = []
    def before_fit(self): self.events.append('before_fit')
    def after_validate(self): self.events.append('after_validate')
    def after_fit(self): self.events.append('after_fit')


options = dict(sync_bn=False)     # as written for `fastai.distributed`
learn = make_learner(bs=16, cbs=[Listens()])
seed_all(int(os.environ.get('RANK', 0)))    # ranks start with different random numbers
with learn.distrib_ctx(**options): learn.fit(2, 0.01)
rank = os.environ.get('RANK', '0')
res = dict(weights=[p.flatten().tolist() for p in learn.model.parameters()],
           values=[list(v) for v in learn.recorder.values],
           losses=[float(o) for o in learn.recorder.losses], fit='fit' in vars(learn),
           world=os.environ.get('WORLD_SIZE'), listening=[*listening])
res['reports'] = [learn.distrib_report.to_dict()]
learn.distrib_fit(1, 0.01)      # the group was left, and is joined once more
res['again'] = [float(o) for o in learn.recorder.losses]
learn.distrib_get_preds()
res['reports'].append(learn.distrib_report.to_dict())
# each rank has made weights of its own
learn = make_learner(bs=16, seed=int(rank), cbs=[GradientAccumulation(64), OnRank0()])
seed_all(int(rank))
with learn.distrib_ctx(**options), learn.no_bar(), learn.no_logging():
    res['validated'] = list(learn.validate())
    res['of_rank0'] = [*OnRank0.events]
    learn.fit(1, 0.01)
res['variables'] = [o for o in os.environ if 'IFNAME' in o]
res['accumulated'] = [p.flatten().tolist() for p in learn.model.parameters()]
learn = make_learner(bs=16, loss_func=Anneals())
with learn.distrib_ctx(**options), learn.no_bar(), learn.no_logging(): learn.fit(2, 0.01)
res['annealed'] = [p.flatten().tolist() for p in learn.model.parameters()], learn.loss_func.kept[0]['n']
# and here data, and what a model holds beside its weights
learn.dls.train.dataset[:] = learn.dls.train.dataset[int(rank):]
learn.model[0].frequencies = [torch.tensor([1., float(rank)])]
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter('always')
    learn.distrib_validate()
res['said'] = [str(o.message) for o in found if str(o.message).startswith('fastddp')]
json.dump(res, open(f'{sys.argv[1]}/rank{rank}.json', 'w'))
