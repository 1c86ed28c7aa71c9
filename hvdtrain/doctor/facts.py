"""`ProbeFacts`: what a probe reports of its host. Values only, sent as JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.launch.facts import Mpirun
from hvdtrain.launch.link import HostFacts

UNLIMITED = -1  # `resource.RLIM_INFINITY` of Linux


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """The interpreter of the ranks, its distributions, and the hvdtrain and Keras backend it uses.

    Every build of TensorFlow is `tensorflow`; None is a Keras backend that is not set.
    """

    version: str
    executable: str
    packages: dict[str, str] = field(default_factory=dict)
    hvdtrain_at: str = ""
    hvdtrain_hash: str = ""
    keras_backend: str | None = None
    keras_backend_from: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """Whether a library or module loads; `detail` is what it reports, or why it does not."""

    loads: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class MpiFacts:
    """The mpirun beside the interpreter or on PATH, and mpi4py if installed."""

    mpirun: Mpirun | None = None
    mpi4py: LoadFacts | None = None


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """The CUDA libraries that TensorFlow was built for, and their paths ("": not found)."""

    version: str
    cudnn: str
    libraries: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory_mib: int | None = None
    driver: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs, the complaints of the driver's tool, and the ranks' CUDA_VISIBLE_DEVICES."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    visible: str | None = None

    def count_visible(self) -> int:
        """The number of GPUs that a rank sees."""
        if self.visible is None:
            return len(self.gpus)
        wanted = [item.strip() for item in self.visible.split(",") if item.strip()]
        # -1 ends the list.
        return min([*wanted, "-1"].index("-1"), len(self.gpus))


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Cores, the quota of the control group, and limits, as a rank gets them."""

    cores: int
    quota_cores: float | None = None
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    open_files: int = UNLIMITED
    open_files_hard: int = UNLIMITED
    memlock_bytes: int = UNLIMITED
    infiniband: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """Slurm's client: why it does not answer, and where its PMIx plugin looks for its library."""

    version: str
    problem: str = ""
    mpi_types: tuple[str, ...] = ()
    pmix_plugin: str = ""
    pmix_library: str = ""
    pmix_loads: bool = False
    job_id: str = ""
    in_step: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkFacts(HostFacts):
    """Interfaces, the addresses of launcher and peer seen here, and the port of the probe."""

    clock_offset_s: float = 0.0
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class DirectoryFacts:
    """The directory of the ranks, and a hash of the programs and job files in it."""

    path: str
    exists: bool = True
    code_hash: str = ""
    code_files: int = 0


@dataclass(frozen=True, kw_only=True)
class ProbeFacts:
    """All facts. None: there is no such thing, or `problems` says why it was not looked at."""

    python: PythonFacts | None = None
    horovod: HorovodCheck | None = None
    horovod_load: LoadFacts | None = None
    tensorflow_load: LoadFacts | None = None
    mpi: MpiFacts | None = None
    cuda: CudaFacts | None = None
    gpu: GpuFacts | None = None
    machine: MachineFacts | None = None
    slurm: SlurmFacts | None = None
    network: NetworkFacts | None = None
    directory: DirectoryFacts | None = None
    problems: dict[str, str] = field(default_factory=dict)


def facts_from_json(told: Any) -> ProbeFacts:
    """`ProbeFacts` from the JSON document of a probe."""
    facts: ProbeFacts = _typed(ProbeFacts, told)
    return facts


def _typed(hint: Any, value: Any) -> Any:
    """Make tuples and dataclasses, which JSON does not have, by the annotations."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if value is None:
        return None
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        # The probe may be of another version of hvdtrain, and tell more.
        return typing.cast(Any, hint)(**{name: _typed(hints[name], item)
                                         for name, item in value.items() if name in hints})
    if typing.get_origin(hint) is tuple:
        return tuple(_typed(typing.get_args(hint)[0], item) for item in value)
    return value
