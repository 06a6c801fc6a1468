"""Lines of modules end at 100 columns, others at 120 (CONTRIBUTING.md says so, this holds it), a patched method hides
no name of its module, classes of ours are written whole, and a name is given once."""
import ast, json
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
COLUMNS = 100
ELSEWHERE = 120     # columns of lines that aren't a module's: tests, tools, examples in notebooks
OURS = [o for o in sorted((root/'fastddp').rglob('*.py')) if o.name != '_modidx.py']     # that one is generated
OTHERS = [*(o for folder in ('tests', 'tools', 'benchmarks') for o in sorted((root/folder).rglob('*.py'))),
          root/'setup.py']
NOTEBOOKS = [o for o in sorted((root/'nbs').rglob('*.ipynb'))
             if not any(p.startswith('.') for p in o.relative_to(root).parts)]


def by_path(o): return o.relative_to(root).as_posix()


def read(path): return path.read_text(encoding='utf-8')


def faults(paths, look):
    "What `look` finds in the text of each file, by its path, where it finds something"
    found = {by_path(o): look(read(o)) for o in paths}
    return {k: v for k, v in found.items() if v}


# Columns

def generated(source):
    "The numbers of the lines that nbdev's `__all__` takes: it breaks them where it likes"
    lists = [o for o in ast.parse(source).body if isinstance(o, ast.Assign) and ast.unparse(o.targets[0]) == '__all__']
    return {i for o in lists for i in range(o.lineno, o.end_lineno+1)}


def long_lines(source, but=(), columns=ELSEWHERE):
    "`number: beginning` of each line of `source` that is too long"
    return [f'{i}: {o[:60]}... ({len(o)})' for i, o in enumerate(source.split('\n'), 1)
            if len(o) > columns and i not in but]


def long_in_module(source): return long_lines(source, generated(source), COLUMNS)


def long_in_notebook(source):
    cells = [o for o in json.loads(source)['cells'] if o['cell_type'] == 'code']
    return [f"cell {o.get('id')}, line {said}" for o in cells for said in long_lines(''.join(o['source']))]


def test_lines_of_modules_end_in_time(): assert not faults(OURS, long_in_module)


def test_lines_of_other_files_end_in_time(): assert not faults(OTHERS, long_lines)


def test_lines_of_notebooks_code_end_in_time(): assert not faults(NOTEBOOKS, long_in_notebook)


def test_a_long_line_is_noticed():
    fits, long = f'x = {"1"*96}', f'y = {"1"*97}'
    assert (len(fits), len(long)) == (100, 101)
    assert long_in_module(f'{fits}\n{long}\n{fits}') == [f'2: {long[:60]}... (101)'] and not long_lines(long)
    assert long_in_module(f"s = '{'ü'*94}'") == [], 'columns, not bytes'
    said = f"__all__ = ['{'a'*70}',\n           '{'b'*120}']"
    assert len(long_lines(said)) == 1 and long_in_module(said) == []
    assert len(long_in_module(f'{said}\n{long}')) == 1


def is_patch(node):
    call = node.func if isinstance(node, ast.Call) else node
    return isinstance(call, ast.Name) and call.id == 'patch'


def hidden(source):
    """Names of a module that a patched method has, too: with fastcore 1.7 it hides them, for `patch` returns nothing
    there, and the module has that under the method's name"""
    body = ast.parse(source).body
    patched = {o.name for o in body if isinstance(o, ast.FunctionDef) and any(map(is_patch, o.decorator_list))}
    own = {o.name for o in body if isinstance(o, (ast.FunctionDef, ast.ClassDef))
           and not any(map(is_patch, o.decorator_list))}
    imported = {a.asname or a.name for o in body if isinstance(o, (ast.Import, ast.ImportFrom)) for a in o.names}
    return patched & (own | imported)


def test_no_patched_method_hides_a_name_of_its_module(): assert not faults(OURS, hidden)


@pytest.mark.parametrize('source', ['from x import a\n', 'from x import b as a\n', 'def a(): pass\n', 'import a\n'])
def test_a_hidden_name_is_noticed(source):
    method = '@patch(as_prop=True)\ndef a(self:X): pass\n'
    assert hidden(source+method) == {'a'} and not hidden(method) and not hidden(source)


def patched_classes(source):
    "The names of the classes to which a module adds methods with `@patch`"
    return {ast.unparse(o.args.args[0].annotation) for o in ast.parse(source).body
            if isinstance(o, ast.FunctionDef) and any(map(is_patch, o.decorator_list))}


def test_classes_of_ours_are_written_whole():
    ours = {o.name for path in OURS for o in ast.walk(ast.parse(read(path))) if isinstance(o, ast.ClassDef)}
    patched = set().union(*(patched_classes(read(o)) for o in OURS))
    assert patched == {'Learner'} and 'Monitor' in ours and not patched & ours


def twice(source):
    "Names that two classes or functions of a file have: what was written for the first gets the second"
    made = [o for o in ast.parse(source).body if isinstance(o, (ast.ClassDef, ast.FunctionDef))]
    names = [o.name for o in made if o.name != '_' and not any(map(is_patch, o.decorator_list))]
    return {o for o in names if names.count(o) > 1}


def test_names_of_a_file_are_given_once():
    assert not faults(OURS+OTHERS, twice)
    assert twice('class A: pass\ndef A(): pass\ndef b(): pass\n') == {'A'}


def test_there_is_something_to_look_at():
    assert len(OURS) > 50 and len(OTHERS) > 70 and len(NOTEBOOKS) > 60
