"""The contract of "same answer", a page of the site: what the tests hold, in the words of their `holds` markers."""
import ast, functools
from pathlib import Path

root = Path(__file__).resolve().parent.parent
SECTIONS = 'Batches', 'Weights', 'Losses', 'Decisions', 'Limits'
HEAD = '''# The contract of "same answer"

[Same answer on N GPUs](../same_answer.md) tells users what is the same and what differs. This page has each promise \
with the test that holds it, on real processes (CPU, gloo, 2 to 4 ranks). A promise is changed or taken back in its \
test first, and then in the code.
'''


@functools.cache
def held():
    "`[(section, what is held, file below tests, name of the test)]`"
    res = []
    for path in sorted((root/'tests').glob('**/test_*.py')) + sorted((root/'tests/cases').glob('*.py')):
        text = path.read_text(encoding='utf-8')
        for o in ast.parse(text).body if 'holds(' in text else ():
            calls = [*getattr(o, 'decorator_list', ()), *([o.value] if isinstance(o, ast.Expr) else [])]
            found = [c for c in calls if ast.unparse(c).startswith(('pytest.mark.holds(', 'holds('))]
            where = path.relative_to(root/'tests').as_posix()
            res += [(*map(ast.literal_eval, c.args), where, getattr(o, 'name', 'the table of cases')) for c in found]
    return res


def render():
    rows = held()
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f'\n## {section}\n\n| | test |\n|---|---|\n')
        own = [o[1:] for o in rows if o[0] == section]
        parts += [f'| {said} | [{test}](../../tests/{file}) |\n' for said, file, test in own]
    return ''.join(parts)
