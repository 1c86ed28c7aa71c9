"""mpirun and horovodrun as started by us: a fake one on disk tells what it was given."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.execute import launch
from hvdtrain.launch.facts import Mpirun
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import LaunchPlan, make_plan
from hvdtrain.world.failure import FailureRecord
from tests.launch_facts import facts


def planned(tmp_path: Path, body: str, **options: Any) -> LaunchPlan:
    """A plan for a fake mpirun with this body."""
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    machine = facts(mpirun=Mpirun(path=str(program), flavour="openmpi", version="5.0.11"), cores=1)
    options = {"command": ("prog", "a b"), "np": 2, "starter": "mpirun"} | options
    return make_plan(LaunchOptions(**options), {}, machine)


def test_gets_its_arguments_and_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]
                                            ) -> None:
    body = 'for word; do echo "<$word>"; done; echo $OMPI_MCA_mpi_yield_when_idle $NAME'
    assert launch(planned(tmp_path, body, env=("NAME=x",))) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-4:] == ["<NAME>", "<prog>", "<a b>", "1 x"]


@pytest.mark.parametrize(("body", "code"), [("exit 9", 9), ("kill -9 $$", 137)])
def test_its_code_is_ours(tmp_path: Path, body: str, code: int) -> None:
    assert launch(planned(tmp_path, body)) == code


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    started = time.monotonic()
    assert launch(planned(tmp_path, "exec sleep 60", timeout_s=0.1)) == 124
    assert time.monotonic() - started < 1.0


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    plan = planned(tmp_path, "trap '' TERM; while :; do sleep 0.1; done", timeout_s=0.1,
                   grace_s=0.1)
    assert launch(plan) == 124
    assert time.monotonic() - started < 1.0


def test_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    plan = planned(tmp_path, "")
    (tmp_path / "mpirun").unlink()
    with pytest.raises(LaunchError, match="cannot be started"):
        launch(plan)


def test_importing_the_launcher_loads_no_big_library() -> None:
    program = ("import sys; import hvdtrain.launch.execute, hvdtrain.launch.facts, "
               "hvdtrain.runtime.guard, hvdtrain.rendezvous.barrier; "
               "print(*(m for m in ('tensorflow', 'keras', 'numpy', 'horovod', 'mpi4py', 'typer', "
               "'asyncio') if m in sys.modules))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True, cwd=Path(__file__).parents[3])
    assert done.stdout.strip() == ""


DIALECTS = {
    "openmpi 4": ("[1,0]<stdout>:", "[1,1]<stderr>:"),
    "openmpi 5": ("[1,0]<stdout>: ", "[1,1]<stderr>: "),
    "openmpi 5 by name": ("[prterun-hosta-1@1,0]<stdout>: ", "[prterun-hosta-1@1,1]<stderr>: "),
    "hydra": ("[0] ", "[1] "),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_lines_of_ranks_are_read_back(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                      name: str) -> None:
    """On the screen as under our own starter, and in a log file per rank."""
    out, err = DIALECTS[name]
    body = (f"echo '{out}first'; echo '{out}[0] odd: 1'; echo '{err}second' >&2; "
            "echo 'of mpirun itself'")
    assert launch(planned(tmp_path, body, output=tmp_path / "logs")) == 0
    shown, errors = capfd.readouterr()
    assert shown == "[0] first\n[0] [0] odd: 1\nof mpirun itself\n"
    assert errors == "[1] second\n"
    assert [line[9:] for line in (tmp_path / "logs/rank.1.log").read_text().splitlines()] == [
        "stderr second"]


def test_the_rank_that_failed_is_named_with_its_last_lines(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun's own code is that of the rank whose end it saw first."""
    record = FailureRecord(rank=1, host="x", time_s=time.time(), error="ValueError",
                           message="bad sample", primary=True, code=7)
    body = (f"echo '[1,1]<stderr>: reading shard 17' >&2; echo '[1,1]<stderr>: {record.to_line()}'"
            " >&2; exit 1")
    assert launch(planned(tmp_path, body)) == 7
    err = capfd.readouterr().err
    assert "rank 1 on localhost failed " in err
    assert "exit code 7, ValueError: bad sample" in err
    assert "  | reading shard 17" in err


