"""Multi-rank tests as ordinary tests: `@pytest.mark.ranks(n, collective="horovod-gloo")`.

Under plain pytest, all selected tests of one file with the same size and collective run in one
launch (`hvdtrain launch ... -- python -m pytest FILE::TEST ...`), since each launch imports
TensorFlow. On the ranks they are ordinary tests; each rank writes its outcomes to a file, and a
test passes if it passed on every rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

RESULTS_VARIABLE = "HVDTRAIN_TEST_RESULTS"
COLLECTIVE_VARIABLE = "HVDTRAIN_TEST_COLLECTIVE"
TIMEOUT_S = 400


def pytest_configure(config):
    if RESULTS_VARIABLE in os.environ:
        config.pluginmanager.register(OnRank(Path(os.environ[RESULTS_VARIABLE])), "on_rank")
    else:
        config.pluginmanager.register(RankLauncher(), "rank_launcher")


@pytest.fixture(scope="session")
def rank_session():
    """This rank's `hvdtrain.Session`; only in tests marked `ranks`."""
    import hvdtrain
    return hvdtrain.init(collective=os.environ[COLLECTIVE_VARIABLE])


class OnRank:
    """Writes this rank's outcomes, one JSON line per test."""

    def __init__(self, folder):
        rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
        self._file = (folder / f"rank{rank}.jsonl").open("w")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._file.write(json.dumps({
                "test": report.nodeid, "outcome": report.outcome,
                "text": str(report.longrepr or ""), "seconds": report.duration}) + "\n")
            self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config):
        # A failing rank must end at once: its peers may wait for it in a collective.
        sys.stdout.flush()
        status = getattr(config, "_rank_status", 0)
        if status:
            os._exit(int(status))

    def pytest_sessionfinish(self, session, exitstatus):
        session.config._rank_status = exitstatus


class RankLauncher:
    """Starts the ranks for a group of tests and reports for each of them."""

    def __init__(self):
        self._groups = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        marker = item.get_closest_marker("ranks")
        if marker is None:
            return None
        key = self._key(item)
        if key not in self._groups:
            tests = [i.nodeid for i in item.session.items if self._key(i) == key]
            self._groups[key] = run_group(key, tests, Path(str(item.config.rootpath)))
        outcome, text, seconds = self._groups[key][item.nodeid]
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        item.ihook.pytest_runtest_logreport(report=pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords=dict(item.keywords),
            outcome=outcome, longrepr=text or None, when="call", duration=seconds))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # What pytest itself does after a test: fixtures that the next one does not need end here.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @staticmethod
    def _key(item):
        marker = item.get_closest_marker("ranks")
        if marker is None:
            return None
        return (str(item.path), marker.args[0], marker.kwargs.get("collective", "horovod-gloo"))


def run_group(key, tests, root):
    """Run `tests` on `n` ranks; returns {test: (outcome, text, seconds)}."""
    _, n, collective = key
    starter = "native" if collective == "horovod-gloo" else "mpirun"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-ranks-") as folder:
        command = [
            sys.executable, "-m", "hvdtrain", "launch", "-np", str(n), "--starter", starter,
            "--collective", collective, "--timeout", str(TIMEOUT_S), "-v", "--",
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environ = {**os.environ, RESULTS_VARIABLE: folder, COLLECTIVE_VARIABLE: collective,
                   "TF_CPP_MIN_LOG_LEVEL": "3"}
        started = time.monotonic()
        done = subprocess.run(command, cwd=root, env=environ, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        seconds = time.monotonic() - started
        return collect(Path(folder), n, tests, done, seconds)


def collect(folder, n, tests, done, seconds):
    """A test's outcome is that of the ranks together."""
    per_rank = []
    for rank in range(n):
        file = folder / f"rank{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        per_rank.append({r["test"]: r for r in map(json.loads, lines)})
    tail = "\n".join(done.stdout.splitlines()[-60:])
    somebody_failed = any(r["outcome"] == "failed" for rank in per_rank for r in rank.values())
    results = {}
    for test in tests:
        got = [results_of_rank.get(test) for results_of_rank in per_rank]
        failed = [f"--- rank {r}: {g['text']}" for r, g in enumerate(got)
                  if g is not None and g["outcome"] == "failed"]
        missing = [str(r) for r, g in enumerate(got) if g is None]
        took = max([g["seconds"] for g in got if g is not None], default=seconds)
        if failed:
            results[test] = ("failed", "\n".join(failed), took)
        elif missing:
            results[test] = ("failed", f"no result from rank {', '.join(missing)} "
                             f"(exit code {done.returncode} after {seconds:.0f} s):\n{tail}", took)
        elif done.returncode and not somebody_failed:
            results[test] = ("failed", f"the launch ended with {done.returncode}:\n{tail}", took)
        else:
            skipped = [g for g in got if g["outcome"] == "skipped"]
            results[test] = (("skipped", ("", 0, skipped[0]["text"]), took) if skipped
                             else ("passed", "", took))
    return results
