"""`World`: which rank this process is, of how many, read from its starter's variables.

Pure functions over a mapping; nothing is imported, initialized or written. Each reader handles the
variables of one starter and returns a complete `World`, None when none of its variables is there,
or raises an error: a missing rank is never taken for rank 0. The first reader with a result wins;
the order is that of the innermost starter (mpirun inside a Slurm allocation leaves the Slurm
variables of its daemon on every rank).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import WorldError
from hvdtrain.hosts import cross_place, expand_counts, expand_hostlist

STARTER_VARIABLE = "HVDTRAIN_STARTER"  # of starters that set HOROVOD_RANK, but horovodrun
HOSTS_VARIABLE = "HVDTRAIN_HOSTS"  # `HOST:SLOTS,...` in the order of the ranks, of our launcher
Environ = Mapping[str, str]
_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_OF_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

# Slurm numbers the batch script, `salloc`'s interactive shell and the like from here on:
# they have a step id but are no ranks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_REASON = {
    "native": "HOROVOD_RANK is set, and HVDTRAIN_STARTER says that `hvdtrain launch` did it",
    "horovodrun": "HOROVOD_RANK is set",
    "openmpi": "OMPI_COMM_WORLD_RANK is set",
    "hydra": "PMI_RANK and MPI_LOCALRANKID are set",
    "slurm": "SLURM_STEP_ID is set: this is a task of a Slurm step",
    "tf_config": "TF_CONFIG holds a cluster with this task",
    "single": "no variable of a known starter is set",
}
_RENDEZVOUS = {
    "gloo": "gloo: the starter handed down an address",
    "mpi": "mpi: the ranks find each other in MPI_Init",
    "bootstrap": "bootstrap: nobody prepared one, hvdtrain does it",
    "none": "none: there is one rank",
}


@dataclass(frozen=True, kw_only=True)
class World:
    """What a starter promised this process, in the terms of Horovod and MPI.

    The promise is compared with the initialized collective (`hvdtrain.session`): a rank that was
    promised to be one of N never trains alone. `cross_rank` is the rank among the processes with
    the same local rank; None where unknown. `starter` is `native`, `horovodrun`, `openmpi`,
    `hydra`, `slurm`, `tf_config` or `single`. `rendezvous` is how the ranks can find each other:
    `gloo` (an address was given), `mpi` (MPI_Init), `bootstrap` (none prepared: we do it) or `none`
    (one rank). `evidence` are the environment variables that were read. `hosts` are all host names
    in order of their first rank, where known, with the ranks on each in `slots`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None = None
    cross_size: int | None = None
    host: str
    starter: str
    rendezvous: str
    evidence: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def explain(world: World) -> str:
    """The facts about this process, one per line; the variables that were read last."""
    told = "not told by the starter"
    cross = told if world.cross_rank is None else f"{world.cross_rank} of {world.cross_size}"
    hosts = ", ".join(f"{h}:{n}" for h, n in zip(world.hosts, world.slots, strict=True))
    rows = [
        ("rank", f"{world.rank} of {world.size}"),
        ("local rank", f"{world.local_rank} of {world.local_size}"),
        ("cross rank", cross),
        ("host", world.host),
        ("hosts", hosts or told),
        ("starter", f"{world.starter}: {_REASON.get(world.starter, 'named by the caller')}"),
        ("rendezvous", _RENDEZVOUS.get(world.rendezvous, world.rendezvous)),
        *(("read", f"{name}={value}") for name, value in world.evidence.items()),
    ]
    return "\n".join(f"{key + ':':<13}{value}" for key, value in rows)


