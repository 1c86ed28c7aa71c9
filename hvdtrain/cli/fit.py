"""`hvdtrain fit`: train a job on this rank. Started once per rank by any starter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.config import CollectiveName, Compression, Remainder, Sparse
from hvdtrain.engine_config import (
    CrossDevice,
    EngineName,
    Placement,
    PsEvaluation,
    PsMode,
    StrategyName,
    WireDtype,
)

_PS, _TF = "Engine ps", "Engine tf"


def fit_command(
    job: Annotated[str | None, typer.Argument(
        help="A .toml file, a .py file, or package.module.",
        show_default="hvdtrain.toml of this folder")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_per_rank: Annotated[int | None, typer.Option(help="Samples per step and rank.")] = None,
    seed: Annotated[int | None, typer.Option(help="Weights, shuffling, dropout.")] = None,
    shuffle: Annotated[bool | None, typer.Option(help="Reshuffle before each epoch.")] = None,
    remainder: Annotated[Remainder | None, typer.Option(
        help="A last batch that does not divide by the ranks.")] = None,
    lr_scaling: Annotated[str | None, typer.Option(
        help="Factor on the learning rate for N ranks: linear, sqrt, none, module:function.")
    ] = None,
    warmup_epochs: Annotated[float | None, typer.Option(
        help="Epochs over which the rate rises.")] = None,
    collective: Annotated[CollectiveName | None, typer.Option(
        help="What reduces gradients.")] = None,
    bucket_mb: Annotated[float | None, typer.Option(help="Size of a gradient bucket.")] = None,
    zero: Annotated[bool | None, typer.Option(
        help="Divide the state of the optimizer over the ranks.")] = None,
    sync_batch_norm: Annotated[bool | None, typer.Option(
        help="Batch normalization over the samples of all ranks.")] = None,
    sparse: Annotated[Sparse | None, typer.Option(
        help="How embedding gradients travel.")] = None,
    compression: Annotated[Compression | None, typer.Option(
        help="How gradients travel: whole, in half the bytes, in part.")] = None,
    topk_ratio: Annotated[float | None, typer.Option(
        help="topk: share of the elements that is sent.")] = None,
    approximation_rank: Annotated[int | None, typer.Option(
        help="lowrank: highest rank that is sent.")] = None,
    predivide: Annotated[float | None, typer.Option(
        help="Divide gradients by this before the sum, by N over it after.")] = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", help="Folder for all files. Default: runs/<job>.")] = None,
    checkpoint_every_epochs: Annotated[int | None, typer.Option(help="0: never.")] = None,
    checkpoint_every_steps: Annotated[int | None, typer.Option(
        help="Within epochs as well.")] = None,
    checkpoint_every_s: Annotated[float | None, typer.Option(
        "--checkpoint-every-seconds", help="Within epochs as well, by the clock.")] = None,
    checkpoint_background: Annotated[bool | None, typer.Option(
        help="Write files while training goes on.")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(help="So many of the newest.")] = None,
    resume: Annotated[bool | None, typer.Option(
        "--resume", help="Go on from the newest checkpoint in the output folder.")] = None,
    overwrite: Annotated[bool | None, typer.Option(
        "--overwrite", help="Delete a former run's checkpoints.")] = None,
    tensorboard: Annotated[bool | None, typer.Option(help="Write a TensorBoard log.")] = None,
    check_weights: Annotated[bool | None, typer.Option(
        help="Compare weights over ranks.")] = None,
    stop_on_nan: Annotated[bool | None, typer.Option(
        help="Stop when a loss is not finite.")] = None,
    xla: Annotated[bool | None, typer.Option(
        help="Compile gradients and update with XLA.")] = None,
    timeline: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Horovod's timeline of all collectives.")] = None,
    hang_timeout_s: Annotated[float | None, typer.Option(
        "--hang-timeout", help="Seconds until a rank that hangs ends the run. 0: never.")] = None,
    engine: Annotated[EngineName | None, typer.Option(
        help="How an update happens: allreduce, parameter servers, tf.distribute.")] = None,
    ps: Annotated[int | None, typer.Option(
        help="Ranks that hold the parameters.", rich_help_panel=_PS)] = None,
    ps_mode: Annotated[PsMode | None, typer.Option(
        help="Apply each gradient, or the mean of several.", rich_help_panel=_PS)] = None,
    ps_replicas: Annotated[int | None, typer.Option(
        help="sync: gradients per update.", rich_help_panel=_PS)] = None,
    ps_backup_workers: Annotated[int | None, typer.Option(
        help="sync: workers more than are needed.", rich_help_panel=_PS)] = None,
    ps_staleness: Annotated[int | None, typer.Option(
        help="async: batches in flight.", rich_help_panel=_PS)] = None,
    ps_steps_per_closure: Annotated[int | None, typer.Option(
        help="async: batches between two words with the chief.", rich_help_panel=_PS)] = None,
    ps_placement: Annotated[Placement | None, typer.Option(
        help="Which server gets which parameter.", rich_help_panel=_PS)] = None,
    ps_partitioner: Annotated[str | None, typer.Option(
        help="none, fixed:SHARDS, min_size:BYTES[:MAX], max_size:BYTES[:MAX].",
        rich_help_panel=_PS)] = None,
    ps_fused: Annotated[bool | None, typer.Option(
        help="One vector per server.", rich_help_panel=_PS)] = None,
    ps_sparse: Annotated[bool | None, typer.Option(
        help="Move only the rows of embeddings that are used.", rich_help_panel=_PS)] = None,
    ps_wire_dtype: Annotated[WireDtype | None, typer.Option(
        help="How numbers travel.", rich_help_panel=_PS)] = None,
    ps_evaluation: Annotated[PsEvaluation | None, typer.Option(
        help="Validate on the workers or on the chief.", rich_help_panel=_PS)] = None,
    evaluator: Annotated[bool | None, typer.Option(
        help="The last rank evaluates checkpoints beside.", rich_help_panel=_PS)] = None,
    max_restarts: Annotated[int | None, typer.Option(
        help="How often a lost role is started again.", rich_help_panel=_PS)] = None,
    ps_start_timeout_s: Annotated[float | None, typer.Option(
        "--ps-start-timeout", help="Seconds to wait for all roles.", rich_help_panel=_PS)] = None,
    strategy: Annotated[StrategyName | None, typer.Option(
        help="The strategy of tf.distribute.", rich_help_panel=_TF)] = None,
    devices: Annotated[int | None, typer.Option(
        help="Replicas in one process.", rich_help_panel=_TF)] = None,
    device: Annotated[str | None, typer.Option(
        help="one_device: which.", rich_help_panel=_TF)] = None,
    cross_device: Annotated[CrossDevice | None, typer.Option(
        help="How replicas add gradients.", rich_help_panel=_TF)] = None,
    tpu: Annotated[str | None, typer.Option(
        help="Name or address of the TPU.", rich_help_panel=_TF)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
) -> None:
    """Train JOB. The same on one process and under every starter.

    hvdtrain fit JOB | hvdtrain launch -np 8 fit JOB | horovodrun -np 8 hvdtrain fit JOB |
    mpirun -np 8 hvdtrain fit JOB | srun hvdtrain fit JOB

    With parameter servers: hvdtrain launch -np 5 fit JOB --engine ps --ps 2
    """
    changes = dict(
        epochs=epochs, batch_per_rank=batch_per_rank, seed=seed, shuffle=shuffle,
        remainder=remainder, lr_scaling=lr_scaling, warmup_epochs=warmup_epochs,
        collective=collective, bucket_mb=bucket_mb, zero=zero, sync_batch_norm=sync_batch_norm,
        sparse=sparse, compression=compression,
        topk_ratio=topk_ratio, approximation_rank=approximation_rank,
        predivide=predivide, output=output,
        checkpoint_every_epochs=checkpoint_every_epochs,
        checkpoint_every_steps=checkpoint_every_steps, checkpoint_every_s=checkpoint_every_s,
        checkpoint_background=checkpoint_background, keep_checkpoints=keep_checkpoints,
        resume=resume, overwrite=overwrite, tensorboard=tensorboard,
        check_weights=check_weights, stop_on_nan=stop_on_nan,
        xla=xla, timeline=timeline, hang_timeout_s=hang_timeout_s, engine=engine,
        ps=dict(
            servers=ps, mode=ps_mode, replicas_to_aggregate=ps_replicas,
            backup_workers=ps_backup_workers, staleness=ps_staleness,
            steps_per_closure=ps_steps_per_closure, placement=ps_placement,
            partitioner=ps_partitioner, fused=ps_fused, sparse_embeddings=ps_sparse,
            wire_dtype=ps_wire_dtype, evaluation=ps_evaluation, evaluator=evaluator,
            max_restarts=max_restarts, start_timeout_s=ps_start_timeout_s),
        tf=dict(strategy=strategy, devices=devices, device=device, cross_device=cross_device,
                tpu=tpu))
    from hvdtrain.rank_main import fit_on_this_rank
    fit_on_this_rank(job, changes, dry_run=dry_run)
