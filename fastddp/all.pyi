"Made by `make stubs`: the methods of a learner, for editors. At run time `Learner` is fastai's own."

from typing import ContextManager
from fastai.learner import Learner as _Learner
from fastddp.fastai2.check import Answer
from fastddp.base.errors import CantDistribute as CantDistribute
from fastddp.base.errors import GroupTimeout as GroupTimeout
from fastddp.base.errors import NotPicklable as NotPicklable
from fastddp.base.errors import RankDied as RankDied
from fastddp.base.errors import RankRaised as RankRaised
from fastddp.base.errors import WorkerError as WorkerError
from fastddp.launch.engine import InProcess as InProcess
from fastddp.launch.local import Local as Local
from fastddp.launch.functions import TorchDDPCtx as TorchDDPCtx
from fastddp.doctor import doctor as doctor
from fastddp.launch.functions import global_imports as global_imports
from fastddp.launch.functions import import_star as import_star
from fastddp.launch.functions import in_torchddp as in_torchddp
from fastddp.launch.functions import ranch as ranch
from fastddp.launch.functions import spawn as spawn
from fastddp.machines.ray import Hosts as Hosts
from fastddp.machines.ray import Ray as Ray

__all__ = ['CantDistribute', 'GroupTimeout', 'NotPicklable', 'RankDied', 'RankRaised', 'WorkerError', 'InProcess', 'Local', 'TorchDDPCtx', 'Learner', 'doctor', 'global_imports', 'import_star', 'in_torchddp', 'ranch', 'spawn', 'Hosts', 'Ray']

class Learner(_Learner):
    def distrib(self, name: str, *args, **kwargs):
        """Call `learn.name(*args, **kwargs)` on workers, and return what it returns. Raises as
        `distrib_fit`"""

    def distrib_bench(self, nprocs = None, bs = None, num_workers = None, steps: int = 20, seconds: float = 5.0):
        """Train some steps with one worker, and with each choice. Returns a `Bench`: items per second
        (in all, and without waiting for data), how many times one worker's that is, and seconds per
        epoch. Learner and random streams are unchanged."""

    def distrib_check(self, steps: int = 5, tol: float = 1e-05, **options) -> Answer:
        """Compare `steps` training steps on N workers with one process over the same global batches,
        without what is expected to differ: dropout, augmentation, on the CPU batch norm. Where a GPU
        hasn't room for all workers' batches, both take smaller ones."""

    def distrib_ctx(self, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None, **ddp_kwargs) -> ContextManager[Learner]:
        """Run all training and inference of this learner inside the block on workers, which stay from
        call to call. Yields the learner.

        Raises
            CantDistribute: nothing was started or changed; the message says why and what to do
        and inside what `distrib_fit` raises. After a failure the learner is as after that of
        `distrib_fit`."""

    def distrib_fine_tune(self, epochs, base_lr = 0.002, freeze_epochs = 1, lr_mult = 100, pct_start = 0.3, div = 5.0, *, lr_max = None, div_final = 100000.0, wd = None, moms = None, cbs = None, reset_opt = False, start_epoch = 0, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None):
        """Run `fine_tune` on workers, one per GPU. Fine tune with `Learner.freeze` for `freeze_epochs`, then with `Learner.unfreeze` for `epochs`, using discriminative LR."""

    def distrib_fit(self, n_epoch, lr = None, wd = None, cbs = None, reset_opt = False, start_epoch = 0, *, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None):
        """Run `fit` on workers, one per GPU. Fit `self.model` for `n_epoch` using `cbs`. Optionally `reset_opt`."""

    def distrib_fit_flat_cos(self, n_epoch, lr = None, div_final = 100000.0, pct_start = 0.75, wd = None, cbs = None, reset_opt = False, start_epoch = 0, *, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None):
        """Run `fit_flat_cos` on workers, one per GPU. Fit `self.model` for `n_epoch` at flat `lr` before a cosine annealing."""

    def distrib_fit_one_cycle(self, n_epoch, lr_max = None, div = 25.0, div_final = 100000.0, pct_start = 0.25, wd = None, moms = None, cbs = None, reset_opt = False, start_epoch = 0, *, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None):
        """Run `fit_one_cycle` on workers, one per GPU. Fit `self.model` for `n_epoch` using the 1cycle policy."""

    def distrib_fit_sgdr(self, n_cycles, cycle_len, lr_max = None, cycle_mult = 2, cbs = None, reset_opt = False, wd = None, start_epoch = 0, *, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None):
        """Run `fit_sgdr` on workers, one per GPU. Fit `self.model` for `n_cycles` of `cycle_len` using SGDR."""

    def distrib_get_preds(self, ds_idx: int = 1, dl = None, with_input: bool = False, with_decoded: bool = False, with_loss: bool = False, act = None, inner: bool = False, reorder: bool = True, cbs = None, *, save_preds = None, save_targs = None, with_preds: bool = True, with_targs: bool = True, concat_dim: int = 0, pickle_protocol: int = 2, nprocs: int | None = None, gpus: list | None = None, model_factory = None, dls_factory = None, launcher = None, see = (0,), timeout: float = 1800, wait: bool = True):
        """Run `get_preds` on workers, one per GPU. Get the predictions and targets on the `ds_idx`-th dbunchset or `dl`, optionally `with_input` and `with_loss`"""

    def distrib_load(self, file = 'distrib'):
        """Put the weights of a checkpoint into the model, and nothing else. No code of the file runs.
        Returns the learner, as `learn.load`. Raises `CantDistribute` for another model's file."""

    def distrib_lr_find(self, start_lr = 1e-07, end_lr = 10, num_it = 100, stop_div = True, show_plot = True, suggest_funcs = ..., *, nprocs: int | None = None, gpus: list | None = None, batch: str = 'per_worker', sync_bn: bool = True, loss: str = 'auto', model_factory = None, dls_factory = None, launcher = None, see = (0,), restarts: int = 0, timeout: float = 1800, wait: bool = True, checkpoint: str | None = None):
        """Run `lr_find` on workers, one per GPU. Launch a mock training to find a good learning rate and return suggestions based on `suggest_funcs` as a named tuple"""

    @property
    def distrib_report(self):
        """The `Report` of the last block, or of the last call outside of one: where the time went. It
is that of the longest call; `calls` has all of them, in order"""

    def distrib_resume(self, file = None, wait = True, **kwargs):
        """Continue a fit on workers that was interrupted or failed: same call, same schedule, next
        epoch."""

    def distrib_stop(self):
        """Stop the call of this learner that runs on workers, as the stop button does: after the batch
        at hand, which is kept. For another thread, such as that of a page's button. Returns True, or
        False if no call runs."""

    def distrib_tta(self, ds_idx = 1, dl = None, n = 4, item_tfms = None, batch_tfms = None, beta = 0.25, use_max = False, *, nprocs: int | None = None, gpus: list | None = None, model_factory = None, dls_factory = None, launcher = None, see = (0,), timeout: float = 1800, wait: bool = True):
        """Run `tta` on workers, one per GPU. Return predictions on the `ds_idx` dataset or `dl` using Test Time Augmentation"""

    def distrib_validate(self, ds_idx = 1, dl = None, cbs = None, *, nprocs: int | None = None, gpus: list | None = None, model_factory = None, dls_factory = None, launcher = None, see = (0,), timeout: float = 1800, wait: bool = True):
        """Run `validate` on workers, one per GPU. Validate on `dl` with potential new `cbs`."""
