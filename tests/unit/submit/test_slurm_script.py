"""The batch script: whole texts, and what bash makes of the words in it."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.launch.rank_command import RankCommand
from hvdtrain.submit.slurm_options import SlurmOptions
from hvdtrain.submit.slurm_script import directive, make_script, quote

GOLDEN = Path(__file__).parents[2] / "golden" / "submit"
FIT = RankCommand(words=("fit", "job.toml", "--epochs", "3"), is_program=False)
PROGRAM = RankCommand(words=("python", "it's train.py"), is_program=True)

CASES: dict[str, tuple[RankCommand, dict[str, Any]]] = {
    "slurm_fit": (FIT, {"nodes": 2, "gpus_per_node": 4, "cpus_per_task": 8, "time": "12:00:00"}),
    "slurm_everything": (FIT, {
        "nodes": 3, "ntasks": 5, "ntasks_per_node": 2, "gpus_per_node": 2, "cpus_per_task": 4,
        "mem": "64G", "time": "1-12", "partition": "gpu", "account": "a b", "qos": "long",
        "constraint": "[a100|h100]", "job_name": "it's; $HOME\\", "output": "logs dir/%j.txt",
        "modules": ("cuda/12.4", "gcc; id"), "env": ("TEXT=two\nlines; $(id)", "SECRET"),
        "venv": Path("/opt/my env"), "signal_before_s": 300, "max_requeues": 7, "wait_s": 90,
        "extra": ("--exclusive", "--mail-type=END")}),
    "slurm_overwrite": (RankCommand(words=("fit", "job.toml", "--overwrite"), is_program=False),
                        {"ntasks": 2}),
    "slurm_once": (FIT, {"ntasks": 2, "requeue": False, "signal_before_s": 0, "wait_s": 0}),
    "slurm_program": (PROGRAM, {"ntasks_per_node": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_one(name: str) -> None:
    command, changes = CASES[name]
    changes = changes if "venv" in changes else changes | {"program": "hvdtrain"}
    text = make_script(SlurmOptions(**changes), command, made_by=("slurm", "...")).partition("\n")
    text = f"{text[0]}\n{text[2].partition(chr(10))[2]}"  # without the line with the version
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "accept it with UPDATE_GOLDEN=1"
    check = ["shellcheck", "--exclude=SC1090,SC1091"] if shutil.which("shellcheck") else [
        "bash", "-n"]
    checked = subprocess.run([*check, path], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_every_golden_script_is_tested() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(CASES)


@pytest.mark.parametrize("word", [
    "plain", "two words", "it's", '"', "$HOME", "$(id)", "`id`", "a;b", "*", "#", "\\", "\\n",
    "line\nbreak", "tab\t'quote'", "\r\n", "\x01\x7f", "", "ünï", "a\n#SBATCH --uid=0"])
def test_bash_reads_a_word_as_it_was(word: str) -> None:
    line = quote(word)
    assert "\n" not in line
    assert "\r" not in line  # sbatch refuses a script with DOS line breaks
    said = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True,
                          check=True).stdout
    assert said == word.encode() + b"\0"


def test_slurm_takes_away_a_backslash() -> None:
    assert directive("job-name", "a\\b c") == "#SBATCH --job-name='a\\\\b c'\n"


def run_without_slurm(tmp_path: Path, script: str, *, state: str = "RUNNING",
                      **environ: str) -> tuple[int, list[str], str]:
    """Run a script with executables in place of Slurm's: the exit code, the calls, stderr."""
    for name, body in {"srun": 'while [[ $1 == --* ]]; do shift; done; "$@"',
                       "squeue": f"echo {state}", "scontrol": "kill $PPID"}.items():
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], text=True, capture_output=True, timeout=30, check=False,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17",
             "SLURM_CPUS_PER_TASK": "3", **environ})
    calls = (tmp_path / "calls").read_text().splitlines()
    return done.returncode, calls, done.stderr


def program(tmp_path: Path, body: str) -> str:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("restarts", "words", "expected"), [
    (None, (), "fit j"), ("0", (), "fit j"), ("1", (), "fit j --resume"),
    ("2", ("--resume",), "fit j --resume"), (None, ("--overwrite",), "fit j --overwrite"),
    ("1", ("--overwrite",), "fit j --resume")])
def test_only_a_run_that_was_begun_goes_on(tmp_path: Path, restarts: str | None,
                                           words: tuple[str, ...], expected: str) -> None:
    options = SlurmOptions(ntasks=2, program=program(tmp_path, "exit 0"))
    command = RankCommand(words=("fit", "j", *words), is_program=False)
    environ = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    code, calls, _ = run_without_slurm(tmp_path, make_script(options, command), **environ)
    assert code == 0
    assert calls == [f"srun --mpi=none --label --kill-on-bad-exit=0 --wait=30 "
                     f"{options.program} {expected}"]


@pytest.mark.parametrize(("code", "state", "restarts", "requeued", "message"), [
    (75, "RUNNING", "0", True, ""),
    (75, "RUNNING", "3", True, ""),
    (75, "RUNNING", "50", False, "requeued 50 times: no more"),
    (75, "COMPLETING", "0", False, "COMPLETING: it is not requeued"),
    (75, "", "0", False, "gone: it is not requeued"),
    (1, "RUNNING", "0", False, ""), (0, "RUNNING", "0", False, ""),
])
def test_a_job_comes_back_when_its_ranks_were_stopped(
        tmp_path: Path, code: int, state: str, restarts: str, requeued: bool,
        message: str) -> None:
    options = SlurmOptions(ntasks=2, program=program(tmp_path, f"exit {code}"))
    left, calls, errors = run_without_slurm(tmp_path, make_script(options, FIT), state=state,
                                            SLURM_RESTART_COUNT=restarts)
    assert left == code
    assert ("scontrol requeue 17" in calls) == requeued
    assert message in errors


def test_without_requeue_nothing_is_asked(tmp_path: Path) -> None:
    options = SlurmOptions(ntasks=2, requeue=False, program=program(tmp_path, "exit 75"))
    code, calls, _ = run_without_slurm(tmp_path, make_script(options, FIT))
    assert (code, len(calls)) == (75, 1)


def test_a_signal_to_the_script_does_not_end_it_before_its_ranks(tmp_path: Path) -> None:
    body = "kill -TERM $PPID_OF_SCRIPT; sleep 0.3; kill -USR1 $PPID_OF_SCRIPT; sleep 0.3; exit 9"
    options = SlurmOptions(ntasks=2, env=("SET=1",), program=program(tmp_path, body))
    script = "export PPID_OF_SCRIPT=$$\n" + make_script(options, FIT)
    assert run_without_slurm(tmp_path, script)[0] == 9


def test_a_variable_that_is_not_there_ends_the_script(tmp_path: Path) -> None:
    options = SlurmOptions(ntasks=1, env=("SECRET",), program=program(tmp_path, "exit 0"))
    done = subprocess.run(["bash", "-c", make_script(options, FIT)], capture_output=True,
                          text=True, env={"PATH": os.environ["PATH"]}, check=False)
    assert done.returncode != 0
    assert "SECRET: is not set" in done.stderr
