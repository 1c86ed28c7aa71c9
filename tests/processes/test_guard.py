"""How a rank fails: what it prints, what it reports, with which code it leaves."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import BuildError, ConfigError
from hvdtrain.process import StopFlag
from hvdtrain.runtime.guard import exit_code_of, install
from hvdtrain.world import detect_world
from hvdtrain.world.failure import FailureRecord

ROOT = Path(__file__).parents[3]
PROGRAM = """
import atexit, os, signal, sys, time
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.guard import install
from hvdtrain.world import detect_world
world = detect_world({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1",
                      "HOROVOD_LOCAL_SIZE": "2"}, hostname="h")
atexit.register(print, "SHUTDOWN")
"""


def rank(body: str, *, report: bool = True) -> subprocess.CompletedProcess[str]:
    """A process that is guarded and runs `body`."""
    variables = {"HVDTRAIN_REPORT": "1"} if report else {}
    program = f"{PROGRAM}\nguard = install(world, {variables!r})\n{body}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=ROOT, timeout=20, check=False)


def record_of(done: subprocess.CompletedProcess[str]) -> FailureRecord:
    record = FailureRecord.from_line(done.stderr.splitlines()[-1])
    assert record is not None
    return record


def test_a_bug_keeps_its_traceback_and_is_reported() -> None:
    done = rank("print('out', end='')\nraise ValueError('bad sample')")
    record = record_of(done)
    assert (done.returncode, done.stdout) == (1, "out")
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert (record.rank, record.host, record.error, record.message, record.primary) == (
        1, "h", "ValueError", "bad sample", True)


def test_an_error_of_the_users_is_its_message_alone() -> None:
    done = rank("raise ConfigError('epochs is 0.')", report=False)
    assert (done.returncode, done.stderr) == (2, "hvdtrain: epochs is 0.\n")


def test_a_consequence_waits_for_its_cause() -> None:
    started = time.monotonic()
    done = rank("raise RuntimeError('Horovod has been shut down')")
    assert time.monotonic() - started > 1.0
    assert not record_of(done).primary


def test_a_context_catches_what_the_caller_would_swallow() -> None:
    done = rank("try:\n    with guard:\n        raise KeyError('x')\nexcept KeyError:\n    pass")
    assert (done.returncode, record_of(done).error) == (1, "KeyError")


@pytest.mark.parametrize(("body", "code", "message"), [
    ("sys.exit(3)", 3, "3"), ("sys.exit('no data')", 1, "no data")])
def test_sys_exit_in_a_context_is_a_failure(body: str, code: int, message: str) -> None:
    done = rank(f"with guard:\n    {body}")
    assert (done.returncode, record_of(done).message, done.stdout) == (code, message, "")


def test_a_script_that_only_calls_init_is_guarded_against_uncaught_errors() -> None:
    done = script("guard.world = world\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
                  "raise ValueError('bad sample')")
    assert (done.returncode, done.stdout, record_of(done).error) == (1, "", "ValueError")


def script(body: str) -> subprocess.CompletedProcess[str]:
    """A script of the user's that `hvdtrain.init` guards."""
    program = (f"{PROGRAM}\nfrom hvdtrain.runtime.guard import ScriptGuard\n"
               f"guard = ScriptGuard({{'HVDTRAIN_REPORT': '1'}})\nguard.install()\n{body}")
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=ROOT, timeout=20, check=False)


ONE_RANK = "guard.world = detect_world({}, hostname='h')\n"


@pytest.mark.parametrize("known", ["", ONE_RANK], ids=["before the rank is known", "one rank"])
def test_a_mistake_in_a_script_is_its_message_and_its_code(known: str) -> None:
    """And Python's own exit handlers run, as they would without a guard."""
    done = script(f"{known}raise ConfigError('epochs is 0.')")
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "SHUTDOWN\n", "hvdtrain: epochs is 0.\n")


def test_a_mistake_in_a_script_on_several_ranks_is_reported() -> None:
    done = script("guard.world = world\nraise ConfigError('epochs is 0.')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "hvdtrain: epochs is 0."
    assert (record_of(done).error, record_of(done).code) == ("ConfigError", 2)


def test_a_bug_in_a_script_of_one_process_ends_as_python_ends_it() -> None:
    done = script(f"{ONE_RANK}raise ValueError('bad sample')")
    assert (done.returncode, done.stdout) == (1, "SHUTDOWN\n")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ValueError: bad sample\n")


def test_a_mistake_that_init_itself_finds_is_its_message_and_its_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import hvdtrain; hvdtrain.init()"], capture_output=True,
        text=True, cwd=ROOT, timeout=20, check=False, env={**os.environ, "HOROVOD_RANK": "0"})
    assert done.returncode == 2
    assert done.stderr.startswith("hvdtrain: HOROVOD_RANK=0 set, but not HOROVOD_SIZE")
    assert done.stderr.count("\n") == 1


def test_a_guard_of_a_script_leaves_nothing_behind() -> None:
    done = script("other = ScriptGuard({})\nother.install()\nguard.uninstall()\n"
                  "assert sys.excepthook == other._hook\nother.uninstall()\n"
                  "assert sys.excepthook is sys.__excepthook__\nsys.ps1 = '>>> '\n"
                  "guard.install()\nassert sys.excepthook is sys.__excepthook__")
    assert done.returncode == 0, done.stderr


