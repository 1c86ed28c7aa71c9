"""`hvdtrain k8s`: its options, and manifests of an MPIJob (kubeflow.org/v2beta1) and a TFJob (v1).

Commands are lists, not shell text. Only fields that every release of the operators knows are used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from hvdtrain.errors import ConfigError
from hvdtrain.launch.options import RankCommand
from hvdtrain.settings import check, required, setting
from hvdtrain.submit.slurm import check_variable, head

Kind = Literal["mpijob", "tfjob"]
Manifest = dict[str, Any]
Implementation = Literal["openmpi", "intel", "mpich"]
IMPLEMENTATIONS = {"openmpi": "OpenMPI", "intel": "Intel", "mpich": "MPICH"}
CleanPodPolicy = Literal["Running", "All", "None"]
RESTART_POLICIES = {"mpijob": ("Never", "OnFailure"),
                    "tfjob": ("Never", "OnFailure", "Always", "ExitCode")}
_GPU, _SSHD = "nvidia.com/gpu", ("/usr/sbin/sshd", "-De")
# For the MPIJob's launcher, which trains nothing.
_LAUNCHER_CPU, _LAUNCHER_MEMORY, _LAUNCHER_MARGIN_S = "1", "1Gi", 10
# A service is made from the name, and services begin with a letter.
_SERVICE = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*")
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_LONGEST_LABEL, _LONGEST_SUBDOMAIN = 63, 253
# Words that no version of YAML takes for anything but text. PyYAML alone would leave 1e3 and 0o14
# unquoted, which are numbers for the YAML of Kubernetes.
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null|nan|inf)$)"
                    r"[A-Za-z/][A-Za-z0-9_./-]*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A persistent volume claim and its mount path."""

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
        1, "Pods that train. Of a TFJob without servers the first is the chief.", least=1)
    servers: int = setting(
        0, "Pods that hold the parameters, for engine ps. The chief is one pod more.",
        option="--ps", only="tfjob", least=0)
    slots_per_worker: int | None = setting(
        None, "Ranks in each pod.", unset="one per GPU, else 1", only="mpijob", least=1)
    gpus_per_worker: int = setting(0, "GPUs of each pod.", least=0)
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
    backoff_limit: int = setting(
        0, "So often what failed is started again, with --resume.", least=0)
    ttl_s: int | None = setting(
        None, "Delete the job so long after its end.", metavar="SECONDS", unset="never", least=0)
    clean_pod_policy: CleanPodPolicy = setting(
        "Running", "Pods to delete at the end: Running, All, None.")
    grace_s: int = setting(
        60, "From SIGTERM to SIGKILL when a pod is evicted: time to save.", metavar="SECONDS",
        least=1)
    implementation: Implementation = setting(
        "openmpi", "The dialect of the hostfile: openmpi, intel, mpich.", only="mpijob")
    program: str = setting("hvdtrain", "hvdtrain in the image.")

    def __post_init__(self) -> None:
        check(self)
        self._check_names()
        self._check_ranks()
        if self.restart_policy not in RESTART_POLICIES[self.kind]:
            raise ConfigError(f"--restart-policy is {self.restart_policy!r}. Expected one of: "
                              f"{', '.join(RESTART_POLICIES[self.kind])}.")
        for option, quantity in (("--cpu", self.cpu), ("--memory", self.memory),
                                 ("--shm", self.shm)):
            if quantity is not None and _QUANTITY.fullmatch(quantity) is None:
                raise ConfigError(f"{option} is {quantity!r}. Expected a quantity as in "
                                  "Kubernetes, e.g. 4 or 500m of processors, 16Gi of memory.")
        for item in self.env:
            check_variable(item)
            if "=" not in item:
                raise ConfigError(f"--env is {item!r}. Expected VAR=VALUE: there is no environment "
                                  "to take it from in the cluster. Leave secrets to a Secret.")
        mounts = Counter(["/dev/shm", *(claim.mount for claim in self.claims)])  # noqa: S108
        (mount, count), = mounts.most_common(1)
        if count > 1:
            raise ConfigError(f"Two volumes are mounted at {mount}. Expected one (--pvc; --shm "
                              "makes that at /dev/shm).")

    @property
    def slots(self) -> int:
        """Ranks in each pod."""
        return 1 if self.kind == "tfjob" else self.slots_per_worker or self.gpus_per_worker or 1

    @property
    def threads(self) -> int | None:
        """OMP_NUM_THREADS of a rank: its share of the pod's processors."""
        if self.cpu is None:
            return None
        cores = _number(self.cpu) / (1000 if self.cpu.endswith("m") else 1)
        return max(1, int(cores) // self.slots)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The persistent volume claims."""
        return tuple(map(_parse_claim, self.pvc))

    def _check_names(self) -> None:
        added = len(f"-worker-{self.workers - 1}")
        _check_name("--name", self.name, _SERVICE, _LONGEST_LABEL - added,
                    "begin with a letter and ")
        _check_name("--namespace", self.namespace, _LABEL, _LONGEST_LABEL)
        _check_name("--service-account", self.service_account, _SUBDOMAIN, _LONGEST_SUBDOMAIN)
        if _IMAGE.fullmatch(self.image) is None:
            raise ConfigError(f"--image is {self.image!r}. Expected the name of an image, e.g. "
                              "registry.example/team/hvdtrain:1.")
        if not self.program or self.program.startswith("-"):
            raise ConfigError(f"--program is {self.program!r}. Expected the program hvdtrain in "
                              "the image, e.g. /opt/venv/bin/hvdtrain.")

    def _check_ranks(self) -> None:
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


def _number(quantity: str) -> Decimal:
    match = _QUANTITY.fullmatch(quantity)
    return Decimal(match["number"]) if match else Decimal(0)


def _parse_claim(text: str) -> Claim:
    name, colon, mount = text.partition(":")
    if not colon or not mount.startswith("/") or mount == "/" or ":" in mount or "\0" in mount:
        raise ConfigError(f"--pvc is {text!r}. Expected NAME:MOUNT, e.g. data:/data, where MOUNT "
                          "begins with / and holds no colon.")
    _check_name("--pvc", name, _SUBDOMAIN, _LONGEST_SUBDOMAIN)
    return Claim(name=name, mount=mount.rstrip("/"))


def _check_name(option: str, name: str | None, pattern: re.Pattern[str], longest: int,
                more: str = "") -> None:
    if name is not None and (pattern.fullmatch(name) is None or len(name) > longest):
        raise ConfigError(
            f"{option} is {name!r}. Expected at most {longest} lower-case letters, digits and "
            f"hyphens, that {more}do not begin or end with a hyphen (RFC 1123).")


def make_manifest(options: KubernetesOptions, command: RankCommand) -> Manifest:
    """The manifest of a job; ConfigError for `--overwrite` with restarts."""
    restarts = options.backoff_limit > 0 or options.restart_policy != "Never"
    if restarts and command.can_take_resume:
        if "--overwrite" in command.words:
            raise ConfigError(
                "--overwrite would delete the job's own checkpoints when it is started again "
                "(--backoff-limit, --restart-policy). Leave it out and give another --output, or "
                "let the job fail: --backoff-limit 0.")
        command = command.with_words("--resume")
    policy = _present(cleanPodPolicy=options.clean_pod_policy, backoffLimit=options.backoff_limit,
                      ttlSecondsAfterFinished=options.ttl_s)
    metadata = _present(name=options.name, namespace=options.namespace)
    if options.kind == "tfjob":
        return {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": metadata,
                "spec": {"runPolicy": policy, "tfReplicaSpecs": _tfjob(options, command)}}
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": metadata,
            "spec": {"slotsPerWorker": options.slots,
                     "mpiImplementation": IMPLEMENTATIONS[options.implementation],
                     "runPolicy": policy, "mpiReplicaSpecs": _mpijob(options, command)}}


