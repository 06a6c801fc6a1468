__version__ = "0.1.0.dev0"

def load_ipython_extension(shell):
    "`%load_ext fastddp`: the magics `%makedip`, `%%dip` and their kin"
    from .magics import load
    load(shell)

def unload_ipython_extension(shell):
    "`%unload_ext fastddp`: takes them out again, and ends the group"
    from .magics import unload
    unload(shell)
