"""`hvdtrain report`: reading `metrics.jsonl`, what the page says of it, and errors."""

import base64
import html
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hvdtrain.bench import report as page_parts
from hvdtrain.bench import run_report
from hvdtrain.bench.run_report import (
    figures_of,
    labels,
    overview,
    read_epochs,
    read_runs,
    times_table,
    verdict,
    write_page,
)
from hvdtrain.cli.main import app, main
from hvdtrain.errors import ConfigError, NotWrittenError
from hvdtrain.runtime.phases import PHASES

EVIL = "<script>alert('$1 & $2')</script>"


def epoch(number, ranks=2, **more):
    line = {"epoch": number, "accuracy": 0.1 * number, "loss": 1 / number, "learning_rate": 0.01,
            "val_loss": 2 / number, "seconds": 2.0, "time_s": 100.0 + number, "samples": 10,
            "samples_per_s": 5.0} | more
    if ranks:
        line["time"] = {name: [0.5] * ranks for name in PHASES} | {
            "waiting": [4.0] * (ranks - 1) + [0.0], "input": [0.5] * (ranks - 1) + [4.5]}
    return line


@pytest.fixture
def run(tmp_path):
    def make(name="run", lines=None, tail=""):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        lines = [epoch(n) for n in (1, 2, 3)] if lines is None else lines
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + tail)
        return folder
    return make


def report(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)], catch_exceptions=False)


def pictures(text):
    return [base64.b64decode(found) for found in re.findall(r'base64,([^"]+)"', text)]


def test_the_page_is_one_file_with_curves_shares_and_the_slowest_rank(run):
    folders = [run("one"), run("two", [epoch(n, ranks=0) for n in range(1, 40)])]
    result = report(*folders)
    page = folders[0] / "report.html"
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{page}\n", "")
    text = page.read_text()
    assert not re.search(r"(src|href)=[\"']?(https?:|//|\w+\.)", text)
    assert re.findall(r"<figcaption>(.*)</figcaption>", text) == [
        "loss and val_loss", "accuracy", "learning_rate", "samples_per_s",
        "shares of the time by phase (medians of the ranks)"]
    for picture in pictures(text):
        assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "Rank 1 spends 56% of the time on input; the others spend 50% waiting for it." in text
    assert "Its metrics.jsonl has no `time`" in text, "of the second run"


def test_text_is_escaped(run):
    name = EVIL.replace("/", "_")
    page = run(f"{name}x") / "report.html"
    other = run(f"{name}y", [epoch(1, **{EVIL: 1.0, "_hidden $": float("nan")})])
    report(page.parent, other)
    text = page.read_text()
    assert "<script" not in text
    assert html.unescape(text).count(EVIL) >= 3  # overview, picture, its title
    assert html.unescape(text).count(name) > 4


def test_the_output_is_where_it_was_asked_for(run, tmp_path):
    page = tmp_path / "new" / "page.html"
    assert report(run(), "-o", page).stdout == f"{page}\n"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_without_matplotlib_there_are_tables(run, monkeypatch):
    for module in (page_parts, run_report):
        monkeypatch.setattr(module, "can_plot", lambda: False)
    folder = run()
    assert "pip install 'hvdtrain[plots]'" in report(folder).stderr
    text = (folder / "report.html").read_text()
    assert "<img" not in text
    assert text.count("<table>") == 2


def test_a_half_line_at_the_end_is_left_out_with_a_warning(run):
    folder = run(tail='{"epoch": 4, "lo')
    stderr = report(folder).stderr
    assert stderr == (f"hvdtrain report: {folder}/metrics.jsonl: line 4, the last one, is not "
                      "whole, as after a kill, and is left out.\n")
    assert "line 4, the last one" in (folder / "report.html").read_text()
    assert len(read_runs([folder])[0].epochs) == 3


def test_a_last_line_without_its_end_of_line_counts():
    epochs, remarks = read_epochs(json.dumps(epoch(1)).encode(), Path("m"))
    assert (len(epochs), remarks) == (1, [])


def test_epochs_are_in_order_and_the_last_of_each_counts():
    data = "".join(json.dumps(epoch(n, loss=loss)) + "\n\n" for n, loss in ((2, 1), (1, 2), (2, 3)))
    assert [(e["epoch"], e["loss"]) for e in read_epochs(data.encode(), Path("m"))[0]] == [
        (1, 2), (2, 3)]


