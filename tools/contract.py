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
    for path in sorted((root/'tests').glob('**/test_*.py')):
        text = path.read_text(encoding='utf-8')
        for f in ast.parse(text).body if '.holds(' in text else ():
            marks = [o for o in getattr(f, 'decorator_list', ()) if ast.unparse(o).startswith('pytest.mark.holds(')]
            where = path.relative_to(root/'tests').as_posix()
            res += [(*map(ast.literal_eval, o.args), where, f.name) for o in marks]
    return res


def render():
    rows = held()
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f'\n## {section}\n\n| | test |\n|---|---|\n')
        own = [o[1:] for o in rows if o[0] == section]
        parts += [f'| {said} | [{test}](../../tests/{file}) |\n' for said, file, test in own]
    return ''.join(parts)
