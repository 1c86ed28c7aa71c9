"""The phases of a training's time: pure functions of the laps of all ranks."""

import pytest

from hvdtrain.runtime.phases import PHASES, added, of_all_ranks, slowest, spread, table, total_of


def lap(**seconds):
    return dict.fromkeys(PHASES, 0.0) | seconds


def times(**seconds):
    """Of two ranks or more."""
    ranks = len(next(iter(seconds.values())))
    return {name: [0.0] * ranks for name in PHASES} | seconds


def test_a_collective_that_counts_its_waiting_is_believed():
    found = of_all_ranks([lap(waiting=1.0, moving=0.5), lap(waiting=0.25, moving=0.5)],
                         tells_waiting=True)
    assert found["waiting"] == [1.0, 0.25]
    assert found["moving"] == [0.5, 0.5]
    assert tuple(found) == PHASES


def test_else_waiting_is_what_goes_beyond_the_fastest_rank():
    found = of_all_ranks([lap(moving=1.5), lap(moving=0.5)], tells_waiting=False)
    assert found["waiting"] == [1.0, 0.0]
    assert found["moving"] == [0.5, 0.5]


def test_epochs_are_added_for_each_rank():
    total = added([times(input=[1.0, 2.0]), times(input=[3.0, 4.0])])
    assert total["input"] == [4.0, 6.0]
    assert total_of(total) == 6.0


def test_the_spread_names_ranks():
    assert spread([2.0, 1.0, 9.0]) == (2.0, 1, 2)


SLOW_INPUT = times(input=[1.0, 6.0, 1.0], computing=[4.0, 4.0, 4.0], waiting=[5.0, 0.0, 5.0])


def test_the_slowest_rank_is_named_with_its_phase_and_where_known_its_host():
    assert slowest(SLOW_INPUT) == ("rank 1 spends 60% of the time on input; "
                                   "the others spend 50% waiting for it")
    assert slowest(SLOW_INPUT, ["a", "b", "c"]).startswith("rank 1 on b spends 60%")


@pytest.mark.parametrize("alike", [
    times(input=[1.0]), times(input=[0.0, 0.0]),
    times(computing=[9.0, 9.5], waiting=[1.0, 0.5])])
def test_no_rank_is_named_where_there_is_none(alike):
    assert slowest(alike) == ""


def test_the_table_has_phases_that_count_and_ends_with_the_slowest_rank():
    lines = table(SLOW_INPUT, ["a", "b", "c"]).splitlines()
    assert lines[0] == "hvdtrain time     10.0 s"
    assert lines[1] == "  input           10%   from 10% (rank 0) to 60% (rank 1)"
    assert [line.split()[0] for line in lines[1:-1]] == ["input", "computing", "waiting"]
    assert lines[-1].startswith("rank 1 on b spends")
    assert table(times(input=[2.0])).splitlines()[1:] == ["  input          100%"]
