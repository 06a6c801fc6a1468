"""The suite for fastai v1 (`make test-v1`); with another fastai nothing here is collected. What a test may leave:
../conftest.py."""
from importlib.metadata import version
import matplotlib

matplotlib.use('Agg')
collect_ignore_glob = [] if version('fastai').startswith('1.') else ['*']
if not collect_ignore_glob:
    import fastai.text, fastai.tabular, fastai.collab, fastai.vision
    from fastddp.fastai1.loaders import old_numpy
    old_numpy()
