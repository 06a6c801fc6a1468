"What happens on a rank before its job: `Boots` is a launcher whose settings do it when a worker takes them over"
import multiprocessing, sys
from pathlib import Path
import cloudpickle
from fastddp.launch.local import Local

# a worker reads the message before it has the notebook's import path
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Boots(Local):
    def __init__(self, *order):
        super().__init__()
        self.order = order
    def settings(self):
        settings, *others = super().settings()
        return Settings(settings, order=self.order), *others


class Settings(dict):
    def __init__(self, settings, order):
        super().__init__(settings)
        self.order = order
    def __reduce__(self): return Settings, (dict(self), self.order)
    def keys(self):
        what, rank, marker = self.order
        # no RANK yet
        if multiprocessing.current_process().name == f'fastddp-{rank}' and not Path(marker).exists():
            from faults import do
            Path(marker).touch()
            do(what)
        return super().keys()
    def __iter__(self): return iter(self.keys())        # else `{**settings}` asks for neither
