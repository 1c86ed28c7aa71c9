"""Finding mpirun, and telling its flavour from what it prints."""

from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.facts import ask_mpirun, gather_facts, read_version
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan
from hvdtrain.launch.starters.mpirun import need_mpirun
from tests.launch_facts import facts

HYDRA_TEXT = """HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Mon Nov 24 10:00:00 CST 2026
    CC:                              gcc
"""


@pytest.mark.parametrize(("text", "flavour", "version"), [
    ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://...", "openmpi", "5.0.11"),
    ("mpirun (Open MPI) 4.1.4\n", "openmpi", "4.1.4"),
    (HYDRA_TEXT, "mpich", "5.0.2"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515", "mpich", "2021.13"),
])
def test_version_text_tells_the_flavour(text: str, flavour: str, version: str) -> None:
    found = read_version("/x/mpirun", text)
    assert found is not None
    assert (found.path, found.flavour, found.version) == ("/x/mpirun", flavour, version)


def test_an_unknown_mpirun_is_none() -> None:
    assert read_version("/x/mpirun", "IBM Spectrum") is None


def fake_mpirun(directory: Path, answer: str, code: int = 0) -> None:
    directory.mkdir()
    program = directory / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'X'\n{answer}\nX\nexit {code}\n", encoding="utf-8")
    program.chmod(0o755)


def test_the_mpirun_of_the_installation_comes_before_that_on_path(tmp_path: Path) -> None:
    fake_mpirun(tmp_path / "venv", "mpirun (Open MPI) 5.0.11")
    fake_mpirun(tmp_path / "bin", HYDRA_TEXT)
    beside, _ = ask_mpirun(str(tmp_path / "venv"), str(tmp_path / "bin"))
    on_path, _ = ask_mpirun(str(tmp_path / "none"), str(tmp_path / "bin"))
    assert beside is not None
    assert (beside.path, beside.major) == (str(tmp_path / "venv" / "mpirun"), 5)
    assert on_path is not None
    assert on_path.flavour == "mpich"


def test_an_mpirun_that_does_not_answer_is_told(tmp_path: Path) -> None:
    fake_mpirun(tmp_path / "venv", "\nmca_base_var_init failed\nmore", code=1)
    found, problem = ask_mpirun(str(tmp_path / "venv"))
    assert found is None
    assert problem == (f"`{tmp_path}/venv/mpirun --version` ends with 1 and says: "
                       "mca_base_var_init failed")
    with pytest.raises(LaunchError, match="No mpirun can be used: .*mca_base_var_init failed"):
        need_mpirun(facts(mpirun=None, mpirun_problem=problem))


def test_mpirun_is_given_the_home_folder_without_which_open_mpi_5_does_not_start(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `env -i` and in some containers."""
    monkeypatch.delenv("HOME")
    here = gather_facts()
    if here.mpirun is None and "there is no mpirun" in here.mpirun_problem:
        pytest.skip(here.mpirun_problem)
    assert here.mpirun is not None, here.mpirun_problem
    options = LaunchOptions(command=("prog",), np=2, starter="mpirun")
    assert make_plan(options, {}, here).env["HOME"] == here.home
    assert "HOME" not in make_plan(options, {"HOME": "/h"}, here).env
    elsewhere = LaunchOptions(command=("prog",), hosts="hosta:1,hostb:1", starter="mpirun")
    assert "-x HOME" not in " ".join(make_plan(elsewhere, {}, here).argv)
    asked = replace(elsewhere, env=("HOME=/shared",))
    assert "-x HOME" in " ".join(make_plan(asked, {}, here).argv)


def test_no_mpirun_is_none(tmp_path: Path) -> None:
    assert ask_mpirun(str(tmp_path), str(tmp_path))[0] is None


def test_gather_facts_answers_for_this_machine() -> None:
    here = gather_facts()
    assert here.cores >= 1
