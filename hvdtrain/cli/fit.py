"""`hvdtrain fit`: train a job on this rank. Started once per rank by any starter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.config import CollectiveName, LrScaling, Remainder, Sparse


def fit_command(
    job: Annotated[str, typer.Argument(help="A .toml file, a .py file, or package.module.")],
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_per_rank: Annotated[int | None, typer.Option(help="Samples per step and rank.")] = None,
    seed: Annotated[int | None, typer.Option(help="Weights, shuffling, dropout.")] = None,
    shuffle: Annotated[bool | None, typer.Option(help="Reshuffle before each epoch.")] = None,
    remainder: Annotated[Remainder | None, typer.Option(
        help="A last batch that does not divide by the ranks.")] = None,
    lr_scaling: Annotated[LrScaling | None, typer.Option(
        help="Factor on the learning rate for N ranks.")] = None,
    warmup_epochs: Annotated[float | None, typer.Option(
        help="Epochs over which the rate rises.")] = None,
    collective: Annotated[CollectiveName | None, typer.Option(
        help="What reduces gradients.")] = None,
    bucket_mb: Annotated[float | None, typer.Option(help="Size of a gradient bucket.")] = None,
    sparse: Annotated[Sparse | None, typer.Option(
        help="How embedding gradients travel.")] = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", help="Folder for all files. Default: runs/<job>.")] = None,
    checkpoint_every_epochs: Annotated[int | None, typer.Option(help="0: never.")] = None,
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
    hang_timeout_s: Annotated[float | None, typer.Option(
        "--hang-timeout", help="Seconds until a rank that hangs ends the run. 0: never.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
) -> None:
    """Train JOB. The same on one process and under every starter.

    hvdtrain fit JOB | hvdtrain launch -np 8 fit JOB | horovodrun --gloo -np 8 hvdtrain fit JOB |
    mpirun -np 8 hvdtrain fit JOB | srun hvdtrain fit JOB
    """
    changes = dict(
        epochs=epochs, batch_per_rank=batch_per_rank, seed=seed, shuffle=shuffle,
        remainder=remainder, lr_scaling=lr_scaling, warmup_epochs=warmup_epochs,
        collective=collective, bucket_mb=bucket_mb, sparse=sparse, output=output,
        checkpoint_every_epochs=checkpoint_every_epochs, keep_checkpoints=keep_checkpoints,
        resume=resume, overwrite=overwrite, tensorboard=tensorboard,
        check_weights=check_weights, stop_on_nan=stop_on_nan,
        hang_timeout_s=hang_timeout_s)
    from hvdtrain.rank_main import fit_on_this_rank
    fit_on_this_rank(job, changes, dry_run=dry_run)
