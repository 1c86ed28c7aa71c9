"""`HostFacts`: what a probe tells of its host. Values only; they travel as JSON.

Also sent to the hosts, so standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.horovod_check import HorovodCheck

UNLIMITED = -1
"""A limit of the system that is none."""


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """The interpreter of the ranks and what it has installed."""

    version: str
    executable: str
    packages: dict[str, str] = field(default_factory=dict)
    """Distributions with their versions: tensorflow (of any build), keras, horovod, ..."""
    hvdtrain_at: str | None = None
    """The folder from which a rank would import hvdtrain."""
    hvdtrain_hash: str | None = None
    """Over the names and contents of its Python files."""
    keras_backend: str | None = None
    """As set by the environment or by keras.json; None: not set."""
    keras_backend_from: str = ""
    path: tuple[str, ...] = ()
    """`sys.path` of a rank."""
    ext_suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """Whether a library or module loads, tried in a process of its own."""

    loads: bool
    detail: str = ""
    """What it says of itself, or why it does not load."""


@dataclass(frozen=True, kw_only=True)
class MpiFacts:
    """The mpirun beside the interpreter or on PATH, and mpi4py."""

    path: str | None = None
    flavour: str = ""
    version: str = ""
    mpi4py: LoadFacts | None = None
    """None where it is not installed."""


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """The CUDA libraries for which the installed TensorFlow was built."""

    version: str
    cudnn: str
    libraries: dict[str, str]
    """Each library with the place where it was found, "" where it was not."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory_mib: int | None = None
    driver: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs of the host."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    """What the driver's own tool complains of."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the ranks."""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Cores and limits, as a rank gets them."""

    cores: int
    quota_cores: float | None = None
    """What the control group grants; None: no quota."""
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    open_files: int = UNLIMITED
    open_files_hard: int = UNLIMITED
    memlock_bytes: int = UNLIMITED
    infiniband: tuple[str, ...] = ()
    """Names of RDMA devices."""


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """Slurm's client side."""

    version: str
    problem: str = ""
    """Why it does not answer."""
    mpi_types: tuple[str, ...] = ()
    """What `srun --mpi=list` tells."""
    pmix_plugin: str = ""
    pmix_library: str = ""
    """Where the plugin wants its library."""
    pmix_loads: bool = False
    job_id: str = ""
    in_step: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Interfaces, and how this host sees the launcher and its peer."""

    interfaces: dict[str, str] = field(default_factory=dict)
    own_address: str | None = None
    ssh_client: str | None = None
    ssh_server: str | None = None
    port: int = 0
    """Where the probe listens while it runs."""


@dataclass(frozen=True, kw_only=True)
class DirectoryFacts:
    """The directory in which the ranks will run."""

    path: str
    exists: bool = True
    code_hash: str = ""
    """Over the programs and job files in it; "" where there are none."""
    code_files: int = 0


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """All of it; a part is None where looking at it failed, and `problems` tells why."""

    hostname: str = ""
    python: PythonFacts | None = None
    horovod: HorovodCheck | None = None
    horovod_load: LoadFacts | None = None
    """None where there is no library to load."""
    tensorflow_load: LoadFacts | None = None
    mpi: MpiFacts | None = None
    cuda: CudaFacts | None = None
    """None where TensorFlow is no CUDA build."""
    gpu: GpuFacts | None = None
    machine: MachineFacts | None = None
    slurm: SlurmFacts | None = None
    """None where there is no Slurm."""
    network: NetworkFacts | None = None
    directory: DirectoryFacts | None = None
    problems: dict[str, str] = field(default_factory=dict)


def facts_from_json(told: Mapping[str, Any]) -> HostFacts:
    """`HostFacts` from the document of a probe."""
    return HostFacts(
        hostname=told["hostname"], problems=told["problems"],
        python=_made(PythonFacts, told, "python", path=tuple),
        horovod=_made(HorovodCheck, told, "horovod", problems=tuple, warnings=tuple),
        horovod_load=_made(LoadFacts, told, "horovod_load"),
        tensorflow_load=_made(LoadFacts, told, "tensorflow_load"),
        mpi=_made(MpiFacts, told, "mpi", mpi4py=lambda value: value and LoadFacts(**value)),
        cuda=_made(CudaFacts, told, "cuda"),
        gpu=_made(GpuFacts, told, "gpu", gpus=lambda value: tuple(Gpu(**gpu) for gpu in value)),
        machine=_made(MachineFacts, told, "machine", infiniband=tuple),
        slurm=_made(SlurmFacts, told, "slurm", mpi_types=tuple),
        network=_made(NetworkFacts, told, "network"),
        directory=_made(DirectoryFacts, told, "directory"))


def _made(kind: Any, told: Mapping[str, Any], part: str, **convert: Any) -> Any:
    """One part; JSON has neither tuples nor dataclasses, `convert` makes them."""
    value = told.get(part)
    if value is None:
        return None
    return kind(**{name: convert.get(name, _same)(item) for name, item in value.items()})


def _same(value: Any) -> Any:
    return value
