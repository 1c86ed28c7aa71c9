"""The collectives by name, for the launcher, which loads no settings of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

COLLECTIVE_VARIABLE = "HVDTRAIN_COLLECTIVE"
"""Set by `launch --collective` for a script."""


@dataclass(frozen=True)
class CollectiveEntry:
    """What the launcher knows of a collective; `collectives.base.Collective` says the rest.

    `needs_mpi`: an MPI must start its ranks. `one_host`: they must be on one, and any starter does.
    """

    implementation: str
    needs_mpi: bool = False
    one_host: bool = False


COLLECTIVES = {
    "shared-memory": CollectiveEntry("hvdtrain.collectives.shared_memory:SharedMemory",
                                     one_host=True),
    "horovod-gloo": CollectiveEntry("hvdtrain.collectives.horovod:HorovodGloo"),
    "horovod-mpi": CollectiveEntry("hvdtrain.collectives.horovod:HorovodMpi", needs_mpi=True),
    "mpi4py": CollectiveEntry("hvdtrain.collectives.mpi:MpiCollective", needs_mpi=True),
    "single": CollectiveEntry("hvdtrain.collectives.single:SingleCollective", one_host=True),
}
"""All collectives by name, in the order in which `auto` tries them."""
if TYPE_CHECKING:
    CollectiveName = str
else:
    CollectiveName = Literal["auto", *COLLECTIVES]
