"""Real ranks under our own launcher: how jobs end, and that nothing is left behind.

The ranks are shell and tiny Python programs. Each carries a mark on its command line by which
leftovers are found.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.launch.execute import launch
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan
from tests.launch_facts import facts

LIMIT_S = 5.0  # on a loaded machine; the ranks would run for a minute
PYTHON = (sys.executable, "-I", "-S", "-c")


def processes(mark: str) -> list[str]:
    """The command lines of living processes that hold the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in words:
                found.append(words.replace("\0", " "))
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for the ranks' command lines; afterwards no process may hold it."""
    word = f"mark{uuid.uuid4().hex}"
    yield word
    deadline = time.monotonic() + LIMIT_S
    while processes(word) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes(word) == []


def shell(text: str, mark: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", text, mark)


def job(command: tuple[str, ...], np: int = 2, **options: Any) -> int:
    options = {"starter": "native"} | options
    return launch(make_plan(LaunchOptions(command=command, np=np, **options), {}, facts()))


def test_all_ranks_get_their_place_and_end_with_0(mark: str, capfd: pytest.CaptureFixture[str]
                                                  ) -> None:
    text = ('echo "$HOROVOD_RANK $HOROVOD_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_LOCAL_SIZE '
            '$HOROVOD_CROSS_RANK $HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME $HVDTRAIN_STARTER '
            '$OMP_NUM_THREADS $HOROVOD_CONTROLLER $NAME" >&2; echo chief only')
    assert job(shell(text, mark), np=3, env=("NAME=a b",)) == 0
    out, err = capfd.readouterr()
    assert out == "[0] chief only\n"
    assert sorted(err.splitlines()) == [
        f"[{rank}] {rank} 3 {rank} 3 0 1 localhost native 2 gloo a b" for rank in range(3)]


def test_the_rendezvous_is_there_and_ends_with_the_job(mark: str,
                                                       capfd: pytest.CaptureFixture[str]) -> None:
    text = """import http.client, os
address, _, capability = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
assert address.endswith(":" + os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
c = http.client.HTTPConnection(address)
c.request("PUT", f"/{capability}/global/0", b"v"); assert c.getresponse().read() == b""; c.close()
c.request("GET", f"/{capability}/global/0"); print(c.getresponse().read())"""
    assert job((*PYTHON, text, mark), np=1) == 0
    assert capfd.readouterr().out == "b'v'\n"


def test_a_rank_that_exits_ends_the_job_with_its_code(mark: str,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    text = '[ $HOROVOD_RANK = 1 ] && { echo broken; exit 7; }; exec sleep 60'
    assert job((*shell(text, mark),), np=3) == 7
    assert time.monotonic() - started < LIMIT_S
    err = capfd.readouterr().err.splitlines()
    assert err[0].startswith("hvdtrain launch: rank 1 on localhost failed 0.")
    assert err[0].endswith("after the start: exit code 7")
    assert err[1:] == ["hvdtrain launch: the others: 2 ended by SIGTERM",
                       "hvdtrain launch: the last lines of rank 1:",
                       "hvdtrain launch:   | broken"]


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("raise ValueError('bad sample')", 1, "ValueError: bad sample"),
    ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
    ("os.kill(os.getpid(), 11)", 139, "SIGSEGV"),
])
def test_a_rank_that_breaks_is_named(mark: str, capfd: pytest.CaptureFixture[str], fault: str,
                                     code: int, words: str) -> None:
    started = time.monotonic()
    text = (f"import os, time\nif os.environ['HOROVOD_RANK'] == '1':\n    {fault}\n"
            "time.sleep(60)")
    assert job((*PYTHON, text, mark)) == code
    assert time.monotonic() - started < LIMIT_S
    err = capfd.readouterr().err
    assert "hvdtrain launch: rank 1 on localhost failed" in err
    assert words in err


def test_a_consequence_seen_first_is_not_blamed(mark: str, capfd: pytest.CaptureFixture[str]
                                                ) -> None:
    text = """if [ $HOROVOD_RANK = 0 ]; then
echo "HorovodInternalError: Connection closed by peer" >&2; exit 1
fi; sleep 0.5; echo "real reason" >&2; exit 5"""
    assert job(shell(text, mark)) == 5
    assert "rank 1 on localhost failed" in capfd.readouterr().err


def test_a_child_that_holds_the_output_open_does_not_delay_the_end(mark: str) -> None:
    started = time.monotonic()
    text = f'/bin/sh -c "sleep 60; : {mark}" & [ $HOROVOD_RANK = 1 ] && exit 3; wait'
    assert job(shell(text, mark)) == 3
    assert time.monotonic() - started < LIMIT_S


