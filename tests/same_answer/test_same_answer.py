"""docs/maintainers/same_answer.md names a test for each guarantee, and these tests exist."""
import ast, re
from pathlib import Path
import pytest

root = Path(__file__).resolve().parents[2]
CONTRACT = (root/'docs'/'maintainers'/'same_answer.md').read_text(encoding='utf-8')
NAMED = re.findall(r'`((?:\w+/)?test_\w+\.py)::(test_\w+)`', CONTRACT)


def functions_in(path):
    return {o.name for o in ast.walk(ast.parse(path.read_text(encoding='utf-8'))) if isinstance(o, ast.FunctionDef)}


def test_guarantees_are_named(): assert len(NAMED) > 25


@pytest.mark.parametrize('file,test', sorted(set(NAMED)))
def test_named_test_exists(file, test): assert test in functions_in(root/'tests'/file)


@pytest.mark.parametrize('file', ['same_answer/test_parity.py', 'same_answer/test_metrics.py',
                                  'same_answer/test_decisions.py'])
def test_every_such_test_is_named(file):
    own = {o for o in functions_in(root/'tests'/file) if o.startswith('test_')}
    assert own == {t for f, t in NAMED if f == file}