@pytest.mark.parametrize(("content", "problem"), [
    (b"", "has no epoch"),
    (b"\n\n", "has no epoch"),
    (b'{"epoch": 1', "has no epoch"),
    (b'x\n{"epoch": 1}\n', "line 1: found no JSON in 'x'"),
    (b'{"epoch": 1}\n\xff\xfe\n', "line 2: found no JSON"),
    (b"[" * 100_000 + b"\n", "line 1: found no JSON"),
    (b"[1]\n", "line 1: found no object with a whole number as `epoch` in '[1]'"),
    (b'{"epoch": true}\n', "a whole number as `epoch`"),
    (b'{"loss": 1}\n', "a whole number as `epoch`"),
    (b'{"epoch": 1, "time": {}}\n', "not as many seconds"),
    (json.dumps({"epoch": 1, "time": dict.fromkeys(PHASES, [None])}).encode() + b"\n",
     "not as many seconds"),
    (json.dumps(epoch(1, time=None) | {"time": epoch(1)["time"] | {"input": [1.0]}}).encode()
     + b"\n", "not as many seconds"),
])
def test_a_damaged_file_is_told_in_one_line(content, problem):
    with pytest.raises(ConfigError) as error:
        read_epochs(content, Path("metrics.jsonl"))
    text = str(error.value)
    assert text.startswith("metrics.jsonl")
    for part in (problem, "Expected", "leave out the run"):
        assert part in text
    assert "\n" not in text


def test_a_missing_file_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "report", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"hvdtrain: {tmp_path}/none/metrics.jsonl cannot be read: No such ")
    assert "Give the folder of a run" in stderr
    assert stderr.count("\n") == 1


def test_a_page_that_cannot_be_written_is_told(run, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "page.html"):
        with pytest.raises(NotWrittenError, match="cannot be written: .* Give another --output"):
            write_page(read_runs([run(path.name)]), path)


@pytest.mark.parametrize(("folders", "found"), [
    (["/runs/a", "/runs/b"], ["a", "b"]),
    (["/x/run", "/y/run", "/y/other"], ["x/run", "y/run", "other"]),
    (["/run", "/a/run"], ["/run", "a/run"]),
    (["/a/x/run", "/b/x/run"], ["a/x/run", "b/x/run"])])
def test_labels_tell_runs_apart(folders, found):
    assert labels([Path(folder) for folder in folders]) == found


def test_a_run_is_shown_once_and_by_the_name_of_its_folder(run, monkeypatch):
    folder = run("named")
    monkeypatch.chdir(folder)
    assert [found.label for found in read_runs([Path("."), folder])] == ["named"]


def test_figures_have_their_twins_and_their_order(run):
    found = figures_of(read_runs([run(lines=[epoch(
        1, val_accuracy=0.1, val_own=1.0, matrix=[1, 2], name="x", flag=True, nothing=None)])]))
    assert found == {"loss": ["loss", "val_loss"], "accuracy": ["accuracy", "val_accuracy"],
                     "own": ["val_own"], "learning_rate": ["learning_rate"],
                     "samples_per_s": ["samples_per_s"]}


def test_the_overview_has_what_the_last_epoch_reached(run):
    table = overview(read_runs([run("a"), run("b", [{"epoch": 7, "loss": float("inf")}])]))
    assert [row[2:] for row in table.rows] == [
        ("3", "2", "0.3333", "0.6667", "0.3", "0.01", "5"),
        ("1", "-", "inf", "-", "-", "-", "-")]


def test_the_table_of_times(run):
    table = times_table(read_runs([run()])[0])
    rows = {row[0]: row[1:] for row in table.rows}
    assert tuple(rows) == PHASES
    assert rows["input"] == ("7.50 s (31%)", "1.50 s (6%), rank 0", "13.50 s (56%), rank 1")
    assert table.title == "Time by phase: 3 of 3 epochs, ranks: 2"


def test_one_rank_waits_for_none(run):
    single = read_runs([run(lines=[epoch(1, ranks=1)])])[0]
    assert times_table(single).rows[1] == (
        "input", "4.50 s (56%)", "4.50 s (56%), rank 0", "4.50 s (56%), rank 0")
    assert verdict(single).startswith("There is no rank")


def test_after_a_resume_on_other_ranks_the_last_number_counts(run):
    resumed = read_runs([run(lines=[epoch(1, ranks=0), epoch(2, ranks=4), epoch(3, ranks=2)])])[0]
    assert times_table(resumed).title == "Time by phase: 1 of 3 epochs, ranks: 2"
    assert [line["epoch"] for line in resumed.timed] == [2, 3]
    write_page([resumed], resumed.folder / "page.html")


def test_ranks_that_are_alike_are_told_so(run):
    line = epoch(1)
    line["time"]["waiting"] = [0.1, 0.2]
    assert verdict(read_runs([run(lines=[line])])[0]) == (
        "There is no rank for which the others wait 10% of the time.")


def test_a_long_name_leaves_place_for_the_curves(run):
    folders = [run("long-" * 40), run("other")]
    assert report(*folders).exit_code == 0  # matplotlib warns where there is none
