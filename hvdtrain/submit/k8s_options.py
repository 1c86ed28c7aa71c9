"""`KubernetesOptions`: what the user asks of `hvdtrain k8s`, with the defaults."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from hvdtrain.errors import ConfigError
from hvdtrain.settings import required, setting
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
    name: str = required("Name of the job.")
    image: str = required("Image with hvdtrain and the job.")
    namespace: str | None = setting(
        None, "Namespace of the job.", option="--namespace,-n", unset="that of kubectl")
    workers: int = setting(
        1, "Pods that train. Of a TFJob without servers the first is the chief.")
    servers: int = setting(
        0, "Pods that hold the parameters, for engine ps. The chief is one pod more.",
        option="--ps", only="tfjob")
    slots_per_worker: int | None = setting(
        None, "Ranks in each pod.", unset="one per GPU, else 1", only="mpijob")
    gpus_per_worker: int = setting(0, "GPUs of each pod.")
    cpu: str | None = setting(None, "Processors of each pod, as in 8 or 500m.")
    memory: str | None = setting(None, "Memory of each pod, as in 16Gi.")
    env: tuple[str, ...] = setting(
        (), "A variable for the ranks; repeatable.", option="--env,-x", metavar="VAR=VALUE")
    pvc: tuple[str, ...] = setting(
        (), "A persistent volume claim and its place; repeatable.", metavar="NAME:MOUNT")
    shm: str = setting(
        "2Gi", "Size of /dev/shm; 0: leave it. NCCL and data loaders meet there, and Kubernetes "
        "gives 64 MiB.")
    service_account: str | None = setting(None, "Of the pods.")
    restart_policy: str = setting(
        "Never", f"Of the pods: {', '.join(RESTART_POLICIES['tfjob'])} (the last two: TFJob).")
    backoff_limit: int = setting(0, "So often what failed is started again, with --resume.")
    ttl_s: int | None = setting(
        None, "Delete the job so long after its end.", metavar="SECONDS", unset="never")
    clean_pod_policy: str = setting(
        "Running", f"Pods to delete at the end: {', '.join(CLEAN_POD_POLICIES)}.")
    grace_s: int = setting(
        60, "From SIGTERM to SIGKILL when a pod is evicted: time to save.", metavar="SECONDS")
    implementation: str = setting(
        "openmpi", f"The dialect of the hostfile: {', '.join(IMPLEMENTATIONS)}.", only="mpijob")
    program: str = setting("hvdtrain", "hvdtrain in the image.")

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
