"""`KubernetesOptions`: what the user asks of `hvdtrain k8s`, with the defaults."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from hvdtrain.errors import ConfigError
from hvdtrain.submit.slurm_options import check_variable

Kind = Literal["mpijob", "tfjob"]
IMPLEMENTATIONS = {"openmpi": "OpenMPI", "intel": "Intel", "mpich": "MPICH"}
CLEAN_POD_POLICIES = ("Running", "All", "None")
RESTART_POLICIES = {"mpijob": ("Never", "OnFailure"),
                    "tfjob": ("Never", "OnFailure", "Always", "ExitCode")}
# A service is made from the name, and services begin with a letter.
_SERVICE = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*")
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_LONGEST_LABEL, _LONGEST_SUBDOMAIN = 63, 253


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A persistent volume claim and where it is mounted."""

    name: str
    mount: str


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Validated when made; names as the cluster would check them, only sooner."""

    kind: Kind
    name: str
    image: str
    namespace: str | None = None
    workers: int = 1
    """Pods that train. Of a TFJob without servers the first is the chief."""
    servers: int = 0
    """Of a TFJob: pods that hold the parameters, for engine `ps`; the chief is one pod more."""
    slots_per_worker: int | None = None
    """Ranks in each pod. Default: one per GPU, else 1. A TFJob has one."""
    gpus_per_worker: int = 0
    cpu: str | None = None
    memory: str | None = None
    env: tuple[str, ...] = ()
    """`VAR=VALUE` for the ranks."""
    pvc: tuple[str, ...] = ()
    """`NAME:MOUNT`: persistent volume claims."""
    shm: str = "2Gi"
    """Size of /dev/shm, where NCCL and data loaders meet; Kubernetes gives 64 MiB. 0: as it is."""
    service_account: str | None = None
    restart_policy: str = "Never"
    backoff_limit: int = 0
    """So often a job that failed is started again."""
    ttl_s: int | None = None
    """Delete the job so long after its end. Default: never."""
    clean_pod_policy: str = "Running"
    grace_s: int = 60
    """From SIGTERM to SIGKILL when a pod is deleted or evicted: time to save."""
    implementation: str = "openmpi"
    """Of MPI, for an MPIJob: the way in which the operator writes the hostfile."""
    program: str = "hvdtrain"
    """hvdtrain in the image."""

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ConfigError: A value is unknown, out of range, or no name that Kubernetes takes.
        """
        self._check_names()
        self._check_numbers()
        self._check_policies()
        for option, quantity in (("--cpu", self.cpu), ("--memory", self.memory),
                                 ("--shm", self.shm)):
            if quantity is not None:
                check_quantity(option, quantity)
        for item in self.env:
            check_variable(item)
            if "=" not in item:
                raise ConfigError(f"--env is {item!r}. Expected VAR=VALUE: there is no environment "
                                  "to take it from in the cluster. Leave secrets to a Secret.")
        _check_claims(self.claims)

    @property
    def slots(self) -> int:
        """Ranks in each pod."""
        if self.kind == "tfjob":
            return 1
        return self.slots_per_worker or self.gpus_per_worker or 1

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The persistent volume claims."""
        return tuple(parse_claim(text) for text in self.pvc)

    @property
    def restarts(self) -> bool:
        """Whether what failed is started again."""
        return self.backoff_limit > 0 or self.restart_policy != "Never"

    @property
    def threads(self) -> int | None:
        """OMP_NUM_THREADS of a rank: its share of the pod's processors."""
        if self.cpu is None:
            return None
        number, unit = _parts(self.cpu)
        cores = number / 1000 if unit == "m" else number
        return max(1, int(cores) // self.slots)

    def _check_names(self) -> None:
        last = f"{self.name}-worker-{max(self.workers, 1) - 1}"
        _check_name("--name", self.name, _SERVICE, _LONGEST_LABEL - len(last) + len(self.name),
                    "begin with a letter")
        if self.namespace is not None:
            _check_name("--namespace", self.namespace, _LABEL, _LONGEST_LABEL)
        if self.service_account is not None:
            _check_name("--service-account", self.service_account, _SUBDOMAIN, _LONGEST_SUBDOMAIN)
        if _IMAGE.fullmatch(self.image) is None:
            raise ConfigError(f"--image is {self.image!r}. Expected the name of an image, e.g. "
                              "registry.example/team/hvdtrain:1.")
        if not self.program or self.program.startswith("-"):
            raise ConfigError(f"--program is {self.program!r}. Expected the program hvdtrain in "
                              "the image, e.g. /opt/venv/bin/hvdtrain.")

    def _check_numbers(self) -> None:
        for option, value, least in (
                ("--workers", self.workers, 1), ("--slots-per-worker", self.slots_per_worker, 1),
                ("--gpus-per-worker", self.gpus_per_worker, 0), ("--ps", self.servers, 0),
                ("--ttl", self.ttl_s, 0),
                ("--backoff-limit", self.backoff_limit, 0), ("--grace", self.grace_s, 1)):
            if value is not None and value < least:
                raise ConfigError(f"{option} is {value}. Expected {least} or more.")
        if self.kind == "tfjob" and (self.slots_per_worker or 1) > 1:
            raise ConfigError("A TFJob has one rank in each pod. Give more --workers, or use "
                              "`hvdtrain k8s mpijob`.")
        if self.gpus_per_worker and self.slots > self.gpus_per_worker:
            raise ConfigError(f"{self.slots} ranks in each pod have {self.gpus_per_worker} GPUs. "
                              "Each rank needs one of its own: correct --slots-per-worker or "
                              "--gpus-per-worker.")
        if self.kind == "tfjob" and self.gpus_per_worker > 1:
            raise ConfigError(f"--gpus-per-worker is {self.gpus_per_worker}, but a TFJob has one "
                              "rank in each pod, which uses one GPU. Give more --workers, or use "
                              "`hvdtrain k8s mpijob`.")

    def _check_policies(self) -> None:
        for option, value, names in (
                ("--restart-policy", self.restart_policy, RESTART_POLICIES[self.kind]),
                ("--clean-pod-policy", self.clean_pod_policy, CLEAN_POD_POLICIES),
                ("--implementation", self.implementation, tuple(IMPLEMENTATIONS))):
            if value not in names:
                raise ConfigError(f"{option} is {value!r}. Expected one of: {', '.join(names)}.")


def check_quantity(option: str, text: str) -> None:
    """Check a quantity in the way of Kubernetes.

    Raises:
        ConfigError: It is none.
    """
    if _QUANTITY.fullmatch(text) is None:
        raise ConfigError(f"{option} is {text!r}. Expected a quantity as in Kubernetes, e.g. 4 or "
                          "500m of processors, 16Gi of memory.")


def is_zero(text: str) -> bool:
    """Whether a quantity is 0."""
    return _parts(text)[0] == 0


def parse_claim(text: str) -> Claim:
    """Read `NAME:MOUNT`.

    Raises:
        ConfigError: It is not of that form.
    """
    name, colon, mount = text.partition(":")
    if not colon or not mount.startswith("/") or mount == "/" or ":" in mount or "\0" in mount:
        raise ConfigError(f"--pvc is {text!r}. Expected NAME:MOUNT, e.g. data:/data, where MOUNT "
                          "begins with / and holds no colon.")
    _check_name("--pvc", name, _SUBDOMAIN, _LONGEST_SUBDOMAIN)
    return Claim(name=name, mount=mount.rstrip("/"))


def _check_claims(claims: tuple[Claim, ...]) -> None:
    for mount, count in Counter([*(claim.mount for claim in claims), "/dev/shm"]).items():  # noqa: S108
        if count > 1:
            raise ConfigError(f"Two volumes are mounted at {mount}. Expected one (--pvc; --shm "
                              "makes that at /dev/shm).")


def _check_name(option: str, name: str, pattern: re.Pattern[str], longest: int,
                more: str = "") -> None:
    if pattern.fullmatch(name) is None or len(name) > longest:
        raise ConfigError(
            f"{option} is {name!r}. Expected at most {longest} lower-case letters, digits and "
            f"hyphens, that {more + ' and ' if more else ''}do not begin or end with a hyphen "
            "(RFC 1123).")


def _parts(text: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return Decimal(0), ""
    return Decimal(match["number"]), match["unit"] or ""
