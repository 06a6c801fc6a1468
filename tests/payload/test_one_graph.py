"Random graphs, which another interpreter changes: here they are then as after the same changes in one process"
import collections, os, pathlib, subprocess, sys
import pytest
import graphs
from fastddp.payload.changes import apply, dump_changes
from fastddp.payload.notes import Notes
from fastddp.payload.pickling import dump, load
from fastddp.payload.places import Places

tests = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def other():
    "Another interpreter, with another hash seed"
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get('PYTHONPATH', '')])
    process = subprocess.Popen([sys.executable, tests/'graphs.py'], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env=dict(os.environ, PYTHONHASHSEED='7', PYTHONPATH=path))
    def ask(*request):
        graphs.write(process.stdin, request)
        return graphs.read(process.stdout)
    yield ask
    process.stdin.close()
    process.wait()


def difference(other, seed, n, m):
    "Two fits of two and one epochs; the notebook applies the end of each epoch, or of the fit alone"
    mine = graphs.build(seed, n)
    payload, places = dump(mine), Places(mine).walk()
    first = payload.meta, [*map(bytes, payload.buffers)], places.table()
    for fit in range(2):
        if fit:
            payload, places = dump(mine), Places(mine).walk()
            first = payload.meta, [*map(bytes, payload.buffers)], places.table()
        other('load', *first)
        epochs = 2-fit
        for epoch in range(epochs):
            meta, buffers = other('change', 100*seed+10*fit+epoch, m)
            if epoch == epochs-1 or seed % 2:
                applied = apply(meta, [*map(bytearray, buffers)], places)
                assert not applied.lost and not applied.failed, (applied.lost, applied.failed)
    one = graphs.build(seed, n)
    for fit in range(2):
        for epoch in range(2-fit): graphs.change(one, 100*seed+10*fit+epoch, m)
    return graphs.differs(mine, one)


@pytest.mark.parametrize('start', [0, *(pytest.param(i, marks=pytest.mark.full) for i in (200, 400))])
def test_random_graphs_are_changed_as_in_one_process(other, start):
    n_cases = 24 if not start else 150
    found = {seed: d for seed in range(start, start+n_cases) if (d := difference(other, seed, 1+seed % 12, 1+seed % 7))}
    assert not found


class Thing: pass


def epoch_by_epoch(root, *changes):
    "Apply the end of each epoch to `root`; an epoch is a function that changes the copy of `root` on the other side"
    places = Places(root).walk()
    there = load(*dump(root).copied())
    notes = Notes(Places(there).find(places.table()))
    for change in changes:
        change(there)
        payload = dump_changes(notes, grads='all')
        applied = apply(*payload.copied(), places)
        assert not applied.lost and not applied.failed


@pytest.mark.parametrize('container,put,take', [
    ([1], lambda o: o.append(2), lambda o: o.pop()),
    (collections.deque([1]), lambda o: o.append(2), lambda o: o.pop()),
    ({1}, lambda o: o.add(2), lambda o: o.remove(2)),
    ({'a': 1}, lambda o: o.update(b=2), lambda o: o.pop('b')),
    ({'a': 1}, lambda o: o.update({Thing: 2}), lambda o: o.pop(Thing)),
    ({'a': 1, 'b': 2}, lambda o: o.update(a=o.pop('a')), lambda o: o.update(b=o.pop('b'))),
    ({Thing: 1}, lambda o: o.update(b=2), lambda o: o.pop('b'))],
    ids=['list', 'deque', 'set', 'dict', 'an object as a key', 'order', 'an object among keys'])
def test_what_an_epoch_adds_and_the_next_takes_back(container, put, take):
    root = [container]
    before = [*container.items()] if isinstance(container, dict) else [*container]
    epoch_by_epoch(root, lambda there: put(there[0]), lambda there: take(there[0]))
    assert root[0] is container
    assert ([*container.items()] if isinstance(container, dict) else [*container]) == before
