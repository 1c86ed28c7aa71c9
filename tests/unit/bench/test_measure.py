"""From recorded files to figures: the first epoch never counts, and all engines count alike."""

import json

import pytest

from hvdtrain.bench.measure import Batches, NotMeasuredError, figures_of, measure, read_series
from hvdtrain.bench.options import CompareOptions

LINES = [
    {"epoch": 1, "loss": 2.0, "val_accuracy": 0.5, "samples": 100, "seconds": 5.0,
     "time_s": 105.0},
    {"epoch": 2, "loss": 1.0, "val_accuracy": 0.8, "samples": 100, "seconds": 2.0,
     "time_s": 107.0},
    {"epoch": 3, "loss": 0.5, "val_accuracy": 0.9, "samples": 100, "seconds": 1.9,
     "time_s": 109.0},
]
BATCHES = Batches(workers=2, batch_per_rank=25)


def usage(*rows):
    """Lines of a usage file from (time, cpu, sent, received, memory)."""
    names = ("time_s", "cpu_s", "bytes_sent", "bytes_received", "rss_mb")
    return [dict(zip(names, row, strict=True)) for row in rows]


STEADY = usage((100, 0, 0, 0, 10), (104, 4, 4000, 400, 90), (106, 6, 6000, 600, 80),
               (110, 8, 10000, 1000, 70))


def test_speed_is_that_between_the_end_of_the_first_epoch_and_the_end_of_the_last():
    figures = figures_of(LINES, {}, BATCHES)
    assert (figures.measured_s, figures.steps) == (4.0, 4)
    assert figures.samples_per_s == 50.0
    assert figures.steps_per_s == 1.0
    assert figures.train_s == 9.0
    assert figures.final == {"loss": 0.5, "val_accuracy": 0.9}


def test_counters_are_read_in_proportion_at_the_ends_of_epochs():
    used = figures_of(LINES, {"rank0": read_series(STEADY)}, BATCHES).usage["rank"]
    # At 105 s: halfway from 104 to 106; at 109 s: three quarters from 106 to 110.
    assert used.cpu_ms == pytest.approx(1000 * (7.5 - 5.0) / 4)
    assert used.bytes_sent == pytest.approx((9000 - 5000) / 4)
    assert used.bytes_received == pytest.approx((900 - 500) / 4)
    assert used.peak_mb == 90


def test_processes_of_a_role_are_put_together():
    series = {name: read_series(STEADY) for name in ("chief", "worker0", "worker1", "ps0")}
    usage_of = figures_of(LINES, series, BATCHES).usage
    assert {role: used.processes for role, used in usage_of.items()} == {
        "chief": 1, "worker": 2, "server": 1}
    assert usage_of["worker"].cpu_ms == pytest.approx(2 * usage_of["chief"].cpu_ms)
    assert usage_of["worker"].bytes_sent == pytest.approx(usage_of["chief"].bytes_sent)


def test_the_counters_of_a_process_that_was_started_again_go_on():
    series = read_series(usage((100, 5, 500, 50, 1), (101, 6, 600, 60, 1), (102, 1, 100, 10, 1),
                               (103, 2, 200, 20, 1)))
    assert series.counters["cpu_s"] == (5, 6, 7, 8)
    assert series.counters["bytes_sent"] == (500, 600, 700, 800)


def test_before_the_first_and_after_the_last_line_counters_stand_still():
    series = read_series(usage((106, 1, 10, 1, 1), (107, 2, 20, 2, 1)))
    assert (series.at("cpu_s", 100), series.at("cpu_s", 106.25), series.at("cpu_s", 200)) == (
        1, 1.25, 2)


@pytest.mark.parametrize(("synchronous", "samples", "steps"), [
    (True, 100, 2), (True, 101, 3), (False, 100, 2), (False, 101, 2.5), (False, 126, 3)])
def test_a_smaller_last_batch_is_a_step(synchronous, samples, steps):
    assert Batches(workers=2, batch_per_rank=25, synchronous=synchronous).steps(samples) == steps


@pytest.mark.parametrize(("target", "seconds", "epoch"), [
    ("val_accuracy=0.8", 7.0, 2), ("loss=0.5", 9.0, 3), ("val_accuracy=0.95", None, None)])
def test_time_to_a_target_begins_with_the_first_epoch(target, seconds, epoch):
    wanted = CompareOptions(job="j.toml", target=target).wanted_target()
    figures = figures_of(LINES, {}, BATCHES, wanted)
    assert (figures.target_s, figures.target_epoch) == (seconds, epoch)


def write(folder, lines, text=""):
    (folder / "train").mkdir(parents=True)
    (folder / "usage").mkdir()
    (folder / "train/metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "usage/rank0.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in STEADY) + text)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    write(tmp_path, LINES, text='{"time_s": 11')
    figures, lines = measure(tmp_path, BATCHES)
    assert lines == LINES
    assert figures.usage["rank"].bytes_sent == 1000


@pytest.mark.parametrize(("lines", "message"), [
    ([], "has 0 epochs; at least 2"), (LINES[:1], "has 1 epochs"),
    ([{k: v for k, v in line.items() if k != "time_s"} for line in LINES], "has no time_s")])
def test_a_run_without_figures_says_what_is_missing(lines, message, tmp_path):
    write(tmp_path, lines)
    with pytest.raises(NotMeasuredError, match=message):
        measure(tmp_path, BATCHES)