def test_ranks_that_fail_alike_print_why_and_not_what_horovod_makes_of_it(tmp_path: Path) -> None:
    """Rank 1 finds the same mistake a moment later, when rank 0 has told it already."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, time\nfrom hvdtrain.errors import ConfigError\n"
        "from hvdtrain.runtime.guard import ScriptGuard\n"
        "from hvdtrain.rendezvous.barrier import rendezvous_barrier\n"
        "from hvdtrain.world import detect_world\n"
        "from tests.cluster.light_rank import horovod\n"
        "guard = ScriptGuard(os.environ)\nguard.install()\n"
        "world = guard.world = detect_world(os.environ)\nhvd = horovod()\n"
        "rendezvous_barrier(world, os.environ)\nhvd.init()\ntime.sleep(0.1 * world.rank)\n"
        "raise ConfigError('epochs is 0.')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "--starter", "native", "--",
         sys.executable, str(program)], capture_output=True, text=True, cwd=ROOT, timeout=60,
        check=False, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 2, done.stderr
    assert sorted(done.stderr.splitlines()) == [
        "[0] hvdtrain: epochs is 0.", "[1] hvdtrain: epochs is 0.",
        "hvdtrain launch: all 2 ranks failed alike: exit code 2, ConfigError: epochs is 0."]


def test_a_rank_that_stops_on_request_is_deaf_to_a_second_request() -> None:
    """`srun --kill-on-bad-exit` sends one as soon as the first rank has left."""
    done = rank("class Stopped(ConfigError):\n    exit_code = 75\nreally = os._exit\n"
                "def leave(code):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
                "    time.sleep(1.1)\n    os.kill(os.getpid(), signal.SIGTERM)\n    really(code)\n"
                "os._exit = leave\nguard.stop.request()\nraise Stopped('stopped')")
    assert done.returncode == 75


def test_a_failing_rank_leaves_no_workers() -> None:
    done = rank("import subprocess\nchild = subprocess.Popen(['/bin/sh', '-c', 'sleep 61; :'])\n"
                "time.sleep(0.2)\nprint(child.pid, flush=True)\nraise ValueError('bad sample')")
    assert done.returncode == 1  # `run` has waited for all that held the pipes
    command = Path(f"/proc/{done.stdout.strip()}/cmdline")
    assert not command.exists() or not command.read_bytes()  # or waits for init to bury it


def test_an_ordinary_end_runs_the_ordinary_shutdown() -> None:
    done = rank("with guard:\n    pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "SHUTDOWN\n", "HVD-DONE\n")


def test_sys_exit_with_0_is_a_failure_while_others_go_on() -> None:
    done = rank("with guard:\n    sys.exit(0)")
    assert (done.returncode, done.stdout, record_of(done).error) == (1, "", "LeftEarlyError")


def test_sys_exit_with_0_is_an_ordinary_end_of_one_process() -> None:
    done = rank("guard = install(detect_world({}, hostname='h'), {'HVDTRAIN_REPORT': '1'})\n"
                "with guard:\n    sys.exit(0)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "SHUTDOWN\n", "HVD-DONE\n")


def test_usr2_prints_the_stacks_and_goes_on() -> None:
    done = rank("def waiting():\n    os.kill(os.getpid(), signal.SIGUSR2)\nwaiting()")
    assert done.returncode == 0
    assert "in waiting" in done.stderr


def test_a_second_signal_ends_at_once_but_not_one_that_was_sent_twice() -> None:
    done = rank("for wait in (0, 0, 1.1, 0):\n    time.sleep(wait)\n"
                "    os.kill(os.getpid(), signal.SIGTERM)\n    print(wait, flush=True)")
    assert (done.returncode, done.stdout) == (143, "0\n0\n")


def test_a_second_signal_leaves_no_children() -> None:
    done = rank("import subprocess\nchild = subprocess.Popen(['/bin/sh', '-c', 'sleep 61; :'])\n"
                "time.sleep(0.2)\nprint(child.pid, flush=True)\nfor _ in range(2):\n"
                "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(1.1)")
    assert done.returncode == 143
    command = Path(f"/proc/{done.stdout.strip()}/cmdline")
    assert not command.exists() or not command.read_bytes()


def test_install_leaves_nothing_behind() -> None:
    def state() -> tuple[object, ...]:
        return (sys.excepthook, signal.getsignal(signal.SIGTERM),
                signal.getsignal(signal.SIGUSR1), faulthandler.is_enabled())

    before = state()
    with install(detect_world({}, hostname="h"), {}) as guard:
        assert sys.excepthook is not before[0]
        signal.raise_signal(signal.SIGUSR1)
        assert (guard.stop.requested, guard.stop.signal_number) == (True, signal.SIGUSR1)
    assert state() == before


def test_a_stop_can_be_asked_for_without_a_signal() -> None:
    flag = StopFlag()
    assert not flag.requested
    flag.request()
    assert flag.requested


@pytest.mark.parametrize(("error", "code"), [
    (ConfigError("x"), 2), (BuildError("x"), 4), (KeyboardInterrupt(), 130), (OSError(), 1)])
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


