"""Which rank holds which part of an optimizer's state: every element once, and evenly."""

import numpy as np
import pytest

from hvdtrain.optim.zero_parts import Span, VariableFacts, plan_buckets, plan_owners

MIB = 1 << 20


def facts(*sizes, dtype="float32", decays=True):
    return [VariableFacts(size=size, dtype=dtype, item_bytes=4, decays=decays) for size in sizes]


def covered(buckets, sizes, ranks):
    """How often each element of each variable is in a part of a rank."""
    counts = [np.zeros(size, int) for size in sizes]
    for bucket in buckets:
        for rank in range(ranks):
            spans = bucket.owned[rank]
            assert sum(map(len, spans)) + bucket.padding_of(rank) == bucket.part
            for span in spans:
                counts[span.variable][span.start:span.stop] += 1
    return counts


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here makes a model: there is nothing to clear."""


# Each size with each number of ranks, and both with buckets of a few elements, of some variables
# and of all.
@pytest.mark.parametrize(("sizes", "ranks", "bucket_bytes"), [
    ((1,), 1, 16), ((1,), 2, 4096), ((1,), 3, 32 * MIB), ((1,), 8, 16),
    ((7, 1, 0, 3), 1, 4096), ((7, 1, 0, 3), 2, 16), ((7, 1, 0, 3), 3, 16),
    ((7, 1, 0, 3), 8, 32 * MIB),
    ((1000, 10, 1000, 10), 1, 32 * MIB), ((1000, 10, 1000, 10), 2, 16),
    ((1000, 10, 1000, 10), 3, 4096), ((1000, 10, 1000, 10), 8, 4096),
    ((300_000, 5, 700_001, 64), 1, 4096), ((300_000, 5, 700_001, 64), 2, 32 * MIB),
    ((300_000, 5, 700_001, 64), 3, 16), ((300_000, 5, 700_001, 64), 8, 4096),
    ((3,) * 50, 1, 16), ((3,) * 50, 2, 4096), ((3,) * 50, 3, 32 * MIB), ((3,) * 50, 8, 16)])
def test_each_element_belongs_to_one_rank(sizes, ranks, bucket_bytes):
    buckets = plan_buckets(facts(*sizes), ranks=ranks, bucket_bytes=bucket_bytes)
    for count in covered(buckets, sizes, ranks):
        assert (count == 1).all()
    held = sum(bucket.part for bucket in buckets)
    assert held <= sum(sizes) / ranks + len(buckets)


def test_a_large_variable_has_a_bucket_of_its_own_and_is_cut_where_it_is_too_large():
    large = 5 * MIB
    buckets = plan_buckets(facts(10, large, 20), ranks=2, bucket_bytes=8 * MIB)
    spans = [tuple(span for span, _ in bucket.layout() if span) for bucket in buckets]
    assert spans == [
        tuple([Span(variable=1, start=start, stop=min(large, start + 2 * MIB))])
        for start in range(0, large, 2 * MIB)] + [
        (Span(variable=2, start=0, stop=20), Span(variable=0, start=0, stop=10))]


def test_what_decays_and_what_does_not_are_apart_and_so_are_dtypes():
    mixed = [*facts(4), *facts(4, decays=False), *facts(4, dtype="float64"), *facts(4)]
    buckets = plan_buckets(mixed, ranks=2, bucket_bytes=MIB)
    kinds = {(b.dtype, b.decays): sorted({span.variable for span, _ in b.layout() if span})
             for b in buckets}
    assert kinds == {("float32", True): [0, 3], ("float32", False): [1], ("float64", True): [2]}


def test_owners_have_about_as_much_each():
    sizes = [700, 300, 300, 200, 100, 100, 50, 50]
    (bucket,) = plan_owners(facts(*sizes), ranks=3)
    assert [sum(map(len, spans)) for spans in bucket.owned] == [700, 550, 550]
    assert all((count == 1).all() for count in covered([bucket], sizes, 3))
    (bucket,) = plan_owners(facts(5), ranks=3)
    assert bucket.owned == ((Span(variable=0, start=0, stop=5),), (), ())
