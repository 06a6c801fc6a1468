"""Write fastddp/all.pyi: what `from fastddp.all import *` brings, for editors that read code and don't run it.

    python tools/stubs.py

The methods are patched onto fastai's Learner, which no editor can see in the source. The stub has a `Learner` that is a
subclass with these methods; the names without a learner come from where they are defined.
"""
import inspect
from pathlib import Path

root = Path(__file__).resolve().parent.parent
HEAD = '"Made by `make stubs`: the methods of a learner, for editors. At run time `Learner` is fastai\'s own."\n'
PLAIN = bool, int, float, str
RETURNS = dict(distrib_ctx='ContextManager[Learner]', distrib_check='Answer')


def default(p):
    "The default value as a stub writes it"
    if p.default is p.empty: return ''
    plain = p.default is None or isinstance(p.default, PLAIN) or p.default == (0,)
    return f' = {p.default!r}' if plain else ' = ...'


def annotation(p):
    kind = getattr(p.annotation, '__name__', '') if p.annotation in (*PLAIN, list) else ''
    return f': {kind} | None' if kind and p.default is None else f': {kind}' if kind else ''


def parameters(sig):
    "The parameters of a signature, those by name behind a `*`"
    said, starred = [], False
    for p in sig.parameters.values():
        if p.kind == p.KEYWORD_ONLY and not starred: said.append('*')
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        said.append(f'{star}{p.name}{annotation(p)}{default(p)}')
    return ', '.join(said)


def method(name, f):
    "A method; the options are explained once, in `distrib_ctx`"
    if isinstance(f, property):
        doc = inspect.getdoc(f.fget)
        return f'    @property\n    def {name}(self):\n        """{doc}"""\n'
    returns = f' -> {RETURNS[name]}' if name in RETURNS else ''
    doc = inspect.getdoc(f)
    if name != 'distrib_ctx': doc = doc.split('\n\n')[0]
    doc = '\n'.join(f'        {o}'.rstrip() for o in doc.split('\n')).lstrip()
    return f'    def {name}({parameters(inspect.signature(f))}){returns}:\n        """{doc}"""\n'


def imports():
    "A line for each name that isn't of a learner"
    import fastddp.all as words
    for name in words.__all__:
        if name == 'Learner': continue
        module = getattr(words, name).__module__
        yield f'from {module} import {name} as {name}'


def render():
    from fastai.learner import Learner
    import fastddp.all as words
    methods = sorted((k, f) for k, f in vars(Learner).items() if k.startswith('distrib') and k != 'distrib_session')
    lines = [HEAD, 'from typing import ContextManager', 'from fastai.learner import Learner as _Learner',
             'from fastddp.fastai2.check import Answer', *imports(), f'\n__all__ = {words.__all__!r}\n',
             'class Learner(_Learner):', *(method(k, f) for k, f in methods)]
    return '\n'.join(lines)


if __name__ == '__main__': (root/'fastddp'/'all.pyi').write_text(render(), encoding='utf-8')
