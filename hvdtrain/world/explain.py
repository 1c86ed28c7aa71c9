"""What `hvdtrain world` shows: the world in words, with the reason and the variables read."""

from __future__ import annotations

from hvdtrain.world.world import World

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


def explain(world: World) -> str:
    """The facts about this process, one per line; variables last."""
    cross = "not told by the starter"
    if world.cross_rank is not None:
        cross = f"{world.cross_rank} of {world.cross_size}"
    hosts = "not told by the starter"
    if world.hosts:
        hosts = ", ".join(f"{h}:{n}" for h, n in zip(world.hosts, world.slots, strict=True))
    rows = [
        ("rank", f"{world.rank} of {world.size}"),
        ("local rank", f"{world.local_rank} of {world.local_size}"),
        ("cross rank", cross),
        ("host", world.host),
        ("hosts", hosts),
        ("starter", f"{world.starter}: {_REASON.get(world.starter, 'named by the caller')}"),
        ("rendezvous", _RENDEZVOUS.get(world.rendezvous, world.rendezvous)),
    ]
    rows += [("read", f"{name}={value}") for name, value in world.evidence.items()]
    return "\n".join(f"{key + ':':<13}{value}" for key, value in rows)
