"""A few of the random fits of random_configs.py; all 200 with `pytest -m full`."""
import pytest
from random_configs import main


@pytest.mark.timeout(200)
def test_some_random_fits(): assert main(15)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_hundred_random_fits(): assert main(200, 1)
