"""The arithmetic of `shard.sharded` for random sizes, ranks and batch sizes: thousands of cases, no processes."""
from hypothesis import given, settings, strategies as st
from fastcore.basics import chunked
from fastddp.base.scoped import with_attrs
from fastddp.shard import sharded
from fastddp.shard.loss import LossPart
from fastddp.shard.sharded import pad_shard, shard_batch, shard_steps, workers_per_rank

settings.load_profile('many')       # how many: conftest.py
ranks, sizes, batch_sizes = st.integers(1, 8), st.integers(0, 300), st.integers(1, 70)


def train_shard(batch, rank, n):
    own = shard_batch(batch, rank, n)
    return pad_shard(own, batch, n), len(own)


@given(sizes, ranks)
def test_sharding_loses_nothing_and_doubles_nothing(m, n):
    shards = [shard_batch([*range(m)], r, n) for r in range(n)]
    assert sorted(o for s in shards for o in s) == [*range(m)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.integers(1, 300), ranks)
def test_a_training_step_is_taken_by_all_and_never_with_one_item(m, n):
    batch = [*range(m)]
    shards = [train_shard(batch, r, n) for r in range(n)]
    assert sum(count for _, count in shards) == m
    assert all(set(items) <= set(batch) for items, _ in shards)
    if n > 1: assert all(len(items) >= 2 for items, _ in shards)
    for r, (items, count) in enumerate(shards):
        if count: assert set(items) == set(shard_batch(batch, r, n))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=100), ranks)
def test_the_weighted_mean_over_ranks_is_the_batch_mean(losses, n):
    shards = [train_shard(losses, r, n) for r in range(n)]
    means = [sum(items)/len(items)*LossPart(count, False).scale(len(losses), n) for items, count in shards]
    assert abs(sum(means)/n - sum(losses)/len(losses)) < 1e-9


@given(sizes, batch_sizes, st.booleans(), ranks, st.booleans())
def test_results_of_all_ranks_return_to_the_order_of_one_process(m, bs, drop_last, n, whole):
    batches = [*chunked(range(m), bs, drop_last)]
    steps = [[*shard_steps(batches, r, n, False, whole)] for r in range(n)]
    handled = sorted(pair for each in steps for o in each for pair in zip(o.positions, o.items))
    assert handled == [*enumerate(o for b in batches for o in b)]
    assert all(o.items for each in steps for o in each)


@given(sizes, batch_sizes, ranks, st.booleans(), st.booleans())
def test_all_ranks_take_the_steps_of_training_together(m, bs, n, drop_last, whole):
    batches = [*chunked(range(m), bs, drop_last)]
    steps = [[*shard_steps(batches, r, n, True, whole)] for r in range(n)]
    expect = [sum(map(len, o)) for o in chunked(batches, n)] if whole else [len(b) for b in batches]
    for r in range(n): assert [o.total for o in steps[r]] == expect
    for each in zip(*steps): assert sum(own for own, _ in (o.counts for o in each)) == each[0].total
    if n > 1: assert all(len(o.items) > 1 for each in steps for o in each)


@given(st.integers(1, 6), ranks, st.integers(1, 40))
def test_a_rank_keeps_its_streams(b, n, n_batches):
    "With n*b streams, item i of every batch belongs to stream i: a rank meets the same ones each time"
    rows = [*range(n*b)]
    for r in range(n):
        mine = [tuple(o % (n*b) for o in shard_batch([k*n*b+i for i in rows], r, n)) for k in range(n_batches)]
        assert len(set(mine)) == 1 and len(mine[0]) == b


@given(st.integers(2, 8), st.integers(1, 32), st.data())
def test_sharding_a_sorted_batch_never_costs_more_than_slicing_it(n, b, data):
    lens = sorted(data.draw(st.lists(st.integers(1, 2000), min_size=n*b, max_size=n*b)), reverse=True)
    def cost(parts): return [len(p)*max(p) for p in parts]
    dealt, sliced = cost(shard_batch(lens, r, n) for r in range(n)), cost(chunked(lens, b))
    assert max(dealt) == max(sliced) == b*lens[0]      # somebody has the longest text, whatever one does;
    assert min(dealt) >= min(sliced)                   # but the others have no longer to wait for that rank
    assert max(dealt) - min(dealt) <= b*(lens[0] - lens[n-1])


@given(st.integers(0, 64), ranks)
def test_loader_processes_have_cores_and_are_never_all_gone(k, n):
    with with_attrs(sharded, visible_cores=lambda: 16): each = workers_per_rank(k, n)
    assert each <= k and each*n <= max(16, n) and (each > 0) == (k > 0)