def detect_world(environ: Environ, *, hostname: str | None = None,
                 parameter_servers: bool = False) -> World:
    """Find out which rank this process is, of how many.

    Order: Horovod (horovodrun and our launcher), Open MPI, hydra (MPICH, Intel MPI), a Slurm step,
    TF_CONFIG, and last a single process.

    Args:
        environ: The environment, e.g. `os.environ`.
        hostname: String, the name of this host where the starter does not give it; defaults to that
            of the system.
        parameter_servers: Boolean, servers and the evaluator of a TF_CONFIG are ranks too, the last
            ones. They have no part in allreduce, and are refused.

    Raises:
        WorldError: Variables of a starter are incomplete or contradict each other, or many
            processes were promised and this one was not started as one of them.
    """
    host = hostname if hostname is not None else socket.gethostname()
    found = (_read_horovod(environ, host) or _read_mpi(environ, host) or _read_slurm(environ, host)
             or _read_tf_config(environ, parameter_servers=parameter_servers))
    if found is not None:
        return found
    # Many processes of a partly supported process manager must not each train alone.
    for name in ("PMIX_RANK", "PMI_RANK"):
        if name in environ:
            raise WorldError(
                f"{name} is {environ[name]}, so this process is one of several, but neither "
                "OMPI_COMM_WORLD_RANK, MPI_LOCALRANKID nor SLURM_STEP_ID tells how many. Start "
                "it with one of: hvdtrain launch -np N fit ..., mpirun -n N hvdtrain fit ..., "
                "srun hvdtrain fit ...")
    # A batch script or the shell of salloc has SLURM_NTASKS, but is no rank.
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and tasks != "1":
        raise WorldError(
            f"SLURM_NTASKS is {tasks}, but this process is not a task of a Slurm step "
            f"(SLURM_STEP_ID is {environ.get('SLURM_STEP_ID', 'not set')}): it would train alone. "
            "Start it with: srun hvdtrain fit ...")
    evidence = _evidence(environ, "SLURM_JOB_ID", "SLURM_NTASKS")
    return _world((0, 1, 0, 1), host, "single", "none", evidence)


def _read_horovod(environ: Environ, host: str) -> World | None:
    """HOROVOD_RANK and related: set by horovodrun over Gloo and by `hvdtrain launch`."""
    names = tuple(f"HOROVOD_{part}" for part in _PLACES)
    cross_names = ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
    command = "horovodrun --gloo -np N hvdtrain fit ..."
    if environ.keys().isdisjoint(names):
        return None
    numbers = _integers(environ, names, "horovodrun", command)
    cross = None if environ.keys().isdisjoint(cross_names) else _integers(
        environ, cross_names, "horovodrun", command)
    rank, size, _, local_size = numbers
    has_address = _ADDRESS in environ
    if not has_address and size != local_size:
        raise WorldError(
            f"HOROVOD_RANK is {rank} and HOROVOD_SIZE is {size}, but {_ADDRESS} is not set, so "
            "the ranks on other hosts cannot be found. Start them with: horovodrun --gloo "
            f"-np {size} -H HOST:SLOTS,... hvdtrain fit ...")
    starter = environ.get(STARTER_VARIABLE, "horovodrun")
    evidence = _evidence(environ, *names, *cross_names, "HOROVOD_HOSTNAME", _ADDRESS,
                         "HOROVOD_GLOO_RENDEZVOUS_PORT", STARTER_VARIABLE)
    pairs = [item.rpartition(":") for item in environ.get(HOSTS_VARIABLE, "").split(",")]
    slots = tuple(int(count) if count.isdigit() else 0 for _, _, count in pairs)
    hosts = tuple(name for name, _, _ in pairs)
    known = sum(slots) == size and all(hosts) and all(slots)
    return _world(numbers, environ.get("HOROVOD_HOSTNAME", host), starter,
                  "gloo" if has_address else "bootstrap", evidence, cross=cross,
                  hosts=hosts if known else (), slots=slots if known else ())


def _read_mpi(environ: Environ, host: str) -> World | None:
    """The variables of mpirun: of Open MPI 4 and 5, or of MPICH and Intel MPI."""
    names, starter, owner = tuple(
        f"OMPI_COMM_WORLD_{part}" for part in _PLACES), "openmpi", "Open MPI's mpirun"
    if environ.keys().isdisjoint(names):
        # `srun --mpi=pmi2` sets PMI_RANK as well, but not the local rank.
        names, starter, owner = _OF_HYDRA, "hydra", "MPICH's mpirun"
        if "MPI_LOCALRANKID" not in environ:
            return None
    numbers = _integers(environ, names, owner, "mpirun -n N hvdtrain fit ...")
    return _world(numbers, host, starter, "mpi", _evidence(environ, *names, "PMIX_VERSION"))