def test_a_child_outside_the_group_does_not_delay_the_end(mark: str) -> None:
    started = time.monotonic()
    assert job(shell("setsid sleep 1.5 & exit 0", mark)) == 0
    assert time.monotonic() - started < 1.0


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(
        mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    text = '[ $HOROVOD_RANK = 1 ] && exit 3; trap "" TERM; while :; do sleep 0.1; done'
    assert job(shell(text, mark), grace_s=0.3) == 3
    assert time.monotonic() - started < LIMIT_S
    assert "the others: 1 had to be killed" in capfd.readouterr().err


def test_a_program_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert job(("/no/such/program",)) == 127
    assert "cannot be started: " in capfd.readouterr().err


def test_the_time_limit_ends_the_job(mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert job(shell("exec sleep 60", mark), timeout_s=0.3) == 124
    assert time.monotonic() - started < LIMIT_S
    assert "the limit of 0.3 s is over" in capfd.readouterr().err


def test_ranks_that_stop_at_the_time_limit_do_not_hide_it(mark: str) -> None:
    text = "trap 'exit 75' TERM; while :; do sleep 0.05; done"
    assert job(shell(text, mark), timeout_s=0.3) == 124


def test_log_files_are_written_and_named(mark: str, tmp_path: Path,
                                         capfd: pytest.CaptureFixture[str]) -> None:
    assert job(shell("echo out; echo err >&2; exit $HOROVOD_RANK", mark), output=tmp_path) == 1
    lines = (tmp_path / "rank.1.log").read_text(encoding="utf-8").splitlines()
    assert sorted(line[9:] for line in lines) == ["stderr err", "stdout out"]
    assert f"(all of them in {tmp_path}/rank.1.log)" in capfd.readouterr().err


def test_much_output_arrives_whole(mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert job((*PYTHON, "for i in range(20000): print(i, 'x' * 50)", mark)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [str(i) for i in range(20000)]


def test_variables_of_an_outer_launcher_do_not_reach_the_ranks(
        mark: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert job(shell('echo "<$PMIX_RANK$OMPI_COMM_WORLD_RANK>"', mark)) == 0
    assert capfd.readouterr().out == "[0] <>\n"


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from tests.launch_facts import facts
from hvdtrain.launch.execute import launch
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan
options = LaunchOptions(command=tuple(sys.argv[1:]), np=2, starter="native", grace_s={grace})
sys.exit(launch(make_plan(options, {{}}, facts())))
"""


def start_launcher(command: tuple[str, ...], grace: float = 1.0) -> subprocess.Popen[str]:
    """A launcher as a process of its own, whose ranks have said that they are up."""
    program = PROGRAM.format(path=[str(Path(__file__).parents[2])],
                             grace=grace)
    launcher = subprocess.Popen([sys.executable, "-c", program, *command], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stderr is not None
    for _ in range(2):
        assert launcher.stderr.readline().endswith("up\n")
    return launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_launcher_reach_the_ranks(mark: str, number: signal.Signals) -> None:
    launcher = start_launcher(shell("echo up >&2; exec sleep 60", mark))
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 128 + number
    assert f"{number.name} is passed on" in err


def test_ranks_may_save_when_told_to_stop_and_choose_the_code(mark: str) -> None:
    text = 'trap "sleep 0.2; echo saved $HOROVOD_RANK >&2; exit 75" TERM; echo up >&2; ' \
           'while :; do sleep 0.05; done'
    launcher = start_launcher(shell(text, mark))
    launcher.terminate()
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 75
    assert "[0] saved 0" in err
    assert "[1] saved 1" in err


def test_usr1_reaches_the_ranks_and_does_not_end_the_job(mark: str) -> None:
    text = 'trap "echo got it >&2; exit 0" USR1; echo up >&2; while :; do sleep 0.05; done'
    launcher = start_launcher(shell(text, mark))
    launcher.send_signal(signal.SIGUSR1)
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, err.count("got it")) == (0, 2)


def test_a_second_signal_kills_at_once(mark: str) -> None:
    text = 'trap "" TERM; echo up >&2; while :; do sleep 0.05; done'
    launcher = start_launcher(shell(text, mark), grace=60.0)
    launcher.terminate()
    time.sleep(0.7)
    launcher.terminate()
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 128 + signal.SIGTERM


def test_a_killed_launcher_leaves_nothing(mark: str) -> None:
    text = f'/bin/sh -c "sleep 60; : {mark}" & echo up >&2; wait'
    launcher = start_launcher(shell(text, mark))
    launcher.kill()
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == -signal.SIGKILL


def test_a_killed_agent_ends_the_job_and_leaves_nothing(mark: str) -> None:
    launcher = start_launcher(shell("echo up >&2; exec sleep 60", mark))
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    agent = [int(pid) for pid in children
             if b"hvdtrain-agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(agent[0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 137
    assert "its agent ended unexpectedly" in err


def test_a_reader_that_goes_away_does_not_end_the_job(mark: str, tmp_path: Path) -> None:
    text = f'echo up >&2; sleep 0.2; echo a; echo b; echo c; touch {tmp_path}/$HOROVOD_RANK'
    launcher = start_launcher(shell(text, mark))
    assert launcher.stdout is not None
    launcher.stdout.close()
    launcher.wait(timeout=LIMIT_S)
    assert launcher.stderr is not None
    launcher.stderr.close()
    assert launcher.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
