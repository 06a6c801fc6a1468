"""The suite for fastai v1 (`make test-v1`); with another fastai nothing here is collected. What a test may leave: ../conftest.py."""
from importlib.metadata import version
import numpy as np
import matplotlib

matplotlib.use('Agg')
collect_ignore_glob = [] if version('fastai').startswith('1.') else ['*']
if 'int' not in vars(np): np.int = int     # fastai v1's text loaders ask for it
