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


# Files of which `make test` takes one test in so many: their tests start workers, or train for seconds, and hold
# siblings of one promise. All of them run in `make test-full`
ONE_IN = {
    2: '''payload/test_shapes comes_back/test_exactly comes_back/test_variables comes_back/test_warm launch/test_bench
    test_scripts''',
    3: '''same_answer/test_as_reported same_answer/test_on_device same_answer/test_door apps/test_any_model
    apps/test_tabular comes_back/test_settings comes_back/test_objects comes_back/test_around_a_fit faults/test_hangs
    launch/test_monitor test_interrupt test_start output/test_lines test_doctor''',
    4: '''launch/test_background faults/test_bad_minute faults/test_faults test_inference test_factories
    same_answer/test_check same_answer/test_decisions same_answer/test_drift same_answer/test_inside_a_fit
    same_answer/test_losses same_answer/test_metrics same_answer/test_parity same_answer/test_step
    comes_back/test_comes_back
    simulated_gpu/test_fits simulated_gpu/test_state simulated_gpu/test_findings simulated_gpu/test_around''',
    6: '''launch/test_caller launch/test_ranch apps/test_callbacks same_answer/test_lock_step
    same_answer/test_whole_fits comes_back/test_resume'''}


def all_but_one_in(items, ns):
    "Those of `items`, by file, that aren't the first of `n`; `ns` maps a file to its `n`"
    files = {}
    for o in items: files.setdefault('/'.join(o.path.with_suffix('').parts[-2:]).removeprefix('tests/'), []).append(o)
    return [o for k, of_file in files.items() for i, o in enumerate(of_file) if i % ns.get(k, 1)]


def all_but_a_spread(items):
    "Those of `items` that `make test` leaves out"
    def short(left): return [o for o in items if o not in left and not o.get_closest_marker('full')]
    left = {*left_out(items, 'spread', spread)}
    left |= {*left_out(short(left), 'few', evenly)}
    return left | {*all_but_one_in(short(left), {k: n for n, files in ONE_IN.items() for k in files.split()})}
