"""Which ranks an elastic job has next: pure decisions."""

import pytest

from hvdtrain.hosts import Host
from hvdtrain.launch.worlds import Bar, Bars, Timeline, change_text, next_world

A, B, C = Host("a", 2), Host("b", 1), Host("c", 4)


@pytest.mark.parametrize(("hosts", "commits", "former", "least", "most", "expected"), [
    ([A, B, C], {}, [], 1, None, [A, B, C]),
    ([A, B, C], {}, ["c", "a"], 1, None, [C, A, B]),
    ([A, B, C], {"a": 3, "b": 5, "c": 5}, ["a", "b", "c"], 1, None, [B, C, A]),
    ([A, B, C], {"a": 3, "b": 5}, ["a"], 1, 2, [B, Host("a", 1)]),
    ([A, B, C], {}, [], 8, None, []),
    ([A, B, C], {}, [], 7, 7, [A, B, C]),
    ([Host("a", 0), B], {}, [], 1, None, [B]),
    ([A, B], {"a": 3, "c": 9}, [], 1, None, []),  # the newest is on a host that is left out
    ([], {}, [], 1, None, []),
])
def test_the_next_world(hosts, commits, former, least, most, expected):
    assert next_world(hosts, commits, former, least=least, most=most) == tuple(expected)


def test_a_first_failure_is_free_and_later_ones_bar_longer_and_longer():
    bar = Bar()
    assert [bar.fail(now) for now in (0.0, 5.0, 20.0, 50.0)] == [0.0, 10.0, 20.0, 40.0]
    assert bar.until_s == 90.0
    assert bar.fail(10_000.0) == 0.0  # calm for long
    assert Bar().fail(0.0, first_counts=True) == 10.0
    for now in range(100, 2000, 60):
        bar_s = bar.fail(float(now))
    assert bar_s == 600.0


def test_slots_are_barred_before_hosts():
    bars = Bars()
    bars.slots["a", 1] = Bar()
    bars.slots["a", 1].fail(0.0)
    assert bars.free(A, 1.0) == 2
    bars.slots["a", 1].fail(1.0)
    assert (bars.free(A, 2.0), bars.free(B, 2.0), bars.free(A, 12.0)) == (1, 1, 2)
    bars.slots["c", 2] = Bar()
    for now in (0.0, 1.0, 2.0):
        bars.slots["c", 2].fail(now)
    assert bars.free(C, 3.0) == 2  # three ranks would use its place again
    assert bars.free(C, 3.0, all_slots=True) == 4
    bars.hosts["c"] = Bar()
    bars.hosts["c"].fail(0.0, first_counts=True)
    assert (bars.free(C, 3.0), bars.free(C, 10.5)) == (0, 2)
    assert bars.free(C, 3.0, all_slots=True) == 0


def test_commits_of_an_abandoned_training_are_told_from_those_that_went_on():
    timeline = Timeline()
    assert timeline.has("a", 900)  # of a former launcher
    timeline.begin([A, B], 0)
    assert timeline.has("a", 50)
    assert timeline.has("b", 70)  # the world may have gone on before the host was lost
    timeline.begin([A], 50)  # b was lost with a newer commit
    assert not timeline.has("b", 70)
    assert timeline.has("b", 50)
    assert timeline.has("a", 90)
    timeline.begin([A, C], 90)
    assert not timeline.has("b", 70)
    assert timeline.has("c", 95)
    assert not timeline.has("new", 60)


def test_a_change_in_words():
    assert change_text([A, B], [A, B]) == "the same hosts"
    assert change_text([A, B], [Host("a", 1), C]) == "+c:4, -b:1, a:2 to a:1"
