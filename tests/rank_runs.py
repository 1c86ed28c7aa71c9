"""Multi-rank tests as ordinary tests: `@pytest.mark.ranks(n, collective="horovod-gloo")`.

Under plain pytest, all selected tests of one folder with the same size and collective run in one
launch (`hvdtrain launch ... -- python -m pytest FILE::TEST ...`), whose ranks are forked from a
process with TensorFlow (`tests/preload.py`). On the ranks they are ordinary tests; each rank writes
its outcomes to a file, and a test passes if it passed on every rank. After a failure on the same
line of all ranks they go on with the next test; after any other they end, since some may wait for
the others in a collective.
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

from hvdtrain.collective_names import COLLECTIVES
from tests import preload

RESULTS_VARIABLE = "HVDTRAIN_TEST_RESULTS"
COLLECTIVE_VARIABLE = "HVDTRAIN_TEST_COLLECTIVE"
SIZE_VARIABLE = "HVDTRAIN_TEST_SIZE"
#: A launch is ended when no rank has ended a test for so long.
TIMEOUT_S = 400
#: How long a rank that failed waits for the others to fail as well.
PATIENCE_S = 10.0


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
        self._folder = folder
        self._file = (folder / f"rank{rank}.jsonl").open("w")
        self._session = None

    def pytest_sessionstart(self, session):
        self._session = session

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            place = [report.nodeid, report.when, crash and f"{crash.path}:{crash.lineno}"]
            self._file.write(json.dumps({
                "test": report.nodeid, "outcome": report.outcome, "place": place,
                "text": str(report.longrepr or ""), "seconds": report.duration}) + "\n")
            self._file.flush()
            if report.outcome == "failed" and not self._all_failed_at(place):
                self._session.shouldfail = "not all ranks failed alike"

    def _all_failed_at(self, place):
        """Whether every rank fails here soon: then none waits for another in a collective."""
        size = int(os.environ[SIZE_VARIABLE])
        deadline = time.monotonic() + PATIENCE_S
        while True:
            failed = [any(r["outcome"] == "failed" and r["place"] == place for r in results)
                      for results in read_results(self._folder, size)]
            if all(failed) or time.monotonic() > deadline:
                return all(failed)
            time.sleep(0.1)

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
        return (str(item.path.parent), marker.args[0],
                marker.kwargs.get("collective", "horovod-gloo"))


def run_group(key, tests, root):
    """Run `tests` on `n` ranks; returns {test: (outcome, text, seconds)}."""
    _, n, collective = key
    starter = "mpirun" if COLLECTIVES[collective].needs_mpi else "native"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-ranks-") as folder:
        program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        command = [
            sys.executable, "-m", "hvdtrain", "launch", "-np", str(n), "--starter", starter,
            "--collective", collective, "-v", "--",
            # mpirun adds its own folder to LD_LIBRARY_PATH.
            *(program if starter == "native" else
              ["env", f"LD_LIBRARY_PATH={os.environ.get('LD_LIBRARY_PATH', '')}",
               *preload.forked(*program)])]
        environ = {**os.environ, **preload.environment(), RESULTS_VARIABLE: folder,
                   COLLECTIVE_VARIABLE: collective, SIZE_VARIABLE: str(n),
                   # Ranks would tidy up each other's temporary folders of former runs.
                   "PYTEST_DEBUG_TEMPROOT": folder}
        started = time.monotonic()
        code, output = run_while_tests_end(command, Path(folder), cwd=root, env=environ)
        assert not preload.refusals(output), output
        return collect(Path(folder), n, tests, code, output, time.monotonic() - started)


def run_while_tests_end(command, folder, **options):
    """Run a launch to its end, or kill it (and with it its ranks); returns its code and output."""
    with (folder / "output").open("w") as file:
        launch = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
        began = time.time()
        try:
            while launch.poll() is None:
                last = max((f.stat().st_mtime for f in folder.glob("rank*.jsonl")), default=began)
                if time.time() - last > TIMEOUT_S:
                    file.write(f"no rank has ended a test for {TIMEOUT_S} s\n")
                    break
                time.sleep(0.1)
        finally:
            if launch.poll() is None:
                launch.kill()
            launch.wait()
    return launch.returncode, (folder / "output").read_text(errors="replace")


def read_results(folder, n):
    """What each rank has written so far; a line that is not whole yet is left out."""
    for rank in range(n):
        file = folder / f"rank{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        yield [json.loads(line) for line in lines if line.endswith("\n")]


def collect(folder, n, tests, code, output, seconds):
    """A test's outcome is that of the ranks together."""
    per_rank = [{r["test"]: r for r in rank} for rank in read_results(folder, n)]
    tail = "\n".join(output.splitlines()[-60:])
    whole = all(rank.keys() >= set(tests) for rank in per_rank)
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
                             f"(exit code {code} after {seconds:.0f} s):\n{tail}", took)
        elif code and whole and not somebody_failed:
            results[test] = ("failed", f"the launch ended with {code}:\n{tail}", took)
        else:
            skipped = [g for g in got if g["outcome"] == "skipped"]
            results[test] = (("skipped", ("", 0, skipped[0]["text"]), took) if skipped
                             else ("passed", "", took))
    return results
