"""The judgement of rank 0: who is waited for, when it is a deadlock, and when it is none."""

from dataclasses import replace

import pytest

from hvdtrain.runtime.progress import IDLE, Progress
from hvdtrain.runtime.watchdog_judge import (
    RankReport,
    RankView,
    find_stall,
    first_warning_s,
    judge,
)
from hvdtrain.runtime.watchdog_loops import Settings

LIMIT_S = 100.0
NOW_S = 1000.0


def view(rank, count, *, stalled_s=120.0, silent_s=1.0, at="", slow=False, busy="", place="",
         waits=False, state="watched", since_s=0.0):
    return RankView(
        rank=rank, host=f"host{rank}", state=state, since_s=since_s, heard_s=NOW_S - silent_s,
        changed_s=NOW_S - stalled_s,
        report=RankReport(count=count, at=at or f"step {count}", slow=slow, busy=busy, place=place,
                      waits=waits))


def verdict_on(*views):
    return judge(NOW_S, views, LIMIT_S)


def test_the_rank_behind_is_the_cause():
    verdict = verdict_on(view(0, 42), view(1, 41, place="load (data.py:12)"), view(2, 42))
    assert (verdict.kind, verdict.causes) == ("deadlock", (1,))
    assert verdict.text.startswith(
        "rank 1 on host1 has been at step 41 for 120 s in load (data.py:12); the others wait for "
        "it at step 42.")
    assert "hang_timeout_s, which is 100" in verdict.text


def test_several_ranks_behind_are_all_named():
    verdict = verdict_on(view(0, 3), view(1, 2), view(2, 3), view(3, 2))
    assert verdict.causes == (1, 3)
    assert "rank 1 on host1, rank 3 on host3 have been at step 2" in verdict.text
    assert "wait for them" in verdict.text


def test_of_many_ranks_some_are_named():
    verdict = verdict_on(*(view(rank, 2) for rank in range(30)), view(30, 3))
    assert "rank 7 on host7 and 22 more have been" in verdict.text
    assert len(verdict.causes) == 30


@pytest.mark.parametrize("stalled_s", [0.0, 99.9])
def test_a_rank_that_goes_on_is_no_deadlock(stalled_s):
    assert verdict_on(view(0, 42), view(1, 41, stalled_s=stalled_s)) is None


def test_a_rank_that_has_stood_still_for_the_limit_is_a_deadlock():
    verdict = verdict_on(view(0, 42), view(1, 41, stalled_s=100.0))
    assert (verdict.kind, verdict.causes) == ("deadlock", (1,))


def test_a_slow_phase_is_never_a_deadlock_however_long():
    saving = view(0, 42, stalled_s=9999.0, at="saving a checkpoint", slow=True)
    waiting = [view(rank, 43, stalled_s=9999.0) for rank in (1, 2)]
    assert verdict_on(saving, *waiting) is None
    # The others wait in the same phase.
    assert verdict_on(saving, replace(saving, rank=1), replace(saving, rank=2)) is None
    stall = find_stall(NOW_S, [saving, *waiting], LIMIT_S)
    assert stall.slow
    assert stall.text == ("rank 0 on host0 has been saving a checkpoint for 9999 s; the others "
                          "wait for it at step 43")


def test_ranks_that_wait_in_a_slow_phase_do_not_excuse_the_one_that_has_not_reached_it():
    phase = [view(rank, 50, at="evaluating", slow=True) for rank in (0, 2)]
    verdict = verdict_on(phase[0], view(1, 49), phase[1])
    assert (verdict.kind, verdict.causes) == ("deadlock", (1,))
    assert "the others wait for it at evaluating" in verdict.text


def test_equally_far_the_one_whose_data_does_not_come_is_the_cause():
    verdict = verdict_on(view(0, 5), view(1, 5, busy="reading data", place="read (nfs.py:3)"))
    assert verdict.causes == (1,)
    assert "has been reading data for 120 s in read (nfs.py:3); the others wait for it at step 5" \
        in verdict.text


def test_equally_far_the_one_outside_the_collective_is_the_cause():
    inside = "quick_execute (execute.py:53)"
    verdict = verdict_on(view(0, 5, place=inside, waits=True), view(1, 5, place="f (job.py:1)"))
    assert verdict.causes == (1,)
    assert verdict.text.startswith("rank 1 on host1 has been at step 5 for 120 s in f (job.py:1);")


def test_of_a_rank_behind_the_step_is_told_and_not_that_it_reads():
    verdict = verdict_on(view(0, 5), view(1, 4, busy="reading data"))
    assert verdict.text.startswith("rank 1 on host1 has been at step 4 for 120 s; the others")


def test_without_any_difference_all_ranks_are_named():
    verdict = verdict_on(view(0, 5), view(1, 5))
    assert (verdict.kind, verdict.causes) == ("deadlock", (0, 1))
    assert "all 2 ranks that report have been at step 5 for 120 s" in verdict.text


