"""Shares of different lengths: what each rank reads in each step, and where a run goes on."""

import time
from itertools import pairwise

import numpy as np
import pytest

from hvdtrain.data.plans import ShardPlan, StreamPlan
from hvdtrain.errors import DataError

SHARES = [(10,), (8, 8), (5, 9), (9, 5), (0, 7), (7, 0, 3), (12, 4, 11), (1, 1, 1), (0, 0, 1)]
CASES = [(counts, batch) for counts in SHARES for batch in (1, 4, 32)]


def plans(counts, batch, **settings):
    return [StreamPlan(counts=counts, rank=rank, batch_per_rank=batch, **settings)
            for rank in range(len(counts))]


def reads(plan, epoch=0):
    """The samples of a rank in each step of an epoch, as the data sets cut its order."""
    batch = plan.batch_per_rank
    order = plan.order(epoch).tolist()
    return [order[step * batch:(step + 1) * batch] for step in range(plan.steps)]


@pytest.mark.parametrize(("counts", "batch", "steps", "last", "global_batch"), [
    ((10,), 4, 3, 2, 4),
    ((8, 8), 4, 2, 0, 8),
    ((8, 8), 8, 1, 0, 16),
    ((5, 9), 4, 3, 1, 8),                    # the longest share decides, wherever it is
    ((9, 5), 4, 3, 1, 8),
    ((8, 7), 4, 2, 0, 8),                    # a full last batch, though not on every rank
    ((0, 7, 3), 4, 2, 3, 12),
    ((1, 0), 32, 1, 1, 64),
    ((1, 3), 1, 3, 0, 2),
])
def test_the_longest_share_gives_the_steps(counts, batch, steps, last, global_batch):
    for plan in plans(counts, batch):
        assert (plan.steps, plan.last_batch_per_rank) == (steps, last)
        assert (plan.global_batch, plan.size) == (global_batch, len(counts))


@pytest.mark.parametrize(("counts", "batch", "batches"), [
    ((5, 9), 4, [[4, 1, 0], [4, 4, 1]]),
    ((8, 7), 4, [[4, 4], [4, 3]]),
    ((0, 7, 3), 4, [[0, 0], [4, 3], [3, 0]]),
    ((1, 3), 1, [[1, 0, 0], [1, 1, 1]]),
])
def test_samples_of_each_rank_in_each_step(counts, batch, batches):
    for plan in plans(counts, batch):
        assert [plan.sizes(rank).tolist() for rank in range(plan.size)] == batches


