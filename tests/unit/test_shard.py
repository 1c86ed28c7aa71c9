import numpy as np
import pytest

from hvdtrain.data.plans import ShardPlan, evaluation_rows
from hvdtrain.errors import DataError


def plans(samples, size, batch, **settings):
    return [ShardPlan(samples=samples, rank=r, size=size, batch_per_rank=batch, **settings)
            for r in range(size)]


CASES = [(s, n, b) for s in (4, 7, 16, 33, 64, 100) for n in (1, 2, 3, 4) for b in (1, 4, 32)]


@pytest.mark.parametrize(("samples", "size", "batch"), CASES)
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_every_rank_takes_the_same_number_of_steps(samples, size, batch, remainder):
    ranks = plans(samples, size, batch, remainder=remainder)
    assert len({(p.steps, p.samples_per_rank) for p in ranks}) == 1
    orders = [p.order(3) for p in ranks]
    assert {len(o) for o in orders} == {ranks[0].samples_per_rank}
    seen = np.concatenate(orders)
    counts = np.bincount(seen, minlength=samples)
    assert ranks[0].padded < size
    assert ranks[0].dropped < size
    assert ranks[0].samples_per_epoch == counts.sum()
    if remainder == "pad":
        assert counts.min() >= 1
        assert counts.sum() == samples + ranks[0].padded
    else:
        assert counts.max() == 1
        assert counts.sum() == samples - ranks[0].dropped


@pytest.mark.parametrize(("samples", "size", "batch"), CASES)
def test_join_divides_the_last_step_as_it_is(samples, size, batch):
    """Means over ranks, weighted, are the mean over all samples; none is seen twice."""
    ranks = plans(samples, size, batch, remainder="join")
    assert len({p.steps for p in ranks}) == 1
    assert ranks[0].samples_per_epoch == samples
    alone = plans(samples, 1, size * batch)[0].order(5)
    for step in range(ranks[0].steps):
        theirs = alone[step * size * batch:(step + 1) * size * batch]
        weighted = 0.0
        seen = []
        for plan in ranks:
            own = plan.order(5)[step * batch:(step + 1) * batch]
            weight = plan.weights()[step]
            assert len(own) >= 1
            weighted += weight * own.mean() / size
            seen += own.tolist() if weight else []
        assert sorted(seen) == sorted(theirs)
        np.testing.assert_allclose(weighted, theirs.mean())


@pytest.mark.parametrize(("samples", "size", "batch"), CASES)
def test_the_ranks_together_see_what_one_process_sees_in_each_step(samples, size, batch):
    one = plans(samples, 1, size * batch)[0]
    ranks = plans(samples, size, batch)
    alone = one.order(5)
    for step in range(ranks[0].full_steps):
        together = np.concatenate([p.order(5)[step * batch:(step + 1) * batch] for p in ranks])
        expected = alone[step * size * batch:(step + 1) * size * batch]
        np.testing.assert_array_equal(together, expected)


@pytest.mark.parametrize(("samples", "size", "batch"), CASES)
@pytest.mark.parametrize("remainder", ["pad", "drop", "join"])
def test_a_run_goes_on_at_the_step_at_which_it_stopped(samples, size, batch, remainder):
    plan = plans(samples, size, batch, remainder=remainder)[0]
    before = [plan.samples_before(step) for step in range(plan.steps + 1)]
    assert before == [step * size * batch for step in range(plan.steps)] + [samples]
    assert [plan.step_after(seen) for seen in before] == list(range(plan.steps + 1))
    assert plan.step_after(size * batch - 1) == (0 if samples >= size * batch else plan.steps)


def test_each_epoch_is_another_order_and_reproducible():
    plan = plans(100, 2, 10)[0]
    assert not np.array_equal(plan.order(0), plan.order(1))
    np.testing.assert_array_equal(plan.order(1), plan.order(1))
    other = plans(100, 2, 10, seed=1)[0]
    assert not np.array_equal(plan.order(0), other.order(0))


def test_without_shuffling_the_order_is_that_of_the_data():
    np.testing.assert_array_equal(plans(8, 2, 2, shuffle=False)[1].order(0), [2, 3, 6, 7])


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(DataError, match="3 training samples for 4 ranks"):
        plans(3, 4, 1)


@pytest.mark.parametrize(("samples", "size"), [(10, 3), (2, 4), (7, 1), (8, 4)])
def test_evaluation_reads_each_sample_once(samples, size):
    shares = [evaluation_rows(samples, r, size) for r in range(size)]
    np.testing.assert_array_equal(np.concatenate(shares), np.arange(samples))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("samples", [7, 16, 17, 50])
def test_a_global_batch_need_not_divide_by_the_ranks(samples):
    plans = [ShardPlan(samples=samples, rank=rank, size=3, batch_per_rank=6, batch_global=16,
                       remainder="join", shuffle=True) for rank in range(3)]
    one = ShardPlan(samples=samples, rank=0, size=1, batch_per_rank=16)
    assert {plan.steps for plan in plans} == {one.steps}
    assert plans[0].growth == 1
    orders = [plan.order(2) for plan in plans]
    for step in range(one.steps):
        whole = one.order(2)[step * 16:(step + 1) * 16].tolist()
        parts, weights = [], []
        for plan, order in zip(plans, orders, strict=True):
            full = step < plan.full_steps
            weights.append(plan.weights()[step])
            part = order[step * plan.own_batch:(step + 1) * plan.own_batch].tolist()
            assert len(part) == (plan.own_batch if full else len(part)) > 0
            parts += part if weights[-1] else []
        assert parts == whole
        if plans[0].uneven:
            assert sum(weights) == pytest.approx(3)
    assert sum(len(order) for order in orders) <= samples + 3


def test_a_global_batch_that_cannot_be_divided_is_refused():
    for given, message in (({"batch_global": 2}, "2 samples for 3 ranks"),
                           ({"batch_global": 16, "remainder": "pad"}, "does not divide by 3"),
                           ({"batch_global": 16, "whole_batches": True}, "does not divide by 3")):
        with pytest.raises(DataError, match=message):
            ShardPlan(**{"samples": 48, "rank": 0, "size": 3, "batch_per_rank": 6,
                         "remainder": "join", **given})
