"""Finding mpirun, and telling its flavour from what it prints."""

from pathlib import Path

import pytest

from hvdtrain.launch.facts import find_mpirun, gather_facts, read_version

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
    beside = find_mpirun(str(tmp_path / "venv"), str(tmp_path / "bin"))
    on_path = find_mpirun(str(tmp_path / "none"), str(tmp_path / "bin"))
    assert beside is not None
    assert (beside.path, beside.major) == (str(tmp_path / "venv" / "mpirun"), 5)
    assert on_path is not None
    assert on_path.flavour == "mpich"


def test_no_mpirun_is_none(tmp_path: Path) -> None:
    assert find_mpirun(str(tmp_path), str(tmp_path)) is None


def test_gather_facts_answers_for_this_machine() -> None:
    facts = gather_facts()
    assert facts.cores >= 1
    assert Path(facts.python).exists()
