"""Who am I: reads what a starter left in the environment, for every starter that is known.

Pure functions over a mapping; nothing is imported, initialised or written. Each reader owns the
variables of one starter and gives a complete `World`, None when none of its variables is there,
or an error: a missing rank is never taken for rank 0. The first reader with an answer wins; the
order is that of the innermost starter (mpirun inside a Slurm allocation leaves the Slurm
variables of its daemon on every rank).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.errors import WorldError
from hvdtrain.world.slurm import expand_counts, expand_hostlist
from hvdtrain.world.world import World

STARTER_VARIABLE = "HVDTRAIN_STARTER"
"""Set to `native` by our own launcher, on each rank."""

HOSTS_VARIABLE = "HVDTRAIN_HOSTS"
"""Set by our own launcher: `HOST:SLOTS,...` of the whole job, in the order of the ranks."""

Environ = Mapping[str, str]

_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"

# Slurm numbers the batch script, `salloc`'s interactive shell and the like from here on:
# they have a step id but are no ranks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def detect_world(environ: Environ, *, hostname: str | None = None,
                 parameter_servers: bool = False) -> World:
    """Find out which rank this process is, of how many.

    Order: Horovod (horovodrun and our launcher), Open MPI, hydra (MPICH, Intel MPI), a Slurm
    step, TF_CONFIG, and last a single process.

    Args:
        environ: The environment, e.g. `os.environ`.
        hostname: String, the name of this host where the starter does not tell it. Default:
            asked of the system.
        parameter_servers: Boolean, whether servers and the evaluator of a TF_CONFIG are ranks
            too, the last ones. They have no part in allreduce, and are refused.

    Raises:
        WorldError: Variables of a starter are incomplete or contradict each other, or many
            processes were promised and this one was not started as one of them.
    """
    host = hostname if hostname is not None else socket.gethostname()
    for reader in _READERS:
        world = reader(environ, host)
        if world is not None:
            return world
    world = _read_tf_config(environ, parameter_servers=parameter_servers)
    if world is not None:
        return world
    _refuse_leftovers(environ)
    _refuse_allocation(environ)
    evidence = {name: environ[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS") if name in environ}
    return World(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1, host=host,
                 starter="single", rendezvous="none", evidence=evidence, hosts=(host,), slots=(1,))


def _read_horovod(environ: Environ, host: str) -> World | None:
    """HOROVOD_RANK and its sisters: set by horovodrun over Gloo and by `hvdtrain launch`."""
    names = tuple(f"HOROVOD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    numbers = _complete(environ, names, "horovodrun", "horovodrun --gloo -np N hvdtrain fit ...")
    if numbers is None:
        return None
    cross = _complete(environ, ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"), "horovodrun",
                      "horovodrun --gloo -np N hvdtrain fit ...")
    rank, size, local_rank, local_size = numbers
    address = environ.get(_ADDRESS)
    if address is None and size != local_size:
        raise WorldError(
            f"HOROVOD_RANK is {rank} and HOROVOD_SIZE is {size}, but "
            "HOROVOD_GLOO_RENDEZVOUS_ADDR is not set, so the ranks on other hosts cannot be "
            f"found. Start them with: horovodrun --gloo -np {size} -H HOST:SLOTS,... "
            "hvdtrain fit ...")
    name = environ.get("HOROVOD_HOSTNAME", host)
    starter = "native" if environ.get(STARTER_VARIABLE) == "native" else "horovodrun"
    evidence = _evidence(environ, *names, "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE",
                         "HOROVOD_HOSTNAME", _ADDRESS,
                         "HOROVOD_GLOO_RENDEZVOUS_PORT", STARTER_VARIABLE)
    hosts, slots = _launched_hosts(environ, size) if starter == "native" else ((), ())
    return _world(numbers, name, starter, "bootstrap" if address is None else "gloo", evidence,
                  cross=cross, hosts=hosts, slots=slots)


def _launched_hosts(environ: Environ, size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The hosts of all ranks, where our launcher has told them."""
    pairs = [item.rpartition(":") for item in environ.get(HOSTS_VARIABLE, "").split(",")]
    if not all(host and count.isdigit() for host, _, count in pairs):
        return (), ()
    slots = tuple(int(count) for _, _, count in pairs)
    return (tuple(host for host, _, _ in pairs), slots) if sum(slots) == size else ((), ())


