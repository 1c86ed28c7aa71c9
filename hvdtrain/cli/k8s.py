"""`hvdtrain k8s mpijob` and `hvdtrain k8s tfjob`: write a manifest for Kubernetes.

Registered with `app.add_typer(k8s_app, name="k8s")`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import hvdtrain
from hvdtrain.cli.fit import check_fit
from hvdtrain.cli.launch import LAUNCH_SETTINGS
from hvdtrain.cli.settings import Set, settings_env
from hvdtrain.cli.slurm import SubmitCommand, typed
from hvdtrain.submit.k8s_options import (
    CLEAN_POD_POLICIES,
    IMPLEMENTATIONS,
    RESTART_POLICIES,
    KubernetesOptions,
)

k8s_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                      help="Write manifests for Kubernetes, for Kubeflow's operators.")


def _option(text: str, *names: str, metavar: str | None = None, default: Any = False) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=default)


Command = Annotated[list[str], typer.Argument(
    metavar="COMMAND", help="An hvdtrain command with its arguments, as in `fit JOB`; or `--` and "
    "any program, as in `-- python train.py`. The paths are those in the image.")]
Name = Annotated[str, _option("Name of the job.", "--name")]
Image = Annotated[str, _option("Image with hvdtrain and the job.", "--image")]
Namespace = Annotated[str | None, _option("Default: that of kubectl.", "--namespace", "-n")]
Workers = Annotated[int, _option("Pods that train.", "--workers", default=True)]
Gpus = Annotated[int, _option("GPUs of each pod.", "--gpus-per-worker", default=True)]
Cpu = Annotated[str | None, _option("Processors of each pod, as in 8 or 500m.", "--cpu")]
Memory = Annotated[str | None, _option("Memory of each pod, as in 16Gi.", "--memory")]
Env = Annotated[list[str] | None, _option(
    "A variable for the ranks; repeatable.", "--env", "-x", metavar="VAR=VALUE")]
Pvc = Annotated[list[str] | None, _option(
    "A persistent volume claim and its place; repeatable.", "--pvc", metavar="NAME:MOUNT")]
Shm = Annotated[str, _option("Size of /dev/shm; 0: leave it.", "--shm", default=True)]
ServiceAccount = Annotated[str | None, _option("Of the pods.", "--service-account")]
BackoffLimit = Annotated[int, _option(
    "So often what failed is started again, with --resume.", "--backoff-limit", default=True)]
Ttl = Annotated[int | None, _option(
    "Delete the job so long after its end. Default: never.", "--ttl", metavar="SECONDS")]
CleanPods = Annotated[str, _option(
    f"Pods to delete at the end: {', '.join(CLEAN_POD_POLICIES)}.", "--clean-pod-policy",
    default=True)]
Grace = Annotated[int, _option(
    "From SIGTERM to SIGKILL when a pod is evicted.", "--grace", metavar="SECONDS",
    default=True)]
Program = Annotated[str, _option("hvdtrain in the image.", "--program", default=True)]
File = Annotated[Path | None, _option("Write to this file. Default: print it.", "--file", "-f")]


@k8s_app.command("mpijob", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)
def mpijob_command(
    ctx: typer.Context, command: Command, name: Name, image: Image,
    namespace: Namespace = None, workers: Workers = KubernetesOptions.workers,
    slots_per_worker: Annotated[int | None, _option(
        "Ranks in each pod. Default: one per GPU, else 1.", "--slots-per-worker")] = None,
    gpus_per_worker: Gpus = KubernetesOptions.gpus_per_worker, cpu: Cpu = None,
    memory: Memory = None, env: Env = None, settings: Set = None, pvc: Pvc = None,
    shm: Shm = KubernetesOptions.shm, service_account: ServiceAccount = None,
    restart_policy: Annotated[str, _option(
        f"Of the pods: {', '.join(RESTART_POLICIES['mpijob'])}.", "--restart-policy",
        default=True)] = KubernetesOptions.restart_policy,
    backoff_limit: BackoffLimit = KubernetesOptions.backoff_limit, ttl: Ttl = None,
    clean_pod_policy: CleanPods = KubernetesOptions.clean_pod_policy,
    grace: Grace = KubernetesOptions.grace_s,
    implementation: Annotated[str, _option(
        f"The dialect of the hostfile: {', '.join(IMPLEMENTATIONS)}.", "--implementation",
        default=True)] = KubernetesOptions.implementation,
    program: Program = KubernetesOptions.program, file: File = None,
) -> None:
    """Write an MPIJob: hvdtrain's launcher, and pods with sshd that train.

    hvdtrain k8s mpijob --name digits --image IMAGE --workers 2 --gpus-per-worker 4 -- fit JOB
    """
    _write(ctx, command, file, settings, KubernetesOptions(
        kind="mpijob", name=name, image=image, namespace=namespace, workers=workers,
        slots_per_worker=slots_per_worker, gpus_per_worker=gpus_per_worker, cpu=cpu,
        memory=memory, env=tuple(env or ()), pvc=tuple(pvc or ()), shm=shm,
        service_account=service_account, restart_policy=restart_policy,
        backoff_limit=backoff_limit, ttl_s=ttl, clean_pod_policy=clean_pod_policy, grace_s=grace,
        implementation=implementation, program=program))


@k8s_app.command("tfjob", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)
def tfjob_command(
    ctx: typer.Context, command: Command, name: Name, image: Image,
    namespace: Namespace = None, workers: Workers = KubernetesOptions.workers,
    ps: Annotated[int, _option(
        "Pods that hold the parameters, for engine ps.", "--ps",
        default=True)] = KubernetesOptions.servers,
    gpus_per_worker: Gpus = KubernetesOptions.gpus_per_worker, cpu: Cpu = None,
    memory: Memory = None, env: Env = None, settings: Set = None, pvc: Pvc = None,
    shm: Shm = KubernetesOptions.shm, service_account: ServiceAccount = None,
    restart_policy: Annotated[str, _option(
        f"Of the pods: {', '.join(RESTART_POLICIES['tfjob'])}.", "--restart-policy",
        default=True)] = KubernetesOptions.restart_policy,
    backoff_limit: BackoffLimit = KubernetesOptions.backoff_limit, ttl: Ttl = None,
    clean_pod_policy: CleanPods = KubernetesOptions.clean_pod_policy,
    grace: Grace = KubernetesOptions.grace_s, program: Program = KubernetesOptions.program,
    file: File = None,
) -> None:
    """Write a TFJob: one rank in each pod; no ssh, no MPI, no launcher.

    hvdtrain k8s tfjob --name digits --image IMAGE --workers 4 --gpus-per-worker 1 -- fit JOB

    With parameter servers: hvdtrain k8s tfjob ... --workers 4 --ps 2 -- fit JOB
    """
    _write(ctx, command, file, settings, KubernetesOptions(
        kind="tfjob", name=name, image=image, namespace=namespace, workers=workers,
        servers=ps, gpus_per_worker=gpus_per_worker, cpu=cpu, memory=memory, env=tuple(env or ()),
        pvc=tuple(pvc or ()), shm=shm, service_account=service_account,
        restart_policy=restart_policy, backoff_limit=backoff_limit, ttl_s=ttl,
        clean_pod_policy=clean_pod_policy, grace_s=grace, program=program))


def _write(ctx: typer.Context, command: list[str], file: Path | None,
           settings: list[str] | None, options: KubernetesOptions) -> None:
    # Imported here, so that `hvdtrain --help` does not wait for them.
    from hvdtrain.launch.rank_command import split_command
    from hvdtrain.submit.files import write_generated
    from hvdtrain.submit.manifests import make_manifest
    from hvdtrain.submit.yaml_text import to_yaml

    ranks = split_command(command, f"hvdtrain k8s {options.kind}")
    if ranks.is_fit:
        check_fit(ranks.own_words[1:], elsewhere=True)
    options = replace(options, env=(*settings_env(ranks, settings), *options.env))
    text = to_yaml(make_manifest(options, ranks), hvdtrain.__version__, typed(ctx))
    if file is None:
        print(text, end="")
        return
    write_generated(file, text)
    print(f"hvdtrain k8s: wrote {file}", file=sys.stderr)