def test_a_rank_that_is_gone_without_a_word_is_named(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun tells of no end with 0, and not of each that was killed."""
    record = FailureRecord(rank=0, host="x", time_s=time.time(), error="UnknownError",
                           message="Horovod has been shut down", primary=False, code=7)
    said = f"echo '[1,0]<stderr>: {record.to_line().strip()}' >&2; exit 1"
    fit = ("python", "-m", "hvdtrain", "fit", "job.toml")
    assert launch(planned(tmp_path, said, command=fit)) == 7
    assert "rank 1 on localhost told neither that it was done nor why" in capfd.readouterr().err
    assert launch(planned(tmp_path, f"echo '[1,1]<stderr>: HVD-DONE' >&2; {said}", command=fit)
                  ) == 7
    assert "told neither" not in capfd.readouterr().err


def test_a_rank_whose_mpi_has_lost_another_is_not_the_cause(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As Open MPI 5 told it, when rank 1 on another host had been killed."""
    lines = ["[1,0]<stderr>: An MPI communication peer process has unexpectedly disconnected.",
             "prterun has exited due to process rank 0 with PID 0 on node hosta calling"]
    said = "; ".join(f"echo '{line}' >&2" for line in lines)
    fit = ("python", "-m", "hvdtrain", "fit", "job.toml")
    assert launch(planned(tmp_path, f"{said}; exit 14", command=fit)) == 7
    err = capfd.readouterr().err
    assert "hvdtrain launch: rank 1 on localhost told neither" in err
    assert "called MPI_Abort" in err


def test_a_starter_that_hangs_after_a_failure_is_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.launch.starters.base.Starter.patience_s", (0.3, 0.3))
    record = FailureRecord(rank=1, host="x", time_s=time.time(), error="ValueError",
                           message="bad sample", primary=True)
    started = time.monotonic()
    assert launch(planned(tmp_path, f"echo '[1,1]<stderr>: {record.to_line()}'; exec sleep 60")
                  ) == 1
    assert time.monotonic() - started < 2.0


def test_processes_that_a_starter_leaves_are_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert launch(planned(tmp_path, f"setsid sleep 60 & echo $! > '{pid}'; exit 0")) == 0
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


#: Waits for a process to attach to, says so, and never lets go of it.
TRACER = """
import ctypes, pathlib, sys, time
while not (text := pathlib.Path(sys.argv[1]).read_text() if pathlib.Path(sys.argv[1]).exists()
           else ""):
    time.sleep(0.01)
if ctypes.CDLL(None).ptrace(0x4206, int(text), 0, 0):  # PTRACE_SEIZE
    sys.exit("ptrace is not allowed here")
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


def test_a_process_that_cannot_be_buried_does_not_hold_up_the_launcher(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody but its tracer can: to its parent it is as one in an uninterruptible wait."""
    pid, held = tmp_path / "pid", tmp_path / "held"
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, pid, held], stderr=subprocess.PIPE,
                              text=True)
    try:
        body = (f"setsid sleep 60 & echo $! > '{pid}.part'; mv '{pid}.part' '{pid}'; "
                f"for i in $(seq 500); do [ -e '{held}' ] && exit 0; sleep 0.01; done; exit 9")
        started = time.monotonic()
        code = launch(planned(tmp_path, body))
        if code == 9:
            pytest.skip(f"no process can be traced: {tracer.communicate(timeout=9)[1]}")
        assert code == 0
        assert time.monotonic() - started < 8.0
        assert f"outlive SIGKILL and are left on this host: {pid.read_text().strip()}" in (
            capfd.readouterr().err)
    finally:
        tracer.kill()
        tracer.communicate()
        with suppress(ChildProcessError):
            os.waitpid(int(pid.read_text()), 0)


def test_a_starter_that_lost_ranks_and_ends_with_0_is_not_believed(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit = ("python", "-m", "hvdtrain", "fit", "job.toml")
    said = [f"echo '[1,{rank}]<stderr>: HVD-DONE' >&2" for rank in (0, 1)]
    assert launch(planned(tmp_path, "; ".join(said), command=fit)) == 0
    assert launch(planned(tmp_path, said[0], command=fit)) == 1
    assert "not all ranks have finished: rank 1 on localhost" in capfd.readouterr().err
    assert launch(planned(tmp_path, "exit 0", command=(*fit, "--help"))) == 0
