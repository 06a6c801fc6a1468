"""Which tests run: those that a change touches; of combinations a spread; and the page of all."""
import runpy
from pathlib import Path
from types import SimpleNamespace
import pytest
from spread import evenly, spread

root = Path(__file__).resolve().parent.parent
changed, test_all = (runpy.run_path(str(root/'tools'/f'{o}.py')) for o in ('changed', 'test_all'))
touched = changed['touched']


def notebook(path): return f'tests/test_notebooks.py::test_notebook[{path}]'


@pytest.mark.parametrize('path', ['nbs/shard/312_gradients.ipynb', 'fastddp/shard/gradients.py'])
def test_a_module_is_its_notebook_and_has_its_tests(path):
    found = touched([path])
    assert notebook('nbs/shard/312_gradients.ipynb') in found and 'tests/test_floors.py' in found
    assert {'tests/same_answer/test_drift.py', 'tests/same_answer/test_parity.py'} <= {*found}
    assert 'tests/cluster/test_magics.py' not in found and len([o for o in found if '[' in o]) == 1


def test_a_helper_of_tests_stands_for_those_that_use_it():
    assert 'tests/machines/test_ray.py' in touched(['tests/two_hosts.py'])
    assert 'tests/test_scripts.py' in touched(['tests/script_fit.py'])
    assert 'tests/test_start.py' in touched(['tests/test_start.py'])


class Item:
    def __init__(self, **params): self.callspec = SimpleNamespace(params=params)


def params(items): return {tuple(o.callspec.params.values()) for o in items}


def test_few_are_taken_at_equal_distances():
    assert evenly('abcdef', 2) == ['a', 'd'] and evenly([*range(10)], 4) == [0, 2, 5, 7] and evenly('ab', 3) == 'ab'


def test_a_spread_has_each_value_and_no_more_than_it_takes():
    items = [Item(a=a, b=b, c=c) for a in range(4) for b in range(3) for c in range(2)]
    got = params(spread(items))
    assert [{*o} for o in zip(*got)] == [{0, 1, 2, 3}, {0, 1, 2}, {0, 1}] and len(got) == 4


REPORT = '''<testsuites><testsuite>
<testcase classname="tests.same_answer.test_parity" name="test_a[1]" time="1.5" />
<testcase classname="tests.test_b" name="test_b" time="2"><failure message="1 == 2"/></testcase>
<testcase classname="tests.test_b" name="test_c" time="0">
<skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="tests.test_b" name="test_d" time="1">
<skipped type="pytest.xfail" message="not yet" /></testcase>
</testsuite></testsuites>'''


def test_the_page_says_what_ran_and_what_came_out(tmp_path):
    (tmp_path/'report.xml').write_text(REPORT)
    tests = test_all['read_report'](tmp_path/'report.xml')
    text = test_all['page'](dict(full=(1, 90, tests), v1=(0, 30, [])), 'abc', '2 cores')
    assert 'Commit abc. 2 cores.' in text
    assert '| test-full | FAILED (1) | 1 | 1 | 1 | 1 | 1.5 |' in text
    assert '| test-v1 | passed | 0 |' in text
    assert '| same_answer.test_parity | 1 | 0 | 0 | 0 | 2 |' in text
    assert '- test_b: test_b: 1 == 2' in text and '- test_b: test_c: no GPU' in text


def test_a_part_that_fails_stops_no_other(monkeypatch, tmp_path, capsys):
    run = {'first': (2, 1, []), 'second': (0, 1, [])}
    ran = test_all['main'].__globals__
    monkeypatch.setitem(ran, 'run', run.__getitem__)
    monkeypatch.setitem(ran, 'BUILD', tmp_path)
    assert test_all['main']('first', 'second') and not test_all['main']('second')
    said = capsys.readouterr().out
    assert '| test-first | FAILED (2) |' in said and '| test-second | passed |' in said
