"Imported by a worker before its job begins, through a warning filter: does on its rank what the file `ORDER` says"
import multiprocessing, tempfile
from pathlib import Path
from faults import do


class Category(UserWarning): pass


ORDER = Path(tempfile.gettempdir(), 'order')     # no environment yet: the helper's is as old as the helper
if ORDER.exists():
    what, rank, marker = ORDER.read_text().split(',')
    if multiprocessing.current_process().name == f'fastddp-{rank}' and not Path(marker).exists():
        Path(marker).touch()
        do(what)
