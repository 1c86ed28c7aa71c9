"""Which rank is the cause."""

import signal
from dataclasses import replace

import pytest

from hvdtrain.launch.output import is_noise
from hvdtrain.launch.running_job import RankEnd, describe, first_failure
from hvdtrain.world.failure import FailureRecord


def end(rank: int, code: int, time_s: float, *, tail: tuple[str, ...] = (),
        record: FailureRecord | None = None) -> RankEnd:
    return RankEnd(rank=rank, host="h", code=code, time_s=time_s, tail=tail, record=record)


def record(rank: int, time_s: float, *, primary: bool = True) -> FailureRecord:
    return FailureRecord(rank=rank, host="h", time_s=time_s, error="ValueError", message="bad",
                         primary=primary)


LOST = end(0, 1, 3.0, tail=("HorovodInternalError: Connection closed by peer",))


def test_no_failure_has_no_cause() -> None:
    assert first_failure([end(0, 0, 1.0)], None) is None


def test_the_earliest_end_is_the_cause() -> None:
    cause = first_failure([end(0, 1, 2.0), end(1, 3, 1.0), end(2, 0, 0.5)], None)
    assert cause is not None
    assert cause.rank == 1


def test_a_consequence_that_ended_first_is_not_the_cause() -> None:
    lost = end(0, 1, 1.0, tail=("HorovodInternalError: Connection closed by peer",))
    cause = first_failure([lost, end(1, -11, 1.2)], None)
    assert cause is not None
    assert cause.rank == 1


def test_what_ranks_report_counts_more_than_when_they_ended() -> None:
    cause = first_failure([end(0, 1, 1.0, record=record(0, 0.9)),
                           end(1, 1, 1.3, record=record(1, 0.8)),
                           end(2, 1, 0.5, record=record(2, 0.5, primary=False))], None)
    assert cause is not None
    assert cause.rank == 1


@pytest.mark.parametrize(("ends", "rank"), [
    ([end(0, -15, 2.1), end(1, 7, 1.0)], 1),
    ([end(0, 7, 1.5), replace(LOST, rank=1, time_s=1.4)], 0),      # at the moment of the stop
    ([replace(LOST, time_s=1.0), end(1, -15, 2.1)], 0),            # although a consequence
])
def test_what_the_launcher_ended_is_not_the_cause(ends: list[RankEnd], rank: int) -> None:
    cause = first_failure(ends, 1.5)
    assert cause is not None
    assert cause.rank == rank


def test_where_nothing_failed_before_the_stop_the_earliest_end_is_the_cause() -> None:
    cause = first_failure([end(0, -15, 2.1), end(1, -15, 1.9)], 1.5)
    assert cause is not None
    assert cause.rank == 1


@pytest.mark.parametrize(("code", "tail", "secondary"), [
    (1, LOST.tail, True), (1, ("ValueError: bad",), False), (1, (), False),
    (-9, LOST.tail, False), (0, LOST.tail, False)])
def test_an_exit_code_with_words_of_a_lost_rank_is_a_consequence(
        code: int, tail: tuple[str, ...], secondary: bool) -> None:
    assert end(0, code, 1.0, tail=tail).secondary == secondary


@pytest.mark.parametrize(("code", "exit_code", "manner"), [
    (0, 0, "exit code 0"), (7, 7, "exit code 7"), (-9, 137, "killed by SIGKILL"),
    (-11, 139, "killed by SIGSEGV")])
def test_codes_are_those_of_a_shell(code: int, exit_code: int, manner: str) -> None:
    assert (end(0, code, 1.0).exit_code, end(0, code, 1.0).manner) == (exit_code, manner)


def test_describe_tells_who_and_what_became_of_the_others_and_ends_with_the_output() -> None:
    cause = end(1, -signal.SIGKILL, 3.5, tail=("step 1", "step 2"))
    ends = {0: end(0, -15, 3.6), 1: cause, 2: end(2, -9, 5.0)}
    assert describe(cause, ends, np=4, started_s=1.0, log="logs/rank.1.log") == [
        "rank 1 on h failed 2.5 s after the start: killed by SIGKILL",
        "SIGKILL comes from outside: out of memory (see dmesg), a scheduler, a person",
        "the others: 1 ended by SIGTERM, 1 had to be killed, 1 gave no answer",
        "the last lines of rank 1 (all of them in logs/rank.1.log):",
        "  | step 1", "  | step 2"]


def test_an_error_of_the_users_is_not_told_twice() -> None:
    cause = end(0, 2, 1.0, tail=("plan", "hvdtrain: bad"), record=record(0, 1.0))
    assert describe(cause, {0: cause}, np=1, started_s=0.0, log=None) == [
        "rank 0 on h failed 1.0 s after the start: exit code 2, ValueError: bad"]


def test_an_error_that_all_ranks_report_is_told_once() -> None:
    ends = {rank: end(rank, 2, 1.0 + rank, tail=("x",), record=record(rank, 1.0))
            for rank in range(3)}
    assert describe(ends[0], ends, np=3, started_s=0.0, log=None) == [
        "all 3 ranks failed alike: exit code 2, ValueError: bad"]


@pytest.mark.parametrize("line", [
    "I0000 00:00:1764 cpu_feature_guard.cc:210] This TensorFlow binary is optimized",
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "2026-11-28 00:00:00 port.cc:153] oneDNN custom operations are on.",
])
def test_start_up_noise_of_tensorflow_is_known(line: str) -> None:
    assert is_noise(line)


def test_a_failure_record_survives_its_line() -> None:
    assert FailureRecord.from_line(record(3, 1.5).to_line()) == record(3, 1.5)


@pytest.mark.parametrize("line", ["HVD-FAILED", "HVD-FAILED {", 'HVD-FAILED {"rank": 1}', "x"])
def test_other_lines_are_no_failure_record(line: str) -> None:
    assert FailureRecord.from_line(line) is None


@pytest.mark.parametrize(("time_s", "after"), [(2.0, "1.0 s"), (3.0, "2.0 s")])
def test_a_rank_that_left_early_with_0_is_named_first(time_s: float, after: str) -> None:
    lines = describe(LOST, {0: LOST, 1: end(1, 0, time_s), 2: end(2, 0, 3.5)}, np=3, started_s=1.0,
                     log=None)
    assert lines[0] == (f"rank 1 on h left early with code 0, {after} after the start; the others "
                        "could not go on without it")
    assert lines[1].startswith("rank 0 on h failed 2.0 s after the start: exit code 1")
    assert lines[2] == "the others: 2 left with code 0"
    assert "rank 2 on h left" not in "\n".join(lines)


def test_without_a_rank_that_went_first_that_is_said() -> None:
    also = end(1, 1, 3.1, tail=LOST.tail)
    lines = describe(LOST, {0: LOST, 1: also, 2: end(2, 0, 3.5)}, np=3, started_s=1.0, log=None)
    assert lines[:2] == [
        "rank 0 on h failed 2.0 s after the start: exit code 1",
        "every failure seen is of the kind 'another rank has gone', but none was seen to go first"]
