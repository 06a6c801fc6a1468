__version__ = "0.1.0"

def load_ipython_extension(shell):
    "`%load_ext fastddp`: the magics `%makedip`, `%%dip` and their kin"
    from .magics import load
    load(shell)

def unload_ipython_extension(shell):
    "`%unload_ext fastddp`: takes them out again, and ends the group"
    from .magics import unload
    unload(shell)

def jobs():
    """Return a list of what runs in the background (`wait=False`, `spawn(join=False)`), also where
    the variable is lost. Each has `stop()`"""
    import sys
    held = sys.modules.get('fastddp.launch.held_gpus')
    return [*held.running_jobs] if held else []

def __getattr__(name):
    "`fastddp.doctor()`: what machine this is; `fastddp.setup(fn)`: what workers run first"
    import importlib
    if name == 'doctor': return importlib.import_module('.doctor', __name__)
    if name == 'setup': return importlib.import_module('.payload.patches', __name__).setup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

def _ask_early():
    "`import fastddp` in a cell: the helper process begins to import torch and fastai"
    import sys
    if 'IPython' not in sys.modules: return
    from . import early
    if early.imported_by_cell(sys._getframe(1), __name__): early.ask_for_helper()

_ask_early()
