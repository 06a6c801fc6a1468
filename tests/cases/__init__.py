"""The table of cases of "N workers are one process": learners as people write them, and what holds of each.
same_answer/test_cases.py trains each on workers and in one process, and compares.

A case is a function that makes the arguments of `parity.learner`, or a whole learner. It is called for each of the
two learners: a closure isn't copied with its learner."""
from dataclasses import dataclass, field
from typing import Callable
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from parity import learner, seed

CASES = {}      # name -> `Case`
BATCHES = 'per_worker', 'global'


def holds(section, promise): "What the cases below hold of `same answer`; tools/contract.py renders it"


def two_epochs(learn, call): call('fit', 2)


@dataclass
class Case:
    make: Callable
    loss: str = 'weighted'      # how it is computed: `weighted`, `whole` or `averaged`, or None for several of these
    tol: float = 1e-5           # of weights and optimizer state; `.inf`: they aren't compared
    run: Callable = two_epochs  # of the learner and what calls its methods, on workers or in one process
    check: Callable = None      # more of the two learners
    says: tuple = ()            # what is said once
    options: dict = field(default_factory=dict)
    batch: tuple = BATCHES
    ranks: tuple = (2, 3)
    scaled: bool = False        # `make(scale)` sets the size of batches itself

    def learner(self, scale=1, batch='per_worker', **more):
        "The learner, of which each batch has `scale` batches of the loader"
        seed()
        if self.scaled: return self.make(scale)
        made = self.make()
        if not isinstance(made, Learner):
            made = from_arguments(**dict(bs=8 if batch == 'global' else 4) | made | more)
        if scale > 1: made.dls.train.bs *= scale
        return made


def from_arguments(collate=None, n_inp=None, **kwargs):
    "A learner by arguments of `parity.learner`, with lists for targets (`collate`) or several inputs"
    learn = learner(**kwargs)
    if collate:
        dls = [DataLoader(dl.dataset, bs=dl.bs, shuffle=i == 0, num_workers=0, create_batch=collate)
               for i, dl in enumerate(learn.dls.loaders)]
        learn.dls = DataLoaders(*dls)
    if n_inp: learn.dls.n_inp = n_inp
    return learn


def case(f=None, **how):
    "Puts the function into the table, under its name"
    if f is None: return lambda f: case(f, **how)
    add(f.__name__, f, **how)
    return f


def add(name, make, **how):
    "Puts what `make` makes into the table"
    assert name not in CASES, name
    CASES[name] = Case(make, **how)
