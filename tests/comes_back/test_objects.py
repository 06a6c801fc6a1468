"""Objects that callbacks, metrics, models and cells hold, at any depth: after a fit they are the notebook's own, with what the fit has written."""
import dataclasses, sys
import pytest, torch
from fastai.callback.core import Callback
from torch import nn
from fastddp.all import *
from parity import learner, mlp, warm

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope='module')
def two():
    with warm(2) as launcher: yield launcher


@pytest.fixture
def main():
    "The namespace of a notebook, as it was at the end"
    main = vars(sys.modules['__main__'])
    before = dict(main)
    yield main
    for k in main.keys()-before.keys(): del main[k]
    main.update(before)


SLOTS = '''
import dataclasses
class Slots:
    __slots__ = 'd', 'n', '__hidden'
    def __init__(self): self.d, self.n, self.__hidden = {}, 0, 5
class More(Slots):
    __slots__ = 'more',
@dataclasses.dataclass(slots=True)
class Data:
    d: dict = dataclasses.field(default_factory=dict)
    n: int = 0
'''


class Notes(Callback):
    "Changes an object in each epoch, and makes new ones"
    def __init__(self, o): self.o, self.new = o, []
    def after_epoch(self):
        self.o.n += 1
        self.o.d[self.epoch] = 1
        self.new.append(type(self.o)())


@pytest.mark.parametrize('name', ['Slots', 'More', 'Data'])
def test_objects_with_slots(main, two, name):
    exec(SLOTS, main)
    o = main[name]()
    learn = learner(cbs=Notes(o))
    learn.distrib_fit(2, nprocs=2, launcher=two)
    assert learn.notes.o is o and (o.n, o.d) == (2, {0: 1, 1: 1}) and not hasattr(o, '__dict__')
    assert [type(v) for v in learn.notes.new] == [main[name]]*2 and len(learn.recorder.values) == 2


def count(o):
    o.n += 1
    return o


@pytest.mark.parametrize('name', ['Slots', 'Data'])
def test_functions_return_objects_with_slots(main, name):
    exec(SLOTS, main)
    assert [(type(o), o.n) for o in ranch(2, count, main[name]())] == [(main[name], 1)]*2
