"""Which rank is what: from the number of ranks, or from TF_CONFIG. Pure values."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdtrain.engine_config import PsConfig
from hvdtrain.errors import ConfigError

Kind = Literal["chief", "worker", "ps", "evaluator"]
_WORDS = {"chief": "the chief", "worker": "worker", "ps": "server", "evaluator": "the evaluator"}


@dataclass(frozen=True, kw_only=True)
class Role:
    """What one rank does. Kinds as in TF_CONFIG."""

    kind: Kind
    index: int = 0

    def __str__(self) -> str:
        words = _WORDS[self.kind]
        return words if words.startswith("the ") else f"{words} {self.index}"

    @property
    def file_name(self) -> str:
        """As part of a file name, such as `worker0`."""
        return self.kind if self.kind in ("chief", "evaluator") else f"{self.kind}{self.index}"


def plan_roles(size: int, config: PsConfig) -> tuple[Role, ...]:
    """The role of each rank: the chief, the workers, the servers, the evaluator.

    Args:
        size: Integer, number of ranks.
        config: How many servers, and whether there is an evaluator.

    Raises:
        ConfigError: No worker is left.
    """
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
    return (Role(kind="chief"), *(Role(kind="worker", index=i) for i in range(workers)),
            *(Role(kind="ps", index=i) for i in range(config.servers)),
            *([Role(kind="evaluator")] if config.evaluator else []))


def tf_config_roles(text: str) -> tuple[tuple[Role, ...], Role, dict[str, list[str]]]:
    """The roles that a TF_CONFIG describes.

    Args:
        text: String, its JSON, which `detect_world` has accepted.

    Returns:
        The roles in the order of the ranks (without an evaluator, which TF_CONFIG keeps out of
        the cluster), that of this process, and the addresses `HOST:PORT` of each kind.

    Raises:
        ConfigError: There is no chief, no worker or no server.
    """
    value: dict[str, Any] = json.loads(text)
    cluster = dict(value["cluster"])
    if "master" in cluster:
        cluster["chief"] = cluster.pop("master")
    missing = [kind for kind in ("chief", "worker", "ps") if not cluster.get(kind)]
    if missing:
        raise ConfigError(
            f"TF_CONFIG has no {' and no '.join(missing)} in its cluster. Engine ps needs one "
            "chief, workers (worker) and servers (ps): add the replicas to the job.")
    addresses = {kind: list(cluster[kind]) for kind in ("chief", "worker", "ps")}
    kinds: tuple[Kind, ...] = ("chief", "worker", "ps")
    roles = tuple(Role(kind=kind, index=i) for kind in kinds for i in range(len(addresses[kind])))
    task = value["task"]
    kind: Kind = "chief" if task["type"] == "master" else task["type"]
    return roles, Role(kind=kind, index=int(task["index"])), addresses


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What the process of a role must know; handed from the supervisor to its child as JSON."""

    role: Role
    rank: int
    size: int
    host: str
    cluster: Mapping[str, Sequence[str]]
    """Addresses `HOST:PORT` of each kind, without the evaluator."""
    hosts: Sequence[str] = ()
    """The host of each rank."""
    threads: int = 1
    admitted: Sequence[str] = field(default_factory=list)
    """Addresses from which TensorFlow's server takes connections; empty: from all."""
    starts: int = 0
    """How often this role was started before."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells this run from a former one in the same output folder."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.cluster["worker"])

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.cluster["ps"])

    def to_json(self) -> str:
        """For the environment of the child."""
        fields = {**self.__dict__, "role": self.role.__dict__}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """What `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "role": Role(**fields["role"])})
