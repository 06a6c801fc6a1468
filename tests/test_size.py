"""tools/size.py counts what it says."""
import runpy
from pathlib import Path

root = Path(__file__).resolve().parent.parent
size = runpy.run_path(str(root/'tools'/'size.py'))

SOURCE = '''"""A module's docstring"""
# a comment
def f(x):
    "A docstring"
    return _g(x)+1     # another one

def _g(x): return "a string"
def _never(): pass
'''


def test_tokens_leave_out_layout_comments_and_docstrings():
    signature = len('def f ( x ) :'.split())
    assert size['tokens'](SOURCE) == (signature + len('return _g ( x ) + 1'.split())
                                      + signature + len(['return', '"a string"'])
                                      + len('def _never ( ) : pass'.split()))


def test_private_functions_that_are_mentioned_once_or_never():
    assert size['private_and_used_once']([SOURCE]) == 2
    assert size['private_and_used_once']([SOURCE, 'y = _g(_g(2))\n_never(_never)']) == 0


def test_each_module_is_counted_and_annexes_are_not_the_core():
    names = {o.relative_to(root/'fastddp').as_posix() for o in size['modules']()}
    assert 'base/errors.py' in names and '_modidx.py' not in names and 'base/__init__.py' not in names
    annexes = {o.split('/')[0] for o in names if size['is_annex'](root/'fastddp'/o)}
    assert {'fastai1', 'machines', 'cluster'} <= annexes and 'fastai2' not in annexes
