"""What is promised stands at the test that holds it, and on a page of the site."""
import sys
from pathlib import Path
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]/'tools'))
import contract

sys.path.pop(0)


@pytest.mark.parametrize('section', contract.SECTIONS)
def test_promises_are_on_the_page(section):
    own = [(said, test) for where, said, _, test in contract.held() if where == section]
    assert len(own) > 10
    page = contract.render().partition(f'## {section}')[2].partition('## ')[0]
    assert page.count('\n| ') == len(own)+1 and all(o in page for row in own for o in row)


def test_each_marker_has_a_section(): assert {o[0] for o in contract.held()} == {*contract.SECTIONS}
