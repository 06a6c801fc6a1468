"A few of the random fits of random_configs.py and random_combinations.py; hundreds of them with `pytest -m full`."
import pytest, random_combinations, random_configs


@pytest.mark.timeout(200)
def test_some_random_fits(): assert random_configs.main(15)


@pytest.mark.timeout(200)
def test_some_random_combinations(): assert random_combinations.main(8)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_hundred_random_fits(): assert random_configs.main(200, 1)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_five_hundred_random_combinations(): assert random_combinations.main(500, 1)
