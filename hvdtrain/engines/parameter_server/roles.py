"""Which rank is what: from the number of ranks, or TF_CONFIG. Pure values."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from hvdtrain.engine_config import PsConfig
from hvdtrain.errors import ConfigError
from hvdtrain.world import World
from hvdtrain.world.detect import parse_tf_config

ASSIGNMENT_VARIABLE = "HVDTRAIN_PS_ASSIGNMENT"  # an `Assignment` as JSON

RoleKind = Literal["chief", "worker", "ps", "evaluator"]
Addresses = Mapping[str, Sequence[str]]
"""`HOST:PORT` by kind; TensorFlow keeps the evaluator out of the cluster."""

_KINDS: tuple[RoleKind, ...] = ("chief", "worker", "ps")
_WORDS = {"chief": "the chief", "worker": "worker", "ps": "server", "evaluator": "the evaluator"}


@dataclass(frozen=True, kw_only=True)
class Role:
    """The work of one rank. Kinds as in TF_CONFIG."""

    kind: RoleKind
    index: int = 0

    def __str__(self) -> str:
        words = _WORDS[self.kind]
        return words if words.startswith("the ") else f"{words} {self.index}"


def plan_roles(size: int, config: PsConfig) -> tuple[Role, ...]:
    """Each rank's role: chief, workers, servers, evaluator; ConfigError if no worker is left."""
    workers = size - 1 - config.servers - config.evaluator
    if workers < 1:
        needed = 2 + config.servers + config.evaluator
        raise ConfigError(
            f"Engine ps needs a chief, at least one worker and {config.servers} "
            f"server{'s' if config.servers > 1 else ''}"
            f"{' and the evaluator' if config.evaluator else ''}: {needed} ranks. Received: "
            f"{size}. Start it with: hvdtrain launch -np {needed} fit ... --engine ps --ps "
            f"{config.servers}")
    config.replicas(workers)
    counts: dict[RoleKind, int] = {"chief": 1, "worker": workers, "ps": config.servers,
                               "evaluator": int(config.evaluator)}
    return tuple(Role(kind=kind, index=i) for kind, count in counts.items() for i in range(count))


def roles_in(addresses: Addresses) -> tuple[Role, ...]:
    """The roles of a cluster in order of rank, without an evaluator."""
    return tuple(Role(kind=kind, index=i) for kind in _KINDS
                 for i in range(len(addresses.get(kind, ()))))


def tf_config_roles(text: str) -> tuple[tuple[Role, ...], Role, Addresses]:
    """All roles, this process' own, and addresses; ConfigError without chief, worker, server."""
    cluster, kind, index = parse_tf_config(text)
    own: RoleKind = "chief" if kind == "master" else kind  # type: ignore[assignment]
    addresses: dict[str, list[str]] = {kind: list(cluster.get(kind, ())) for kind in _KINDS}
    addresses["chief"] += cluster.get("master", ())
    missing = [kind for kind, some in addresses.items() if not some]
    if missing:
        raise ConfigError(
            f"TF_CONFIG has no {' and no '.join(missing)} in its cluster. Engine ps needs one "
            "chief, workers (worker) and servers (ps): add the replicas to the job.")
    return roles_in(addresses), Role(kind=own, index=index), addresses


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What the process of a role must know; its supervisor passes it as JSON.

    `hosts` are those of all ranks; TensorFlow's server takes connections from `admitted` (empty:
    from all); `starts` counts earlier starts; `run` is unique in an output folder.
    """

    role: Role
    rank: int
    size: int
    host: str
    cluster: Addresses
    hosts: Sequence[str] = ()
    threads: int = 1
    admitted: Sequence[str] = field(default_factory=list)
    starts: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.cluster["worker"])

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.cluster["ps"])

    @property
    def address(self) -> str:
        """`HOST:PORT` of this role; empty for the evaluator, or for a chief in one process."""
        own = self.cluster.get(self.role.kind, ())
        return own[self.role.index] if own else ""

    @property
    def name(self) -> str:
        """For messages, such as `worker 0 (rank 1 on a)`."""
        return f"{self.role} (rank {self.rank} on {self.host})"

    @property
    def world(self) -> World:
        """The rank that the process of the role works for."""
        return World(rank=self.rank, size=self.size, local_rank=0, local_size=1, host=self.host,
                     starter="ps" if self.size > 1 else "single", rendezvous="none")

    def to_json(self) -> str:
        """The environment variable's value for the child."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """What `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "role": Role(**fields["role"])})
