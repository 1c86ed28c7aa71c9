"""Kubernetes manifests as values: an MPIJob (kubeflow.org/v2beta1) and a TFJob (v1).

Commands are lists, never a shell's text. Only fields that every release of the operators knows
are used.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.launch.rank_command import RankCommand
from hvdtrain.submit.k8s_options import IMPLEMENTATIONS, KubernetesOptions, is_zero

Manifest = dict[str, Any]
_GPU = "nvidia.com/gpu"
_SSHD = ("/usr/sbin/sshd", "-De")
# For the MPIJob's launcher, which trains nothing.
_LAUNCHER_CPU, _LAUNCHER_MEMORY = "1", "1Gi"
_LAUNCHER_MARGIN_S = 10


def make_manifest(options: KubernetesOptions, command: RankCommand) -> Manifest:
    """The manifest of a job.

    Raises:
        ConfigError: The command cannot be started again and again, but the options ask for it.
    """
    command = _with_resume(options, command)
    if options.kind == "mpijob":
        return _mpijob(options, command)
    return _tfjob(options, command)


def escape(word: str) -> str:
    """Write a word so that Kubernetes, which replaces `$(VAR)`, leaves it as it is."""
    return word.replace("$", "$$")


def _with_resume(options: KubernetesOptions, command: RankCommand) -> RankCommand:
    if not (options.restarts and command.can_take_resume):
        return command
    if "--overwrite" in command.words:
        raise ConfigError("--overwrite would delete the job's own checkpoints when it is started "
                          "again (--backoff-limit, --restart-policy). Leave it out and give "
                          "another --output, or let the job fail: --backoff-limit 0.")
    return command.with_words("--resume")


def _mpijob(options: KubernetesOptions, command: RankCommand) -> Manifest:
    variables = _variables(options)
    words = [options.program, "launch", "--starter", "native",
             "--grace", str(max(1, options.grace_s - _LAUNCHER_MARGIN_S))]
    # A session of sshd has none of the variables of its pod.
    words += [word for name in variables for word in ("-x", name)]
    words += ["--"] if command.is_program else []
    launcher = _container(options, "launcher", (*words, *command.words), variables)
    worker = _container(options, "worker", _SSHD, variables)
    _limit(launcher, {"cpu": options.cpu and _LAUNCHER_CPU,
                      "memory": options.memory and _LAUNCHER_MEMORY})
    _limit(worker, _worker_resources(options))
    return _job(options, "kubeflow.org/v2beta1", "MPIJob", {
        "slotsPerWorker": options.slots,
        "mpiImplementation": IMPLEMENTATIONS[options.implementation],
        "runPolicy": _run_policy(options),
        "mpiReplicaSpecs": {"Launcher": _replicas(options, 1, launcher),
                            "Worker": _replicas(options, options.workers, worker)}})


def _tfjob(options: KubernetesOptions, command: RankCommand) -> Manifest:
    words = command.words if command.is_program else (options.program, *command.words)
    if options.servers:
        return _with_servers(options, command, words)
    # The operator looks for a container of this name.
    container = _container(options, "tensorflow", words, _variables(options))
    _limit(container, _worker_resources(options))
    replicas = {"Chief": _replicas(options, 1, container)}
    if options.workers > 1:
        replicas["Worker"] = _replicas(options, options.workers - 1, container)
    return _job(options, "kubeflow.org/v1", "TFJob",
                {"runPolicy": _run_policy(options), "tfReplicaSpecs": replicas})


def _with_servers(options: KubernetesOptions, command: RankCommand,
                  words: tuple[str, ...]) -> Manifest:
    """Chief, workers and servers; only workers have GPUs."""
    if command.is_fit and "--engine" not in words:
        words = (*words, "--engine", "ps")
    worker = _container(options, "tensorflow", words, _variables(options))
    other = _container(options, "tensorflow", words, _variables(options))
    _limit(worker, _worker_resources(options))
    _limit(other, {**_worker_resources(options), _GPU: None})
    return _job(options, "kubeflow.org/v1", "TFJob", {
        "runPolicy": _run_policy(options),
        "tfReplicaSpecs": {"Chief": _replicas(options, 1, other),
                           "Worker": _replicas(options, options.workers, worker),
                           "PS": _replicas(options, options.servers, other)}})


def _job(options: KubernetesOptions, version: str, kind: str, spec: Manifest) -> Manifest:
    metadata = {"name": options.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _run_policy(options: KubernetesOptions) -> Manifest:
    policy: Manifest = {"cleanPodPolicy": options.clean_pod_policy,
                        "backoffLimit": options.backoff_limit}
    if options.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = options.ttl_s
    return policy


def _replicas(options: KubernetesOptions, count: int, container: Manifest) -> Manifest:
    spec: Manifest = {"terminationGracePeriodSeconds": options.grace_s,
                      "containers": [container]}
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    volumes = _volumes(options)
    if volumes:
        spec["volumes"] = volumes
    return {"replicas": count, "restartPolicy": options.restart_policy,
            "template": {"spec": spec}}


def _container(options: KubernetesOptions, name: str, words: tuple[str, ...],
               variables: dict[str, str]) -> Manifest:
    container: Manifest = {"name": name, "image": options.image, "command": [escape(words[0])]}
    if words[1:]:
        container["args"] = [escape(word) for word in words[1:]]
    container["env"] = [{"name": variable, "value": escape(value)}
                        for variable, value in variables.items()]
    mounts = [{"name": f"claim-{number}", "mountPath": claim.mount}
              for number, claim in enumerate(options.claims)]
    if not is_zero(options.shm):
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - in a pod of its own
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _volumes(options: KubernetesOptions) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim.name}}
        for number, claim in enumerate(options.claims)]
    if not is_zero(options.shm):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory",
                                                    "sizeLimit": options.shm}})
    return volumes


def _variables(options: KubernetesOptions) -> dict[str, str]:
    """The user's variables, and what ranks want where the user says nothing."""
    given = dict(item.partition("=")[::2] for item in options.env)
    defaults = {"PYTHONUNBUFFERED": "1"}
    if options.threads is not None:
        # A pod sees all processors of its node, whatever its limit is.
        defaults["OMP_NUM_THREADS"] = str(options.threads)
    return defaults | given


def _worker_resources(options: KubernetesOptions) -> dict[str, str | None]:
    gpus = str(options.gpus_per_worker) if options.gpus_per_worker else None
    return {"cpu": options.cpu, "memory": options.memory, _GPU: gpus}


def _limit(container: Manifest, resources: dict[str, str | None]) -> None:
    """Ask for as much as the limit is: a pod that others may not push aside."""
    asked = {name: value for name, value in resources.items() if value}
    if asked:
        container["resources"] = {"limits": asked, "requests": dict(asked)}
