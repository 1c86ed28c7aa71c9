"""A report from recorded runs: its figures, its tables, its page. Nothing is run."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from hvdtrain.bench import plots
from hvdtrain.bench.compare import MeasuredRun, RunEnd, make_report
from hvdtrain.bench.measure import Batches, figures_of, read_series
from hvdtrain.bench.options import CompareOptions
from hvdtrain.bench.plan import make_plan
from hvdtrain.bench.profile import PAYLOAD, ExchangeCost, Profile, ServerCost, Transfer
from hvdtrain.bench.report import (
    bytes_text,
    number,
    remarks,
    render,
    show,
    spread_text,
    tables,
    write_page,
)

EVIL = "<script>alert('$1 & $2')</script>"
M = 4_000_000
MACHINE = {"cores": 2, "processor": EVIL, "memory_gb": 8.0, "system": "Linux",
           "versions": {"keras": "3"}}


def lines_of(seconds):
    return [{"epoch": n, "loss": 1 / n, "val_accuracy": 0.3 * n, "samples": 100,
             "seconds": seconds, "time_s": 100 + seconds * n} for n in (1, 2, 3)]


def usage_of(seconds, sent):
    """Counters that grow evenly by `sent` bytes and 10 ms of CPU per step of two per epoch."""
    steps = [0, 2, 4, 6]
    return read_series([{"time_s": 100 + seconds * n, "cpu_s": 0.01 * step, "rss_mb": 100.0,
                         "bytes_sent": sent * step, "bytes_received": sent * step}
                        for n, step in enumerate(steps)])


def record(plan, number, run):
    """What a run of the plan left, had it gone this way."""
    if run.engine == "allreduce-mpi":
        return MeasuredRun(run=run, end=RunEnd(status="failed", exit_code=7, wall_s=1.0,
                                             lines=("before", EVIL)))
    seconds = {"single": 1.0, "allreduce-gloo": 0.8, "ps-async": 1.6}[run.engine] + 0.1 * run.round
    names = {"single": {"rank0": 0}, "allreduce-gloo": {"rank0": M, "rank1": M},
             "ps-async": {"chief": 10, "worker0": M, "worker1": M, "ps0": 2.2 * M}}[run.engine]
    figures = figures_of(lines_of(seconds), {k: usage_of(seconds, v) for k, v in names.items()},
                         Batches(workers=2, batch_per_rank=25),
                         plan.options.wanted_target())
    return MeasuredRun(run=run, end=RunEnd(status="ok", exit_code=0, wall_s=9.0 + number, lines=()),
                figures=figures, epochs=lines_of(seconds))


def report_of(profile=None, **options):
    plan = make_plan(CompareOptions(**{
        "job": f"{EVIL}.toml", "rounds": 3, "target": "val_accuracy=0.6",
        "engines": ("single", "allreduce-gloo", "allreduce-mpi", "ps-async")} | options),
        cores=2, program=("hvdtrain",), environ={})
    facts = {point.job: {"parameters": M // 4, "parameter_bytes": M, "samples": 100,
                         "batch_per_rank": 25, "epochs": 3} for point in plan.points}
    done = [record(plan, number, run) for number, run in enumerate(plan.runs)]
    report = make_report(plan, facts, done, machine=MACHINE,
                         profiles={f"{EVIL}.toml": profile} if profile else {})
    return json.loads(json.dumps(report))  # what is written can be read again


@pytest.fixture(scope="module")
def report():
    return report_of()


@pytest.fixture(scope="module")
def network_report():
    return report_of(network=("100mbit",), hosts=(2, 3))


def test_rounds_become_median_and_range(report):
    gloo = report["points"][0]["engines"]["allreduce-gloo"]["summary"]
    assert gloo["samples_per_s"]["median"] == pytest.approx(100)  # 0.8 + 0.2 s for 100 samples
    assert gloo["samples_per_s"]["least"] == pytest.approx(100 / 1.1)
    assert gloo["samples_per_s"]["most"] == pytest.approx(100 / 0.9)
    assert gloo["samples_per_s"]["count"] == 3
    assert gloo["step_ms"]["median"] == pytest.approx(500)
    assert gloo["target_s"]["median"] == pytest.approx(2.0)
    assert gloo["target_reached"] == 3


def test_efficiency_is_against_as_many_single_processes(report):
    engines = report["points"][0]["engines"]
    assert engines["single"]["summary"]["efficiency"] == pytest.approx(1.0)
    assert engines["allreduce-gloo"]["summary"]["efficiency"] == pytest.approx(1.2 / 2)


def test_measured_bytes_stand_beside_computed_ones(report):
    point = report["points"][0]
    assert point["engines"]["ps-async"]["computed"]["roles"] == {"worker": M, "server": 2 * M}
    assert point["engines"]["allreduce-gloo"]["computed"]["roles"]["rank"] == M
    rows = {row[:2]: row for row in _table(point, "Bytes per step").rows}
    assert rows["allreduce-gloo", "rank"][2:5] == ("4 MB", "4 MB", "1.00")
    assert rows["ps-async", "server"][2:5] == ("8 MB", "8.8 MB", "1.10")
    assert ("ps-async", "chief") not in rows


def test_the_bound_of_the_network(network_report):
    two, three = network_report["points"]
    assert two["engines"]["allreduce-gloo"]["computed"]["seconds"] == pytest.approx(0.32)
    assert three["engines"]["allreduce-gloo"]["computed"]["seconds"] == pytest.approx(0.32 * 4 / 3)
    # Three workers, one server on the first one's host: two pull and push there.
    assert three["engines"]["ps-async"]["computed"]["seconds"] == pytest.approx(0.64)
    row = next(row for row in _table(two, "Step time").rows if row[0] == "allreduce-gloo")
    assert row[1:5] == ("4 MB", "320", "320", "-")
    assert row[6:] == ("1.56", "1.56", "-")
    row = next(row for row in _table(three, "Step time").rows if row[0] == "ps-async")
    assert row[3] == "-", "nothing is expected of servers beside workers"
    assert "single" not in three["engines"]
    assert three["engines"]["allreduce-gloo"]["summary"]["efficiency"] == pytest.approx(1.2 / 3)


def test_predictions_stand_beside_what_was_measured():
    profile = Profile(
        samples=100, batch=25, fixed_s=0.1, sample_s=0.0, update_s=0.0, loop_s=0.0, cores=2,
        cores_used=2.0, parameter_bytes=M, transfers=(Transfer(ready_s=0.1, size=M),),
        exchange={"horovod-gloo": ExchangeCost(fixed_s=0.0, byte_s=0.0)},
        servers=ServerCost(step_s=0.1, worker_cpu_s=0.0, server_cpu_s=0.0, chief_cpu_s=0.0))
    point, = report_of(profile, network=("100mbit",), hosts=(2,))["points"]
    rows = {row[0]: row for row in _table(point, "Step time").rows}
    # Two ranks with 0.1 s each on two cores of which each needs both, then 0.32 s of payload.
    predicted_ms = 1000 * (2 * 0.1 + 0.32 / PAYLOAD)
    assert rows["allreduce-gloo"][4] == number(predicted_ms)
    assert rows["allreduce-gloo"][8] == f"{500 / predicted_ms:.2f}"
    assert rows["ps-async"][4] == "-", "servers stand beside workers"
    apart, = report_of(profile, network=("100mbit",), hosts=(2,), servers_on="apart")["points"]
    assert apart["engines"]["ps-async"]["computed"]["predicted_seconds"] > 0.9


def _table(point, title):
    return next(table for table in tables(point, None) if table.title.startswith(title))


def test_the_terminal_shows_tables_and_failures(report):
    stream = io.StringIO()
    show(report, Console(file=stream))
    text = stream.getvalue()
    for part in ("allreduce-gloo", "100 (90.9-111)", "60 %", "failed 3 of 3",
                 "allreduce-mpi (workers 2, round 1): failed, exit code 7. Its last lines:"):
        assert part in text


def test_a_measurement_that_is_short_is_told(report):
    assert remarks(report) == [
        "Measured for less than 5 s: allreduce-gloo, ps-async, single. Counters are read five "
        "times a second, so that bytes and CPU per step are uncertain. Give more --epochs."]
    long = json.loads(json.dumps(report))
    for told in long["points"][0]["engines"].values():
        if told["summary"]:
            told["summary"]["measured_s"]["median"] = 5.0
    assert remarks(long) == []


class Tags(HTMLParser):
    """Collects the tags of a page, and its images."""

    def __init__(self):
        super().__init__()
        self.tags, self.images, self.text = set(), [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"])

    def handle_data(self, data):
        self.text += data


def test_the_page_escapes_all_it_shows(report):
    parsed = Tags()
    parsed.feed(render(report))
    assert "script" not in parsed.tags
    assert parsed.text.count(EVIL) > 3  # name, processor, last lines of a run, commands


def test_the_page_is_one_file_with_its_plots(network_report, tmp_path):
    text = write_page(network_report, tmp_path).read_text()
    parsed = Tags()
    parsed.feed(text)
    assert not re.search(r"(src|href)=[\"']?(https?:|//|\w+\.)", text)
    prefix = "data:image/svg+xml;base64,"
    assert len(parsed.images) == 2 * 5 + 3  # for each number of hosts, and over them
    for image in parsed.images:
        svg = ElementTree.fromstring(base64.b64decode(image.removeprefix(prefix)))
        assert svg.tag.endswith("svg")


def test_plots_over_points_are_drawn_for_each_axis_with_numbers(network_report):
    titles = [title for label, title, _ in plots.draw(network_report) if not label]
    assert titles == [
        "step time against hosts, network 100mbit (dotted: bound of the network)",
        "processor time per step and role against hosts, network 100mbit",
        "bytes sent per step and role against hosts, network 100mbit"]


def test_a_report_without_any_result_can_be_shown(report, tmp_path):
    empty = {**report, "points": [{**report["points"][0], "engines": {
        "allreduce-mpi": report["points"][0]["engines"]["allreduce-mpi"]}}], "interrupted": True}
    text = write_page(empty, tmp_path).read_text()
    assert "Interrupted after" in text
    assert "<img" not in text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234"), (0.00123, "0.00123"),
    (None, "-")])
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (4_480_000, "4.48 MB"), (2e13, "20 TB"),
    (3e16, "3e+04 TB"), (None, "-")])
def test_bytes(value, text):
    assert bytes_text(value) == text


def test_one_round_has_no_range():
    one = {"median": 5.0, "least": 5.0, "most": 5.0, "count": 1}
    assert spread_text(one) == "5"
    assert spread_text(None) == "-"
