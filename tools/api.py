"""The site's pages of what users call, from signatures, docments and docstrings: parameters, returns, raises."""
import inspect, re
from fastcore.docments import docments

PAGES = ['docs/api/learner.md', 'docs/api/functions.md', 'docs/api/launchers.md', 'docs/api/errors.md',
         'docs/api/magics.md']


def cell(text): return str(text).replace('|', '\\|')


def call(name, sig):
    "A call as one reads it, a line for each parameter if there are many"
    params = [re.sub(r'<function (\w+) at \w+>', r'\1', str(p.replace(annotation=p.empty)))
              for k, p in sig.parameters.items() if k != 'self']
    one = f"{name}({', '.join(params)})"
    return one if len(one) < 90 else f'{name}(\n    ' + ',\n    '.join(params) + ')'


def table(sig, comments):
    "A row for each parameter that has a comment"
    rows = [f"| `{p.name if p.default is p.empty else f'{p.name}={p.default!r}'}` | {cell(comments[k])} |"
            for k, p in sig.parameters.items() if comments.get(k)]
    return '\n'.join(['| parameter | meaning |', '|---|---|', *rows]) if rows else ''


def bullet(found): return '- ' + ', '.join(f'`{o}`' for o in found[1].split(', ')) + ': '


def ended(text): return text if text.endswith(('.', ':')) else f'{text}.'


def paragraphs(doc, listed=()):
    "A docstring's paragraphs; a list of what `listed` names is left out, and one of exceptions becomes a list"
    for part in filter(None, re.split(r'\n\s*\n', inspect.cleandoc(doc or ''))):
        head, *lines = part.split('\n')
        if head != 'Raises' and not head.endswith(':'): yield ended(part)
        elif not {re.match(r'\W*(\w+)', lines[0])[1]} & {*listed}:
            items = (re.sub(r'^    \**(\w+(?:=.*?)?(?:, \w+)*): ?', bullet, o) for o in lines)
            yield f'{head.rstrip(":")}:\n\n' + '\n'.join(items)


def comments_of(f): return {k: v for k, v in docments(f, returns=False, args_kwargs=True).items() if v}


def function(name, f, comments, sig=None):
    sig = sig or inspect.signature(f)
    parts = [f'## {name.split(".")[-1]}', f'```python\n{call(name, sig)}\n```']
    first, *rest = [*paragraphs(f.__doc__, comments)] or ['']
    return '\n\n'.join(filter(None, [*parts, first, table(sig, comments), *rest]))


def learner():
    from fastai.learner import Learner
    import fastddp.all
    options = comments_of(Learner.distrib_ctx)
    names = [k for k in vars(Learner) if k.startswith('distrib') and k != 'distrib_session']
    for k in sorted(names, key=lambda k: (k != 'distrib_ctx', not k.startswith('distrib_fi'), k)):
        f = getattr(Learner, k)
        if isinstance(f, property): yield f'## {k}\n\n`learn.{k}`\n\n{inspect.cleandoc(f.fget.__doc__)}.'
        else: yield function(f'learn.{k}', f, comments_of(f) or options)


def named(module, names):
    import importlib
    for name in names:
        o = getattr(importlib.import_module(module), name)
        if not inspect.isclass(o):
            yield function(name, o, comments_of(o))
            continue
        sig = inspect.signature(o.__init__)
        yield function(name, o, comments_of(o.__init__), sig)


def errors():
    import fastddp.base.errors as module
    from fastddp.base.errors import WorkerError
    for name in 'CantDistribute', 'NotPicklable', 'WorkerError', 'RankRaised', 'RankDied', 'GroupTimeout':
        o = getattr(module, name)
        base = next(b.__name__ for b in o.__mro__[1:])
        yield f'## {name}\n\nA `{base}`. {" ".join(inspect.cleandoc(o.__doc__).split())}.'


def magics():
    "Their own help, as `%makedip?` shows it"
    from fastddp.cluster.magics import DipMagics
    for name in 'makedip', 'dip', 'autodip', 'dipush', 'dipull', 'dipper', 'dipstat':
        f = getattr(DipMagics, name)
        help = re.sub(r'(?<!%)%dip\b', '%%dip', inspect.cleandoc(f.__doc__).strip(':'))
        yield f"## {'%%' if name == 'dip' else '%'}{name}\n\n```text\n{help}\n```"


def pages():
    "Path -> Markdown"
    heads = ['A learner\'s methods\n\nOn fastai\'s `Learner` after `from fastddp.all import *`.',
             'Functions on N processes\n\n`from fastddp.ranch import *`, or from `fastddp.all`.',
             'Launchers\n\nThe values of `launcher=`: they start the processes that run a job.',
             'Errors\n\nFrom `fastddp.all`; [what to do](../../nbs/troubles.ipynb).',
             'Magics\n\n`%load_ext fastddp`; see [Cells on all GPUs](../../nbs/tutorials/dip.ipynb).']
    parts = [learner(), named('fastddp.ranch', ['ranch', 'in_torchddp', 'TorchDDPCtx', 'spawn', 'global_imports',
                                                'import_star']),
             named('fastddp.all', ['Local', 'InProcess', 'Ray']), errors(), magics()]
    return {page: f'# {head}\n\n' + '\n\n'.join(part) + '\n' for page, head, part in zip(PAGES, heads, parts)}
