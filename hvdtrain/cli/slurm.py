"""`hvdtrain slurm`: writes a Slurm batch script, and submits it if asked.

Registered with `app.command("slurm", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hvdtrain.cli.fit import check_fit
from hvdtrain.cli.launch import LaunchCommand
from hvdtrain.cli.settings import Set, settings_env
from hvdtrain.submit.slurm_options import SlurmOptions

_TYPED = "hvdtrain.typed"


class SubmitCommand(LaunchCommand):
    """As `LaunchCommand`; keeps what was typed, for the head of what is written."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Remember the arguments, then parse them."""
        names: list[str] = []
        at: Any = ctx
        while at.parent is not None:
            names.insert(0, at.info_name or "")
            at = at.parent
        ctx.meta[_TYPED] = (*names, *args)
        return super().parse_args(ctx, args)


def typed(ctx: typer.Context) -> tuple[str, ...]:
    """What was typed after `hvdtrain`."""
    words: tuple[str, ...] = ctx.meta[_TYPED]
    return words


def _option(text: str, *names: str, metavar: str | None = None, default: Any = False) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=default)


def slurm_command(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(
        metavar="COMMAND", help="An hvdtrain command with its arguments, as in `fit JOB`; or "
        "`--` and any program, as in `-- python train.py`.")],
    nodes: Annotated[int, _option("Hosts.", "--nodes", "-N", default=True)] = SlurmOptions.nodes,
    ntasks: Annotated[int | None, _option("Ranks in all.", "--ntasks", "-n")] = None,
    ntasks_per_node: Annotated[int | None, _option(
        "Ranks on each host. Default: one per GPU.", "--ntasks-per-node")] = None,
    gpus_per_node: Annotated[int | None, _option("GPUs of each host.", "--gpus-per-node")] = None,
    cpus_per_task: Annotated[int | None, _option(
        "Processors of each rank.", "--cpus-per-task", "-c")] = None,
    mem: Annotated[str | None, _option("Memory of each host, as in 64G.", "--mem")] = None,
    time: Annotated[str | None, _option(
        "Time limit, as in 12:00:00 or 1-12.", "--time", "-t")] = None,
    partition: Annotated[str | None, _option("As in sbatch.", "--partition", "-p")] = None,
    account: Annotated[str | None, _option("As in sbatch.", "--account", "-A")] = None,
    qos: Annotated[str | None, _option("As in sbatch.", "--qos", "-q")] = None,
    constraint: Annotated[str | None, _option("As in sbatch.", "--constraint", "-C")] = None,
    job_name: Annotated[str | None, _option(
        "Default: the name of the job file.", "--job-name", "-J")] = None,
    output: Annotated[str | None, _option(
        "Slurm's log file, a pattern. Default: slurm-%j.out.", "--output", "-o")] = None,
    module: Annotated[list[str] | None, _option(
        "An environment module to load; repeatable.", "--module")] = None,
    env: Annotated[list[str] | None, _option(
        "A variable for the ranks; repeatable.", "--env", "-x", metavar="VAR[=VALUE]")] = None,
    settings: Set = None,
    venv: Annotated[Path | None, _option(
        "A virtual environment to activate. Default: none; this Python is named.",
        "--venv")] = None,
    program: Annotated[str | None, _option(
        "The hvdtrain to start, e.g. `hvdtrain` for that on PATH. Default: this one.",
        "--program")] = None,
    signal_before: Annotated[int, _option(
        "Tell the ranks to stop so long before the time limit; 0: do not.", "--signal-before",
        metavar="SECONDS", default=True)] = SlurmOptions.signal_before_s,
    requeue: Annotated[bool, _option(
        "Go on by itself after a stop and after a preemption.", "--requeue/--no-requeue",
        default=True)] = SlurmOptions.requeue,
    max_requeues: Annotated[int, _option(
        "So often at most.", "--max-requeues", default=True)] = SlurmOptions.max_requeues,
    wait: Annotated[int | None, _option(
        "From the end of the first rank to the end of all; 0: no limit. Default: 30 for fit.",
        "--wait", metavar="SECONDS")] = None,
    extra: Annotated[list[str] | None, _option(
        "One more option of sbatch, as in \"--exclusive\"; repeatable.", "--extra")] = None,
    script: Annotated[Path | None, _option(
        "Write the script to this file. Default: print it.", "--script")] = None,
    submit: Annotated[bool, _option("Give the script to sbatch; print the job's number.",
                                    "--submit")] = False,
    dry_run: Annotated[bool, _option("Print the script only.", "--dry-run")] = False,
) -> None:
    """Write a Slurm batch script that trains, stops in time and goes on by itself.

    hvdtrain slurm --nodes 2 --gpus-per-node 4 --time 12:00:00 --submit -- fit JOB
    """
    from hvdtrain.launch.rank_command import split_command
    from hvdtrain.submit.files import write_generated
    from hvdtrain.submit.sbatch import submit as give_to_slurm
    from hvdtrain.submit.slurm_script import make_script, with_absolute_venv

    ranks = split_command(command, "hvdtrain slurm")
    if ranks.is_fit:
        check_fit(ranks.own_words[1:])
    options = with_absolute_venv(SlurmOptions(
        nodes=nodes, ntasks=ntasks, ntasks_per_node=ntasks_per_node, gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task, mem=mem, time=time, partition=partition, account=account,
        qos=qos, constraint=constraint, job_name=job_name, output=output,
        modules=tuple(module or ()), env=(*settings_env(ranks, settings), *(env or ())),
        venv=venv, program=program,
        signal_before_s=signal_before, requeue=requeue, max_requeues=max_requeues, wait_s=wait,
        extra=tuple(extra or ())))
    text = make_script(options, ranks, made_by=typed(ctx))
    if dry_run or (script is None and not submit):
        print(text, end="")
        return
    if script is not None:
        write_generated(script, text, executable=True)
        print(f"hvdtrain slurm: wrote {script}", file=sys.stderr)
    if submit:
        print(give_to_slurm(text, script, options, os.environ))
