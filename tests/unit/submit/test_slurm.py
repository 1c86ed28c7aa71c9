"""The options of a batch script, whole scripts, and what bash makes of the words in them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.launch.options import RankCommand
from hvdtrain.submit.slurm import SlurmOptions, directive, make_script, quote, time_limit_s

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
    assert directive("job-name", "a\\b c") == "#SBATCH --job-name='a\\\\b c'"


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


def options(**changes: Any) -> SlurmOptions:
    return SlurmOptions(**({"ntasks_per_node": 2} | changes))


@pytest.mark.parametrize(("text", "seconds"), [
    ("90", 5400), ("90:30", 5430), ("1:30:15", 5415), ("2-1", 176400), ("2-1:30", 178200),
    ("2-1:30:15", 178215), ("0", 0)])
def test_the_six_forms_of_a_time_limit(text: str, seconds: int) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1d", "1.5", "1:2:3:4", "3-1:2:3:4", "-5", "2-", "1:", "1 0",
                                  "10\n", "1h"])
def test_no_other_time_limit(text: str) -> None:
    with pytest.raises(ConfigError, match="Expected one of Slurm's forms: MINUTES"):
        time_limit_s(text)


@pytest.mark.parametrize(("changes", "message"), [
    ({"nodes": 0}, "nodes must be at least 1"),
    ({"ntasks": 0}, "ntasks must be at least 1"),
    ({"cpus_per_task": -1}, "cpus_per_task must be at least 1"),
    ({"gpus_per_node": 0}, "gpus_per_node must be"),
    ({"signal_before_s": -1}, "signal_before_s must be at least 0"),
    ({"signal_before_s": 65536}, "at most 65,535"),
    ({"max_requeues": -1}, "max_requeues must be"), ({"wait_s": -1}, "wait_s must be at least 0"),
    ({"ntasks_per_node": None}, "number of ranks is not given"),
    ({"nodes": 4, "ntasks": 3}, "cannot use 4 nodes"),
    ({"nodes": 2, "ntasks": 5}, "have place for 4"),
    ({"gpus_per_node": 1}, "2 ranks on each node have 1 GPUs"),
    ({"mem": "1.5G"}, "takes no fractions"), ({"mem": "x"}, "--mem"), ({"mem": ""}, "--mem"),
    ({"time": "3"}, "nothing would be trained"), ({"time": "0:30"}, "nothing would be trained"),
    ({"partition": "a\n#SBATCH --uid=0"}, "without line breaks"),
    ({"job_name": ""}, "--job-name is ''"), ({"output": "a\tb"}, "--output"),
    ({"account": "--uid=0"}, "looks like another option"),
    ({"modules": ("-x",)}, "--module"), ({"modules": ("a\nb",)}, "--module"),
    ({"env": ("=1",)}, "--env"), ({"env": ("A B=1",)}, "--env"), ({"env": ("1A=1",)}, "--env"),
    ({"env": ("A;id=1",)}, "--env"), ({"env": ("A=\0",)}, "--env"), ({"env": ("",)}, "--env"),
    ({"extra": ("exclusive",)}, "begins with --"), ({"extra": ("--a\nid",)}, "begins with --"),
    ({"extra": ("--comment='a",)}, "No closing quotation"),
])
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_a_rank_for_each_gpu() -> None:
    assert SlurmOptions(gpus_per_node=4).ranks_per_node == 4
    assert SlurmOptions(gpus_per_node=4, ntasks_per_node=2).ranks_per_node == 2
    assert SlurmOptions(gpus_per_node=4, ntasks=3).ranks_per_node is None


@pytest.mark.parametrize("changes", [
    {"nodes": 2, "ntasks": 4},
    {"nodes": 2, "ntasks": 2, "ntasks_per_node": None},
    {"gpus_per_node": 2},
    {"signal_before_s": 0, "max_requeues": 0, "wait_s": 0},
    {"signal_before_s": 65535},
])
def test_the_last_value_that_is_not_refused(changes: dict[str, Any]) -> None:
    made = options(**changes)
    assert {name: getattr(made, name) for name in changes} == changes


def test_a_time_limit_that_leaves_time_to_train() -> None:
    assert options(time="4", signal_before_s=120).time == "4"
    assert options(time="1", signal_before_s=0).time == "1"
    assert options(time="0").time == "0"