def escape(word: str) -> str:
    """Protect a word from Kubernetes, which replaces `$(VAR)`."""
    return word.replace("$", "$$")


def _mpijob(options: KubernetesOptions, command: RankCommand) -> Manifest:
    words = [options.program, "launch", "--starter", "native",
             "--grace", str(max(1, options.grace_s - _LAUNCHER_MARGIN_S))]
    # sshd sessions do not have the variables of the pod.
    words += [word for name in _variables(options) for word in ("-x", name)]
    words += ["--"] if command.is_program else []
    small = {"cpu": options.cpu and _LAUNCHER_CPU, "memory": options.memory and _LAUNCHER_MEMORY}
    return {"Launcher": _pods(options, 1, "launcher", (*words, *command.words), small),
            "Worker": _pods(options, options.workers, "worker", _SSHD, _resources(options))}


def _tfjob(options: KubernetesOptions, command: RankCommand) -> Manifest:
    """With servers the chief trains nothing, and only workers have GPUs."""
    words = command.words if command.is_program else (options.program, *command.words)
    chief, servers, workers = _resources(options), options.servers, options.workers
    if servers:
        chief = {**chief, _GPU: None}
        if command.is_fit and "--engine" not in words:
            words = (*words, "--engine", "ps")
    # The operator looks for a container of this name.
    pods = {"Chief": _pods(options, 1, "tensorflow", words, chief)}
    if servers or workers > 1:
        pods["Worker"] = _pods(options, workers if servers else workers - 1, "tensorflow", words,
                               _resources(options))
    if servers:
        pods["PS"] = _pods(options, servers, "tensorflow", words, chief)
    return pods