@pytest.mark.parametrize(("counts", "batch"), CASES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_rank_reads_its_share_once_and_nothing_is_padded_or_dropped(counts, batch, shuffle):
    ranks = plans(counts, batch, shuffle=shuffle)
    assert len({plan.steps for plan in ranks}) == 1
    for plan in ranks:
        steps = reads(plan, epoch=2)
        assert sorted(sum(steps, [])) == list(range(counts[plan.rank]))
        assert [len(samples) for samples in steps] == plan.sizes(plan.rank).tolist()
        assert (plan.samples, plan.samples_per_epoch) == (sum(counts), sum(counts))
        assert (plan.padded, plan.dropped, plan.uneven) == (0, 0, len(set(counts)) > 1)


@pytest.mark.parametrize(("counts", "batch"), CASES)
def test_weighted_means_of_the_ranks_are_the_mean_of_all_samples_of_the_step(counts, batch):
    ranks = plans(counts, batch, shuffle=True)
    weights = [plan.weights() for plan in ranks]
    assert {(w.dtype, w.shape) for w in weights} == {(np.dtype("float32"), (ranks[0].steps,))}
    for step in range(ranks[0].steps):
        # A sample's value tells its rank too. A rank without samples reads one that must not count.
        values = [[100.0 * plan.rank + n for n in reads(plan)[step]] for plan in ranks]
        means = [np.mean(own) if own else 1e6 for own in values]
        weighted = sum(w[step] * mean for w, mean in zip(weights, means, strict=True)) / len(ranks)
        assert weighted == pytest.approx(np.mean(sum(values, [])), rel=1e-6)


@pytest.mark.parametrize(("counts", "rank", "expected"), [
    ((8, 8), 1, [1, 1]),
    ((6, 6), 0, [1, 1]),                     # fewer samples, but as many on every rank
    ((8, 4), 0, [1, 2]),
    ((8, 4), 1, [1, 0]),
    ((0, 7), 0, [0, 0]),
    ((8, 6, 0), 0, [1.5, 2]),
    ((8, 6, 0), 1, [1.5, 1]),
])
def test_a_weight_is_the_ranks_samples_over_the_mean_of_all(counts, rank, expected):
    assert plans(counts, 4)[rank].weights().tolist() == expected


@pytest.mark.parametrize("counts", [(0,), (0, 0), ()])
def test_a_stream_without_a_sample_is_refused(counts):
    with pytest.raises(DataError, match="no samples on any rank; at least one is needed"):
        StreamPlan(counts=counts, rank=0, batch_per_rank=4)


def test_weights_of_many_ranks_and_steps_are_arrays_and_no_loop_over_both():
    counts = tuple(np.random.default_rng(0).integers(900_000, 1_000_000, 256).tolist())
    plan = plans(counts[:1] + counts, 10)[0]
    began = time.perf_counter()
    weights = plan.weights()
    assert plan.step_after(plan.samples_before(90_000)) == 90_000
    assert time.perf_counter() - began < 3  # as Python numbers it is a minute
    assert weights.shape == (plan.steps,)
    assert weights[0] == 1


# Where a run goes on


@pytest.mark.parametrize(("counts", "batch"), CASES)
def test_samples_before_a_step_are_those_that_all_ranks_have_read(counts, batch):
    ranks = plans(counts, batch)
    for plan in ranks:
        seen = 0
        for step in range(plan.steps):
            assert plan.samples_before(step) == seen
            seen += sum(len(reads(other)[step]) for other in ranks)
        assert plan.samples_before(plan.steps) == plan.samples_before(plan.steps + 1) == seen
        assert seen == sum(counts)


@pytest.mark.parametrize(("counts", "batch"), CASES)
def test_a_run_goes_on_at_the_step_at_which_it_stopped(counts, batch):
    for plan in plans(counts, batch):
        before = [plan.samples_before(step) for step in range(plan.steps + 1)]
        assert [plan.step_after(samples) for samples in before] == list(range(plan.steps + 1))
        for step, (first, end) in enumerate(pairwise(before)):
            # Of another number of ranks: a step that was seen in part only is done again.
            assert {plan.step_after(samples) for samples in range(first, end)} == {step}
        assert plan.step_after(plan.samples + 5) == plan.steps


@pytest.mark.parametrize(("samples", "step"), [
    (0, 0), (7, 0), (8, 1), (11, 1), (12, 1), (13, 2), (14, 3), (15, 3)])
def test_the_last_step_before_which_no_more_samples_are_seen(samples, step):
    plan = plans((5, 9), 4)[0]               # 8, 5 and 1 samples in its steps
    assert plan.step_after(samples) == step


@pytest.mark.parametrize("counts", [(8, 8), (6, 6), (1, 1, 1)])
def test_of_equal_shares_the_steps_are_those_of_other_data(counts):
    plan = plans(counts, 4)[0]
    other = ShardPlan(samples=sum(counts), rank=0, size=len(counts), batch_per_rank=4)
    for name in ("samples", "samples_per_epoch", "size", "global_batch", "steps",
                 "last_batch_per_rank", "padded", "dropped"):
        assert getattr(plan, name) == getattr(other, name), name
    for step in range(plan.steps + 1):
        assert plan.samples_before(step) == other.samples_before(step)
    for samples in range(plan.samples + 2):
        assert plan.step_after(samples) == other.step_after(samples)


# Orders


def test_without_shuffling_every_epoch_has_the_order_of_the_share():
    for plan in plans((5, 0, 9), 4):
        for epoch in (0, 3):
            order = plan.order(epoch)
            assert order.dtype == np.int64
            assert order.tolist() == list(range(plan.counts[plan.rank]))


def test_a_shuffled_order_is_the_same_whenever_it_is_asked_for():
    for plan, again in zip(plans((50, 0, 9), 4, shuffle=True, seed=3),
                           plans((50, 0, 9), 4, shuffle=True, seed=3), strict=True):
        order = plan.order(1)
        assert order.dtype == np.int64
        assert sorted(order) == list(range(plan.counts[plan.rank]))
        np.testing.assert_array_equal(again.order(np.int64(1)), order)


def test_another_epoch_seed_or_rank_has_another_order():
    first, second = plans((50, 50), 4, shuffle=True)
    reseeded = plans((50, 50), 4, shuffle=True, seed=1)[0]
    orders = [first.order(0), first.order(1), second.order(0), second.order(1), reseeded.order(0)]
    assert len({tuple(order) for order in orders}) == len(orders)
