"A few of the random fits of random_combinations.py; hundreds, also of random_configs.py, with `pytest -m full`."
import pytest, random_combinations, random_configs


@pytest.mark.holds('Decisions', "Random combinations of data, model, loaders, loss, optimizer and callbacks: weights, "
                   "optimizer, recorder, callbacks and random streams, and one more plain epoch, are those of one "
                   "process to float32's precision")
@pytest.mark.timeout(200)
def test_some_random_combinations(): assert random_combinations.main(2)


# In parts: after 90 seconds pytest shows all stacks, which can crash a process that is computing.

@pytest.mark.full
@pytest.mark.holds('Decisions', "Random configurations of all this: none hangs")
@pytest.mark.parametrize('first', range(0, 200, 50))
def test_two_hundred_random_fits(first): assert random_configs.main(50, 1, first)


@pytest.mark.full
@pytest.mark.parametrize('first', range(0, 500, 50))
def test_five_hundred_random_combinations(first): assert random_combinations.main(50, 1, first)
