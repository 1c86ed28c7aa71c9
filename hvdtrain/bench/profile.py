"""What a prediction starts from: a measured `Profile`, and the `Cluster` that is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.errors import ConfigError

PAYLOAD = 1448 / 1514
"""What TCP delivers of the bytes on an Ethernet link, with packets of 1500 bytes."""

Kind = Literal["reduce", "divide", "gather"]
_CLUSTER = re.compile(
    r"(?P<hosts>[1-9]\d*)x(?P<ranks>[1-9]\d*)"
    r"(@(?P<rate>\d+(\.\d+)?)(?P<unit>[kmg])bit(,(?P<delay>\d+(\.\d+)?)(?P<scale>us|ms))?)?")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of equal ranks on equal links.

    Args:
        hosts: Integer.
        ranks_per_host: Integer.
        bits_per_s: Float, of each host's link in each direction; None for one host.
        latency_s: Float, of a small message from one process to another on another host; None: that
            of the profile.
        one_machine: Boolean, the hosts are virtual ones that share the cores of one machine.
    """

    hosts: int
    ranks_per_host: int
    bits_per_s: float | None = None
    latency_s: float | None = None
    one_machine: bool = False
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """`8x4@100gbit` or `8x4@100gbit,20us`: 8 hosts with 4 ranks each; ConfigError."""
        match = _CLUSTER.fullmatch(text.replace(" ", "").lower())
        if match is None or (match["rate"] and not float(match["rate"])):
            raise ConfigError(
                f"--on is {text!r}. Expected HOSTSxRANKS@RATE, e.g. 8x4@100gbit for 8 hosts with "
                "4 ranks each and links of 100 Gbit/s, or 8x4@100gbit,20us with the time of a "
                "small message.")
        hosts = int(match["hosts"])
        if hosts > 1 and not match["rate"]:
            raise ConfigError(f"--on is {text!r}, which has {hosts} hosts and no network. Expected "
                              f"the speed of a host's link as well, e.g. {text}@25gbit.")
        return cls(
            hosts=hosts, ranks_per_host=int(match["ranks"]), text=text,
            bits_per_s=float(match["rate"]) * _BITS[match["unit"]] if match["rate"] else None,
            latency_s=float(match["delay"]) * _SECONDS[match["scale"]] if match["delay"] else None)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    def wire_s(self, link_bytes: float) -> float:
        """Seconds of bytes over one link in one direction; 0 within a host."""
        if self.hosts == 1 or self.bits_per_s is None:
            return 0.0
        return 8 * link_bytes / (self.bits_per_s * PAYLOAD)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of a step.

    `ready_s`: after the batch was there. `size`: bytes of the whole tensor that is reduced, or
    divided over the ranks (reduce-scatter, all-to-all, a gather of parts); for `gather` the bytes
    that each rank gives to all others.
    """

    ready_s: float
    size: float
    kind: Kind = "reduce"

    def link_bytes(self, ranks: int) -> float:
        """What a rank sends, and receives.

        A ring: 2 (n - 1) / n of the size (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce
        algorithms for clusters of workstations"), half of it for one of its two phases. Ranks are
        numbered host after host, so that each host's link carries as much, however many ranks the
        host has: Horovod over Gloo has one ring of all ranks.
        """
        share = {"reduce": 2 * (ranks - 1) / ranks, "divide": (ranks - 1) / ranks,
                 "gather": ranks - 1}
        return share[self.kind] * self.size

    def messages(self, ranks: int) -> int:
        """Messages of a ring that follow each other."""
        return (2 if self.kind == "reduce" else 1) * (ranks - 1)


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """What a collective costs two ranks of one host, measured.

    Args:
        fixed_s: Float, of the smallest one.
        byte_s: Float, of each byte more.
        copy_s: Float, how much of `byte_s` is copying before and after the ring.
    """

    fixed_s: float
    byte_s: float
    copy_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServerCost:
    """A step with one worker and one server on one host, measured, in mode `sync`.

    Args:
        step_s: Float, whole.
        worker_cpu_s: Float, processor time of the worker.
        server_cpu_s: Float, of the server: sending parameters, applying one gradient.
        chief_cpu_s: Float, of the chief.
    """

    step_s: float
    worker_cpu_s: float
    server_cpu_s: float
    chief_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A job, measured on one rank.

    Args:
        samples: Integer, of an epoch.
        batch: Integer, samples per step of a rank, to which the times belong.
        batch_global: Integer, where the job fixes the samples of a step over all ranks.
        fixed_s: Float, forward and backward of no samples (a line through the measured batches).
        sample_s: Float, of each sample more.
        update_s: Float, from the gradients to the end of the step.
        loop_s: Float, between the end of one step and the beginning of the next.
        read_s: Float, to read a sample when nothing else is done.
        cores: Integer, of a host.
        cores_used: Float, that the measured rank used on average.
        parameter_bytes: Float, as they travel to and from servers.
        transfers: Collectives of a step, in the order in which they are ready.
        latency_s: Float, of a small message within the host.
        exchange: What collectives cost, by name.
        servers: What a step with a server costs; None: not measured.
    """

    samples: int
    batch: int
    batch_global: int | None = None
    fixed_s: float
    sample_s: float
    update_s: float
    loop_s: float
    read_s: float = 0.0
    cores: int = 1
    cores_used: float = 1.0
    parameter_bytes: float
    transfers: tuple[Transfer, ...]
    latency_s: float = 0.0
    exchange: Mapping[str, ExchangeCost] = field(default_factory=dict)
    servers: ServerCost | None = None

    def batch_on(self, ranks: int) -> float:
        """Samples per step of a rank."""
        return self.batch if self.batch_global is None else self.batch_global / ranks

    def compute_s(self, batch: float) -> float:
        """Forward and backward."""
        return max(0.0, self.fixed_s + self.sample_s * batch)

    def single_s(self, batch: float) -> float:
        """A step of one rank."""
        return max(self.compute_s(batch) + self.update_s + self.loop_s, self.read_s * batch)