def _pods(options: KubernetesOptions, count: int, name: str, words: Sequence[str],
          resources: dict[str, str | None]) -> Manifest:
    places: dict[str, tuple[str, Manifest]] = {
        f"claim-{number}": (claim.mount, {"persistentVolumeClaim": {"claimName": claim.name}})
        for number, claim in enumerate(options.claims)}
    if _number(options.shm):
        places["shm"] = ("/dev/shm",  # noqa: S108 - in a pod of its own
                         {"emptyDir": {"medium": "Memory", "sizeLimit": options.shm}})
    mounts = [{"name": name, "mountPath": mount} for name, (mount, _) in places.items()]
    volumes = [{"name": name, **volume} for name, (_, volume) in places.items()]
    # With requests equal to limits, other pods cannot displace the pod.
    limits = {resource: amount for resource, amount in resources.items() if amount}
    command, *args = map(escape, words)
    container = _present(
        name=name, image=options.image, command=[command], args=args or None,
        env=[{"name": variable, "value": escape(value)}
             for variable, value in _variables(options).items()],
        volumeMounts=mounts or None,
        resources={"limits": limits, "requests": limits} if limits else None)
    spec = _present(terminationGracePeriodSeconds=options.grace_s, containers=[container],
                    serviceAccountName=options.service_account, volumes=volumes or None)
    return {"replicas": count, "restartPolicy": options.restart_policy, "template": {"spec": spec}}


def _variables(options: KubernetesOptions) -> dict[str, str]:
    """The user's variables, and defaults for the ranks."""
    defaults = {"PYTHONUNBUFFERED": "1"}
    if options.threads is not None:
        # A pod sees all processors of its node, whatever its limit is.
        defaults["OMP_NUM_THREADS"] = str(options.threads)
    return defaults | dict(item.partition("=")[::2] for item in options.env)


def _resources(options: KubernetesOptions) -> dict[str, str | None]:
    gpus = str(options.gpus_per_worker) if options.gpus_per_worker else None
    return {"cpu": options.cpu, "memory": options.memory, _GPU: gpus}


def _present(**fields: Any) -> Manifest:
    return {name: value for name, value in fields.items() if value is not None}


def to_yaml(manifest: Manifest, made_by: Sequence[str] = ()) -> str:
    """Write a manifest as text that every reader of YAML understands alike."""
    import yaml  # here, so that `hvdtrain --help` does not wait for it

    class Dumper(yaml.SafeDumper):
        """Quotes all text that could be read as something else; writes a repeated value out."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style=None if _PLAIN.fullmatch(value) else '"'))
    body: str = yaml.dump(manifest, Dumper=Dumper, sort_keys=False, default_flow_style=False,
                          allow_unicode=False, width=1 << 20)
    return f"{head(made_by)}\n{body}"
