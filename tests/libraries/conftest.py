"""Workflows of the libraries that people use with fastai: `make test-libraries`, in an environment of its own. Nothing
else collects them. A test is a row of docs/works_with.md, which `tools/works_with.py` makes of the results."""
import pytest


def pytest_ignore_collect(collection_path, config):
    if 'libraries' not in config.option.markexpr: return True


@pytest.fixture(autouse=True)
def the_row(request, record_property):
    "What the table says of this test goes into the report"
    marker = request.node.get_closest_marker('libraries')
    library, workflow = marker.args
    about = dict(library=library, version=request.module.VERSION, workflow=workflow,
                 compared=marker.kwargs.get('compared', 'weights, losses, metrics'), know=marker.kwargs.get('know', ''))
    for k, v in about.items(): record_property(k, v)
