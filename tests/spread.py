"""Of a test with many combinations of parameters, those that `make test` takes: `@pytest.mark.spread`,
`@pytest.mark.few(n)`, and `long_but` where one says which."""
import collections
import pytest


def long_but(values, *short):
    "`values` as parameters: all but the `short` ones are for the long run"
    values = list(values)
    assert all(o in values for o in short)
    return [o if o in short else pytest.param(o, marks=pytest.mark.full) for o in values]


def values(item, together):
    "The parameters of `item`; those whose names stand `together` are one"
    params, names = item.callspec.params, [o.split() for o in together]
    names += [[k] for k in params if not any(k in o for o in names)]
    return [tuple((k, repr(params[k])) for k in o) for o in names]


def spread(items, *together):
    """Those of `items`, a test with all its parameters, in which each value of each parameter
    occurs, the rarest values first"""
    seen, chosen, vals = collections.Counter(), set(), {o: values(o, together) for o in items}
    def news(item): return sum(not seen[v] for v in vals[item])
    while any(map(news, items)):
        best = max(items, key=lambda o: (news(o), -sum(seen[v] for v in vals[o])))
        chosen.add(best)
        seen.update(vals[best])
    return chosen


def evenly(items, n):
    "`n` of the items, from the first one on at equal distances; all if there are no more"
    return items if len(items) <= n else [items[i*len(items)//n] for i in range(n)]


def left_out(items, name, choose):
    "Of the tests that have the marker, those which `choose(items of a test, *arguments of the marker)` doesn't return"
    tests = {}
    for o in items:
        if o.get_closest_marker(name): tests.setdefault((o.path, o.originalname), []).append(o)
    chosen = {o for test in tests.values() for o in choose(test, *test[0].get_closest_marker(name).args)}
    return [o for test in tests.values() for o in test if o not in chosen]


def all_but_a_spread(items):
    "Those of `items` that are marked so, and not chosen"
    left = left_out(items, 'spread', spread)
    shown = {*items} - {*left}
    shown = [o for o in items if o in shown and not o.get_closest_marker('full')]
    return left + left_out(shown, 'few', evenly)
