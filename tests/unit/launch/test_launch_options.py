"""What each rank runs: an hvdtrain command or a program, decided from the words."""

import sys

import pytest

from hvdtrain.launch.options import LaunchOptions, RankCommand
from hvdtrain.launch.plan import make_plan
from tests.launch_facts import facts


@pytest.mark.parametrize(("line", "fit"), [
    ("python -m hvdtrain fit JOB", True),
    ("/opt/venv/bin/python3.11 -u -m hvdtrain fit JOB", True),
    ("/opt/venv/bin/hvdtrain fit JOB", True),
    ("hvdtrain fit", True),
    ("hvdtrain fit --help", False),
    ("hvdtrain world", False),
    ("python train.py -m hvdtrain fit", False),
    ("python -m hvdtrain.fit fit", False),
    ("fit JOB", False),
    ("python -m", False),
    ("", False),
])
def test_a_training_is_known_by_its_command_line(line: str, fit: bool) -> None:
    argv = tuple(line.split())
    assert RankCommand(words=argv).is_fit == fit
    if argv:
        plan = make_plan(LaunchOptions(command=argv, np=2, starter="mpirun"), {}, facts())
        assert (plan.says_done, plan.stop_signal.name == "SIGUSR1") == (fit, fit)


def test_a_training_that_is_given_as_a_program_stays_one() -> None:
    command = RankCommand(words=("/opt/bin/hvdtrain", "fit", "a/digits.toml"), is_program=True)
    assert (command.is_fit, command.can_take_resume, command.name) == (True, True, "digits")
    resumed = command.with_words("--resume")
    assert resumed.argv == ("/opt/bin/hvdtrain", "fit", "a/digits.toml", "--resume")
    assert not resumed.can_take_resume


def test_an_hvdtrain_command_is_run_by_this_hvdtrain() -> None:
    command = RankCommand(words=("fit", "JOB"), is_program=False)
    assert command.argv == (sys.executable, "-m", "hvdtrain", "fit", "JOB")