def test_a_silent_rank_is_named_in_any_phase():
    for slow in (False, True):
        verdict = verdict_on(view(0, 42), view(1, 41, silent_s=100.0, slow=slow), view(2, 42))
        assert (verdict.kind, verdict.causes) == ("silent", (1,))
        assert "rank 1 on host1 did not answer for 100 s" in verdict.text


def test_a_rank_that_is_silent_for_a_while_is_what_the_others_wait_for():
    views = [view(0, 42, stalled_s=60.0), view(1, 42, stalled_s=60.0, silent_s=50.0)]
    assert verdict_on(*views) is None
    stall = find_stall(NOW_S, views, LIMIT_S)
    assert stall.causes == (1,)
    assert "rank 1 on host1 has not answered; the others have waited for 60 s" in stall.text
    answered = replace(views[1], heard_s=NOW_S - 49.9)
    assert find_stall(NOW_S, [views[0], answered], LIMIT_S).causes == (0, 1)


def test_where_all_ranks_are_silent_none_is_waited_for():
    stall = find_stall(NOW_S, [view(rank, 42, silent_s=60.0) for rank in (0, 1)], LIMIT_S)
    assert stall.causes == (0, 1)
    assert stall.text == "all 2 ranks that report have been at step 42 for 120 s"


def test_a_lost_rank_ends_the_run_after_a_moment_for_the_true_cause():
    lost = view(1, 41, state="lost", since_s=NOW_S - 2.9)
    assert verdict_on(view(0, 42), lost) is None
    assert find_stall(NOW_S, [view(0, 42), lost], LIMIT_S) is None
    verdict = verdict_on(view(0, 42, stalled_s=0.0), replace(lost, since_s=NOW_S - 3.0))
    assert (verdict.kind, verdict.causes) == ("lost", (1,))
    assert "rank 1 on host1 ended without a word" in verdict.text


def test_a_rank_that_left_early_is_the_cause_when_the_others_hang():
    left = view(1, 41, state="left")
    verdict = verdict_on(view(0, 42), left)
    assert (verdict.kind, verdict.causes) == ("deadlock", (1,))
    assert "rank 1 on host1 has ended, and the others have been waiting at step 42" in verdict.text
    assert verdict_on(view(0, 42, at=IDLE, slow=True), left) is None


def test_a_rank_that_has_not_connected_is_not_judged():
    awaited = view(1, 0, silent_s=900.0, state="awaited")
    assert verdict_on(view(0, 42, stalled_s=1.0), awaited) is None


def test_outside_training_nothing_is_known_and_nothing_said():
    idle = view(0, 0, at=IDLE, slow=True, stalled_s=9999.0)
    assert verdict_on(idle, view(1, 5)) is None
    assert find_stall(NOW_S, [idle, view(1, 5)], LIMIT_S) is None


def test_without_a_limit_nothing_is_judged():
    lost = view(1, 1, state="lost")
    assert judge(NOW_S, [view(0, 2), lost], 0.0) is None


@pytest.mark.parametrize(("limit_s", "slow", "expected"), [
    (300.0, False, 60.0), (20.0, False, 10.0), (300.0, True, 300.0)])
def test_when_a_stall_is_told(limit_s, slow, expected):
    at = "evaluating" if slow else ""
    stall = find_stall(NOW_S, [view(0, 1, slow=slow, at=at), view(1, 2)], limit_s)
    assert first_warning_s(stall, limit_s) == expected


@pytest.mark.parametrize(("limit_s", "size", "interval_s"), [
    (300.0, 2, 1.0), (300.0, 2000, 10.0), (2.0, 2, 0.2), (20.0, 2000, 2.0), (0.0, 2, 1.0)])
def test_how_often_ranks_report(limit_s, size, interval_s):
    assert Settings(hang_timeout_s=limit_s, size=size).interval_s == pytest.approx(interval_s)


# Progress


def test_a_phase_is_slow_and_ends_where_it_began():
    progress = Progress()
    assert (progress.snapshot().at, progress.snapshot().slow) == (IDLE, True)
    progress.advance(7)
    with progress.phase("saving"):
        inside = progress.snapshot()
    after = progress.snapshot()
    assert (inside.at, inside.slow) == ("saving", True)
    assert (after.at, after.slow) == ("step 7", False)
    assert after.count == inside.count + 1 == 3


def test_a_phase_ends_with_an_error_too():
    progress = Progress()
    progress.advance(1)
    with pytest.raises(OSError), progress.phase("saving"):  # noqa: PT011
        raise OSError
    assert not progress.snapshot().slow


def test_a_point_without_a_name_changes_the_count_only():
    progress = Progress()
    progress.enter("building the first step")
    progress.advance()
    now = progress.snapshot()
    assert (now.count, now.at, now.slow) == (2, "building the first step", True)
    progress.advance("the end of epoch 1")
    assert (progress.snapshot().at, progress.snapshot().slow) == ("the end of epoch 1", False)


def test_what_has_been_going_on_longest_is_told():
    progress = Progress()
    with progress.busy("reading data"):
        assert progress.snapshot().busy == "reading data"
        assert progress.snapshot().busy_thread is not None
    assert (progress.snapshot().busy, progress.snapshot().busy_thread) == ("", None)
