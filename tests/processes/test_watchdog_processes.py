"""The watchdog with real processes that hang, stop, die and are slow. No TensorFlow.

The ranks are `watched_rank.py`. Most are started by hand, so that nobody but the watchdog cares
for them; some by our launcher, which must name the cause.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import EXIT_COLLECTIVE
from hvdtrain.errors import EXIT_TIME_OVER as EXIT_HANG
from hvdtrain.launch.execute import launch
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan
from hvdtrain.runtime.watchdog_judge import LOST_GRACE_S
from tests.launch_facts import facts

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("watched_rank.py"))
LIMIT_S = 2.0
SLACK_S = 2.0


class Ranks:
    """Ranks that were started by hand, as by a starter that looks after none of them."""

    def __init__(self, folder, fault, faulty, *, size=3, limit_s=LIMIT_S):
        self.folder, self.faulty = folder, faulty
        self.processes = []
        for rank in range(size):
            environ = {name: value for name, value in os.environ.items()
                       if not name.startswith(("HOROVOD_", "HVDTRAIN_"))}
            environ |= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size),
                        "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": str(size),
                        "HOROVOD_HOSTNAME": "here", "PYTHONPATH": str(ROOT)}
            self.processes.append(subprocess.Popen(
                [sys.executable, PROGRAM, str(folder), str(limit_s), fault, str(faulty)],
                env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))

    def end(self, within_s):
        """Their exit codes and what they wrote to standard error, counted from the fault."""
        deadline = time.monotonic() + 10.0
        while not (self.folder / "fault").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        texts = [None] * len(self.processes)
        for rank, process in enumerate(self.processes):
            if rank != self.faulty:
                texts[rank] = process.communicate(timeout=within_s + 10.0)[1]
        seconds = time.monotonic() - began
        assert seconds < within_s, f"took {seconds:.1f} s: {texts}"
        return texts

    def codes(self):
        return [process.poll() for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(*args, **kwargs):
        started.append(Ranks(tmp_path, *args, **kwargs))
        return started[-1]
    yield start
    for some in started:
        some.kill()


def test_a_rank_that_hangs_ends_all_and_is_named_with_its_stack(ranks):
    some = ranks("hang", 1)
    texts = some.end(LIMIT_S + SLACK_S)
    hung = some.processes[1].communicate(timeout=1.0)[1]
    assert some.codes() == [EXIT_HANG] * 3
    for text in (*texts[::2], hung):
        assert re.search(
            r"^hvdtrain: deadlock: rank 1 on here has been at step 4 for \d s in read_a_bad_disk "
            r"\(watched_rank.py:\d+\); the others wait for it at step 5\.", text, re.MULTILINE)
    assert "[rank 1/3 here] the Python stacks of this rank:" in hung
    assert re.search(r'watched_rank.py", line \d+ in read_a_bad_disk', hung)
    for rank in (0, 2):
        assert f"[rank {rank}/3 here] the Python stacks of this rank:" in texts[rank]
        assert "in wait_in_the_collective" in texts[rank]
    # A warning comes first, from rank 0 alone.
    assert texts[0].startswith("[rank 0/3 here] rank 1 on here has been at step 4")
    assert "the others wait" not in texts[2].split("the Python stacks")[0]


def test_rank_0_that_hangs_is_named_too(ranks):
    some = ranks("hang", 0)
    texts = some.end(LIMIT_S + SLACK_S)
    some.processes[0].wait(1.0)
    assert some.codes() == [EXIT_HANG] * 3
    assert "deadlock: rank 0 on here has been at step 4" in texts[1]


def test_a_rank_whose_data_does_not_come_is_named_although_all_are_equally_far(ranks):
    some = ranks("hang in reading", 2)
    texts = some.end(LIMIT_S + SLACK_S)
    assert re.search(r"deadlock: rank 2 on here has been reading data for \d s in read_a_bad_disk",
                     texts[0])


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_stopped_rank_is_named_by_the_others(ranks, faulty):
    some = ranks("stop", faulty)
    texts = some.end(LIMIT_S + SLACK_S)
    codes = some.codes()
    assert codes.pop(faulty) is None  # it cannot even leave
    assert codes == [EXIT_HANG] * 2
    texts.pop(faulty)
    for text in texts:
        assert f"hvdtrain: rank {faulty} on here did not answer for 2 s" in text


def test_a_rank_whose_lock_is_held_by_native_code_shows_its_stack(ranks):
    some = ranks("lock", 1)
    texts = some.end(LIMIT_S + SLACK_S)
    assert "rank 1 on here did not answer" in texts[0]
    some.processes[1].kill()
    stacks = some.processes[1].communicate(timeout=1.0)[1]
    assert "Timeout (0:00:02)!" in stacks
    assert re.search(r'watched_rank.py", line \d+ in do', stacks)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_killed_rank_ends_the_others_under_a_starter_that_does_not(ranks, faulty):
    # The limit is long: it is the end of the connection that counts.
    some = ranks("kill", faulty, limit_s=60.0)
    texts = some.end(LOST_GRACE_S + 2 * 1.0 + SLACK_S)
    codes = some.codes()
    assert codes.pop(faulty) == -signal.SIGKILL
    assert codes == [EXIT_COLLECTIVE] * 2
    texts.pop(faulty)
    for text in texts:
        assert f"hvdtrain: rank {faulty} on here ended without a word" in text


def test_a_rank_that_leaves_early_is_named_when_the_others_wait_for_it(ranks):
    some = ranks("leave", 1)
    texts = some.end(LIMIT_S + SLACK_S)
    assert some.codes() == [EXIT_HANG, 0, EXIT_HANG]
    assert "deadlock: rank 1 on here has ended, and the others have been waiting at step 5" in \
        texts[0]


def test_a_slow_phase_is_no_deadlock_but_is_told(ranks):
    some = ranks("save", 1, limit_s=1.0)  # it saves for three seconds
    texts = some.end(6.0)
    assert some.processes[1].communicate(timeout=2.0)[0] == "done\n"
    assert some.codes() == [0, 0, 0]
    assert re.search(r"rank 1 on here has been saving a checkpoint for 1 s .*"
                     r"the others wait for it at step 5", texts[0])
    assert "deadlock" not in texts[0]


def test_a_job_that_was_stopped_for_long_goes_on(ranks):
    """All ranks of it, as by a scheduler that suspends jobs: nobody was silent."""
    some = ranks("save", 1, limit_s=1.0)
    while not (some.folder / "fault").exists():
        time.sleep(0.01)
    for process in some.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    for process in some.processes:
        process.send_signal(signal.SIGCONT)
    texts = some.end(6.0)
    some.processes[1].wait(2.0)
    assert (some.codes(), "did not answer" in "".join(t or "" for t in texts)) == ([0] * 3, False)


@pytest.mark.parametrize("limit_s", [0.0, TrainConfig().hang_timeout_s])
def test_an_ordinary_end_is_quick_and_quiet(ranks, limit_s):
    some = ranks("none", 0, limit_s=limit_s)
    outputs = [process.communicate(timeout=10.0) for process in some.processes]
    assert outputs == [("done\n", "")] * 3
    assert some.codes() == [0, 0, 0]


def test_a_job_without_a_watchdog_hangs(ranks):
    """What the watchdog is for."""
    some = ranks("hang", 1, limit_s=0.0)
    while not (some.folder / "fault").exists():
        time.sleep(0.01)
    time.sleep(LIMIT_S + SLACK_S)
    assert some.codes() == [None] * 3


def under_our_launcher(folder, fault, capfd):
    options = LaunchOptions(
        command=(sys.executable, PROGRAM, str(folder), str(LIMIT_S), fault, "1"), np=2,
        starter="native", grace_s=1.0, env=(f"PYTHONPATH={ROOT}",))
    code = launch(make_plan(options, dict(os.environ), facts()))
    said = [line.removeprefix("hvdtrain launch: ") for line in capfd.readouterr().err.splitlines()
            if line.startswith("hvdtrain launch: ")]
    return code, said


def test_our_launcher_names_the_rank_that_hangs(tmp_path, capfd):
    code, said = under_our_launcher(tmp_path, "hang", capfd)
    assert code == EXIT_HANG
    assert re.match(r"rank 1 on localhost failed \d\.\d s after the start: exit code 124, "
                    r"Deadlock: rank 1 on localhost has been at step 4", said[0])
    assert said[1:] == ["the others: 1 left with code 124"]


def test_our_launcher_tells_of_a_stopped_rank_and_ends_it(tmp_path, capfd):
    code, said = under_our_launcher(tmp_path, "stop", capfd)
    assert code == EXIT_HANG
    assert re.match(r"rank 0 on localhost failed .* exit code 124, RankSilent: ended by the "
                    r"watchdog: rank 1 on localhost did not answer", said[0])
    assert "the others: 1 had to be killed" in said


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("raise", 1, "exit code 1, ValueError: bad sample"), ("kill", 137, "killed by SIGKILL")])
def test_the_true_cause_is_named_before_the_watchdog_speaks(tmp_path, capfd, fault, code, words):
    assert (ended := under_our_launcher(tmp_path, fault, capfd))[0] == code
    assert ended[1][0].startswith("rank 1 on localhost failed")
    assert ended[1][0].endswith(words)
