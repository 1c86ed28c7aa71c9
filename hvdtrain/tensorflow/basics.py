"""Which process this is among the others, and what Horovod was built with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain import session as sessions
from hvdtrain.collectives.base import Collective
from hvdtrain.collectives.real_horovod import real_horovod
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.errors import ConfigError, MissingExtraError
from hvdtrain.horovod_check import check_horovod
from hvdtrain.tensorflow.current import is_alone, session, several
from hvdtrain.tensorflow.process_sets import ProcessSet, checked_sets, global_process_set
from hvdtrain.world.detect import detect_world

Average, Sum, Adasum, Min, Max, Product = range(6)


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Find out which rank this process is, and meet the others. All ranks.

    It starts a session of hvdtrain (`hvdtrain.init`) with a collective of Horovod, so devices are
    pinned, and failures and hangs are found. Random generators stay as they are: each rank
    shuffles in its own order, as with Horovod. A second call does nothing.

    Args:
        comm: None, or something that means all ranks: a list of them, or an mpi4py communicator.
        process_sets: Sequence of `ProcessSet` objects that are known from the start, or
            `"dynamic"`, which allows `add_process_set` later.

    Raises:
        ConfigError: `comm` is not all ranks, or a process set is not possible.
        WorldError: The processes do not form the group that was promised.
        CollectiveError: Horovod cannot be used.
    """
    wanted: list[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ConfigError(f"process_sets must be a list of ProcessSet, or \"dynamic\". "
                              f"Received: {process_sets!r}")
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    elif process_sets is not None:
        wanted = checked_sets(process_sets, detect_world(os.environ).size)
    ranks: list[list[int]] = [one.ranks or [] for one in wanted]
    found = sessions.init(horovod_way=True, process_sets=ranks)
    _refuse_part(comm, found.world.size)
    global_process_set.made(0, list(range(found.world.size)))
    for one, members in zip(wanted, ranks, strict=True):
        number = several().process_set_id(members, add=False)
        if number is None:
            raise ConfigError(
                f"The process set {members} was given to hvd.init(), but hvd.init() or "
                "hvdtrain.init() was called before without it. Give all process sets to the first "
                "call, which must be hvd.init().")
        one.made(number, members)


def _refuse_part(comm: Any, size: int) -> None:
    if comm is None:
        return
    if hasattr(comm, "Get_size"):
        if int(comm.Get_size()) == size:
            return
        what = f"a communicator of {comm.Get_size()} processes"
    elif isinstance(comm, Iterable):
        members = list(comm)
        if sorted(members) in ([], list(range(size))):
            return
        what = f"the ranks {members}"
    else:
        what = f"a {type(comm).__name__}"
    raise ConfigError(
        f"hvd.init(comm) must mean all {size} ranks. Received: {what}. Start the processes that "
        "belong together, or use hvd.init(process_sets=[hvd.ProcessSet([0, 1])]) and give "
        "process_set=... to the functions.")


def collective_of(process_set: ProcessSet) -> Collective:
    """The collective of a process set; on a rank that is not in it, that of this rank alone."""
    if process_set.process_set_id == 0:
        return session().collective
    process_set.check()
    return several().subset(process_set.ranks or []) or SingleCollective()


def shutdown() -> None:
    """Leave the other ranks. All ranks; at the end of a script it happens by itself."""
    sessions.shutdown()
    ProcessSet.forget_all()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return sessions.started() is not None


def local_rank() -> int:
    """The number of this process among those of its host."""
    return session().world.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return session().world.local_size


def cross_rank() -> int:
    """The number of this host among those that have a process with this local rank."""
    return 0 if is_alone() else int(several().module.cross_rank())


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return 1 if is_alone() else int(several().module.cross_size())


def is_homogeneous() -> bool:
    """Whether all hosts have equally many processes."""
    return is_alone() or bool(several().module.is_homogeneous())


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write when each collective began and ended, where `HOROVOD_TIMELINE=DYNAMIC`.

    On one rank there are no collectives, and no file. `hvdtrain.init(timeline=...)` writes all.
    """
    if not is_alone():
        several().module.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End what `start_timeline` began."""
    if not is_alone():
        several().module.stop_timeline()


def mpi_enabled() -> bool:
    """Whether the ranks of this job met over MPI."""
    return is_initialized() and not is_alone() and bool(several().module.mpi_enabled())


def gloo_enabled() -> bool:
    """Whether the ranks of this job met over Gloo."""
    return is_initialized() and not is_alone() and bool(several().module.gloo_enabled())


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads; False where the ranks met without MPI."""
    session()  # refuses before `init`
    return mpi_enabled() and bool(several().module.mpi_threads_supported())


def _built(name: str) -> int:
    return int(getattr(real_horovod().tensorflow, name)()) if check_horovod().ok else 0


def mpi_built() -> bool:
    """Whether Horovod was built with MPI."""
    return bool(_built("mpi_built"))


def gloo_built() -> bool:
    """Whether Horovod was built with Gloo."""
    return bool(_built("gloo_built"))


def nccl_built() -> int:
    """The version code of the NCCL with which Horovod was built; 0: none."""
    return _built("nccl_built")


def ddl_built() -> bool:
    """Whether Horovod was built with DDL."""
    return bool(_built("ddl_built"))


def ccl_built() -> bool:
    """Whether Horovod was built with oneCCL."""
    return bool(_built("ccl_built"))


def cuda_built() -> bool:
    """Whether Horovod was built with CUDA."""
    return bool(_built("cuda_built"))


def rocm_built() -> bool:
    """Whether Horovod was built with ROCm."""
    return bool(_built("rocm_built"))


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU. The arguments are Horovod's, and not needed."""
    del ext_base_name, verbose
    return bool(tf.config.list_physical_devices("GPU"))


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "",
                    *args: str) -> None:
    """Raise an ImportError where the installed Horovod cannot be used with this TensorFlow."""
    del ext_env_var, pkg_path, args
    found = check_horovod()
    if not found.ok:
        raise MissingExtraError(f"{ext_name} cannot be used: {'; '.join(found.problems)}")


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8, ..., which Adasum needs."""
    return num_rank > 0 and not num_rank & (num_rank - 1)