def _read_slurm(environ: Environ, host: str) -> World | None:
    """SLURM_PROCID and related, on the tasks of a step (`srun`) only."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or (step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP):
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
    evidence = _evidence(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", *names, *lists,
                         "SLURMD_NODENAME", "PMIX_RANK", "PMI_RANK")
    return _world((rank, size, local_rank, slots[node]),
                  environ.get("SLURMD_NODENAME", hosts[node]), "slurm", "bootstrap", evidence,
                  cross=cross_place(slots, node, local_rank), hosts=hosts, slots=slots)


def _read_tf_config(environ: Environ, *, parameter_servers: bool) -> World | None:
    """TF_CONFIG: set by Kubeflow's TFJob; one process per pod, rank by place in the cluster."""
    # TensorFlow keeps the evaluator out of the cluster: it is the rank after all others.
    text = environ.get("TF_CONFIG", "").strip()
    cluster, kind, index = parse_tf_config(text) if text else ({}, "", 0)
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
        rank, size, host = len(order), len(order) + 1, socket.gethostname()
    elif (kind, index) in order:
        rank, size = order.index((kind, index)), len(order)
        host = hosts[rank]
    else:
        raise WorldError(
            f"TF_CONFIG names the task {kind!r} with index {index}, which is not in its cluster "
            f"of {', '.join(f'{r} {i}' for r, i in order) or 'no workers'}.")
    return _world((rank, size, 0, 1), host, "tf_config", "bootstrap", {"TF_CONFIG": text},
                  cross=(rank, size), hosts=hosts, slots=(1,) * len(order))


def parse_tf_config(text: str) -> tuple[dict[str, list[str]], str, int]:
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


def _integers(environ: Environ, names: Sequence[str], starter: str,
              command: str) -> tuple[int, ...]:
    _require(environ, names, starter, command)
    found = []
    for name in names:
        try:
            found.append(int(environ[name]))
        except ValueError:
            raise WorldError(
                f"{name} is {environ[name]!r}. Expected a whole number, as {starter} sets it. "
                f"Start this program with: {command}") from None
    return tuple(found)


def _require(environ: Environ, names: Sequence[str], starter: str, command: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        found = ", ".join(f"{n}={environ[n]}" for n in names if n in environ) or "SLURM_STEP_ID"
        raise WorldError(
            f"{found} set, but not {', '.join(missing)}. Expected all of them, as {starter} sets "
            f"them. Start this program with: {command}, or unset them to run one process.")


def _evidence(environ: Environ, *names: str) -> dict[str, str]:
    """What was read. It is printed, so a capability in the rendezvous address is left out."""
    return {name: environ[name].partition("/")[0] if name == _ADDRESS else environ[name]
            for name in names if name in environ}


def _world(numbers: Sequence[int], host: str, starter: str, rendezvous: str,
           evidence: dict[str, str], *, cross: Sequence[int] | None = None,
           hosts: tuple[str, ...] = (), slots: tuple[int, ...] = ()) -> World:
    rank, size, local_rank, local_size = numbers
    if cross is None and local_size == size:
        cross = (0, 1)
    cross_rank, cross_size = cross or (None, None)
    places = {"rank": (rank, size), "local rank": (local_rank, local_size),
              "cross rank": cross or (0, 1)}
    wrong = [f"{what} {low} of {high}" for what, (low, high) in places.items()
             if not 0 <= low < high]
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
                 cross_rank=cross_rank, cross_size=cross_size, host=host, starter=starter,
                 rendezvous="none" if size == 1 else rendezvous, evidence=evidence, hosts=hosts,
                 slots=slots)