def _read_openmpi(environ: Environ, host: str) -> World | None:
    """OMPI_COMM_WORLD_*: set by mpirun of Open MPI 4 and 5."""
    names = tuple(f"OMPI_COMM_WORLD_{part}"
                  for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    numbers = _complete(environ, names, "Open MPI's mpirun", "mpirun -n N hvdtrain fit ...")
    if numbers is None:
        return None
    return _world(numbers, host, "openmpi", "mpi", _evidence(environ, *names, "PMIX_VERSION"))


def _read_hydra(environ: Environ, host: str) -> World | None:
    """PMI_RANK with MPI_LOCALRANKID: set by mpirun of MPICH and Intel MPI.

    `srun --mpi=pmi2` sets PMI_RANK as well, but not the local rank.
    """
    if "MPI_LOCALRANKID" not in environ:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    numbers = _complete(environ, names, "MPICH's mpirun", "mpirun -n N hvdtrain fit ...")
    if numbers is None:
        return None
    return _world(numbers, host, "hydra", "mpi", _evidence(environ, *names))


def _read_slurm(environ: Environ, host: str) -> World | None:
    """SLURM_PROCID and its sisters, on the tasks of a step (`srun`) only."""
    if not _in_slurm_step(environ):
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_NODEID")
    command = "srun hvdtrain fit ..."
    rank, size, local_rank, node = _integers(environ, names, "srun", command)
    lists = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    _require(environ, lists, "srun", command)
    slots = expand_counts(environ[lists[0]])
    hosts = expand_hostlist(environ[lists[1]])
    if len(slots) != len(hosts) or sum(slots) != size or not 0 <= node < len(hosts):
        raise WorldError(
            f"The Slurm step does not add up: {tasks}={size}, SLURM_NODEID={node}, "
            f"{lists[0]}={environ[lists[0]]}, {lists[1]}={environ[lists[1]]}. Expected as many "
            "counts as hosts, which sum to the number of tasks. Were variables of another job "
            f"exported? Start it with: {command}")
    cross = (sum(count > local_rank for count in slots[:node]),
             sum(count > local_rank for count in slots))
    evidence = _evidence(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", *names, *lists,
                         "SLURMD_NODENAME", "PMIX_RANK", "PMI_RANK")
    name = environ.get("SLURMD_NODENAME", hosts[node])
    return _world((rank, size, local_rank, slots[node]), name, "slurm", "bootstrap", evidence,
                  cross=cross, hosts=hosts, slots=slots)


def _read_tf_config(environ: Environ, *, parameter_servers: bool) -> World | None:
    """TF_CONFIG: set by Kubeflow's TFJob; one process per pod, rank by place in the cluster.

    TensorFlow keeps the evaluator out of the cluster: it is the rank after all others.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    cluster, kind, index = _parse_tf_config(text)
    if not cluster:
        return None
    if kind in ("ps", "evaluator") and not parameter_servers:
        raise WorldError(
            f"TF_CONFIG makes this process the {kind!r} with index {index}, which has no part in "
            "allreduce training: its workers keep the weights themselves and evaluate together. "
            f"Remove the {kind!r} replicas from the job, or train with --engine ps.")
    kinds = ("chief", "master", "worker", *(("ps",) if parameter_servers else ()))
    order = [(role, i) for role in kinds for i in range(len(cluster.get(role, ())))]
    hosts = tuple(cluster[role][i].rsplit(":", 1)[0] for role, i in order)
    if kind == "evaluator" and hosts:
        return _world((len(order), len(order) + 1, 0, 1), socket.gethostname(), "tf_config",
                      "bootstrap", {"TF_CONFIG": text}, cross=(len(order), len(order) + 1),
                      hosts=hosts, slots=(1,) * len(order))
    if (kind, index) not in order:
        raise WorldError(
            f"TF_CONFIG names the task {kind!r} with index {index}, which is not in its cluster "
            f"of {', '.join(f'{r} {i}' for r, i in order) or 'no workers'}.")
    rank, size = order.index((kind, index)), len(order)
    return _world((rank, size, 0, 1), hosts[rank], "tf_config", "bootstrap",
                  {"TF_CONFIG": text}, cross=(rank, size), hosts=hosts, slots=(1,) * size)


_READERS: tuple[Callable[[Environ, str], World | None], ...] = (
    _read_horovod, _read_openmpi, _read_hydra, _read_slurm)


def _parse_tf_config(text: str) -> tuple[dict[str, list[str]], str, int]:
    """The cluster, and type and index of the task."""
    try:
        value: Any = json.loads(text)
        cluster: dict[str, list[str]] = value.get("cluster") or {}
        task = value.get("task") or {}
        if not cluster:
            return {}, "", 0
        return cluster, str(task["type"]), int(task["index"])
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise WorldError(
            f"TF_CONFIG cannot be read ({type(error).__name__}: {error}): {text[:200]}. Expected "
            '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}. '
            "Correct or unset it.") from error


def _in_slurm_step(environ: Environ) -> bool:
    step = environ.get("SLURM_STEP_ID")
    return step is not None and not (step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP)


def _refuse_leftovers(environ: Environ) -> None:
    """A process manager that is only half known must not give many single processes."""
    for name in ("PMIX_RANK", "PMI_RANK"):
        if name in environ:
            raise WorldError(
                f"{name} is {environ[name]}, so this process is one of several, but neither "
                "OMPI_COMM_WORLD_RANK, MPI_LOCALRANKID nor SLURM_STEP_ID tells how many. Start "
                "it with one of: hvdtrain launch -np N fit ..., mpirun -n N hvdtrain fit ..., "
                "srun hvdtrain fit ...")


def _refuse_allocation(environ: Environ) -> None:
    """A batch script or the shell of salloc has SLURM_NTASKS, but is no rank."""
    tasks = environ.get("SLURM_NTASKS")
    if "SLURM_JOB_ID" in environ and tasks is not None and tasks != "1":
        raise WorldError(
            f"SLURM_NTASKS is {tasks}, but this process is not a task of a Slurm step "
            f"(SLURM_STEP_ID is {environ.get('SLURM_STEP_ID', 'not set')}): it would train alone. "
            "Start it with: srun hvdtrain fit ...")


def _complete(environ: Environ, names: Sequence[str], starter: str,
              command: str) -> tuple[int, ...] | None:
    """The values of `names`: all of them, or None when none of them is set."""
    if not any(name in environ for name in names):
        return None
    return _integers(environ, names, starter, command)


def _integers(environ: Environ, names: Sequence[str], starter: str,
              command: str) -> tuple[int, ...]:
    _require(environ, names, starter, command)
    numbers = []
    for name in names:
        try:
            numbers.append(int(environ[name]))
        except ValueError:
            raise WorldError(
                f"{name} is {environ[name]!r}. Expected a whole number, as {starter} sets it. "
                f"Start this program with: {command}") from None
    return tuple(numbers)


def _require(environ: Environ, names: Sequence[str], starter: str, command: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        found = ", ".join(f"{n}={environ[n]}" for n in names if n in environ) or "SLURM_STEP_ID"
        raise WorldError(
            f"{found} set, but not {', '.join(missing)}. Expected all of them, as {starter} sets "
            f"them. Start this program with: {command}, or unset them to run one process.")


def _evidence(environ: Environ, *names: str) -> dict[str, str]:
    """What was read. It is printed: a capability in the address of the rendezvous is left out."""
    return {name: environ[name].partition("/")[0] if name == _ADDRESS else environ[name]
            for name in names if name in environ}


def _world(numbers: Sequence[int], host: str, starter: str, rendezvous: str,
           evidence: dict[str, str], *, cross: Sequence[int] | None = None,
           hosts: tuple[str, ...] = (), slots: tuple[int, ...] = ()) -> World:
    """A checked `World` from rank, size, local rank and local size."""
    rank, size, local_rank, local_size = numbers
    if cross is None and local_size == size:
        cross = (0, 1)
    pairs = [("rank", rank, size), ("local rank", local_rank, local_size)]
    if cross is not None:
        pairs.append(("cross rank", cross[0], cross[1]))
    wrong = [f"{what} {low} of {high}" for what, low, high in pairs if not 0 <= low < high]
    if local_size > size:
        wrong.append(f"{local_size} ranks on this host of {size} in all")
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in evidence.items())
        raise WorldError(
            f"The variables of {starter} contradict each other: {'; '.join(wrong)}. Found: "
            f"{found}. Expected ranks from 0 to size - 1. Unset them, or start the program anew "
            "with its starter.")
    if not hosts and local_size == size:
        hosts, slots = (host,), (size,)
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size,
                 cross_rank=cross[0] if cross else None, cross_size=cross[1] if cross else None,
                 host=host, starter=starter, rendezvous="none" if size == 1 else rendezvous,
                 evidence=evidence, hosts=hosts, slots=slots)
