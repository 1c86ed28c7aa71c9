"""`hvdtrain doctor`: parse, call `examine`, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.cli.hosts import (
    Hostfile,
    NetworkInterface,
    SshIdentityFile,
    SshPort,
    split_networks,
)
from hvdtrain.errors import EXIT_MACHINE
from hvdtrain.launch.remote_shell import RemoteOptions


def doctor_command(
    hosts: Annotated[str | None, typer.Option(
        "-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts to examine, and how many ranks "
        "each is to take.", show_default="this host")] = None,
    hostfile: Hostfile = None,
    ssh_port: SshPort = None,
    ssh_identity_file: SshIdentityFile = None,
    network_interface: NetworkInterface = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", help="The job's output folder: is it one folder on all hosts?",
        show_default="runs, if it is there")] = None,
    allreduce: Annotated[bool, typer.Option(
        "--allreduce/--no-allreduce", help="Run two ranks that reduce known values.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check this machine, or each host of a job, and tell what repairs what is wrong.

    hvdtrain doctor

    hvdtrain doctor -H node1:4,node2:4

    Exit code 0, or 3 when a check failed.
    """
    from hvdtrain.doctor.examine import examine
    from hvdtrain.doctor.finding import any_failed
    from hvdtrain.doctor.options import DoctorOptions
    from hvdtrain.doctor.show import as_json as to_json
    from hvdtrain.doctor.show import show

    options = DoctorOptions(
        hosts=hosts, hostfile=hostfile, output=output, allreduce=allreduce,
        remote=RemoteOptions(port=ssh_port, identity_file=ssh_identity_file),
        network_interface=split_networks(network_interface))
    report = examine(options, os.environ, _say)
    if as_json:
        print(to_json(report))
    else:
        show(report)
    raise typer.Exit(EXIT_MACHINE if any_failed(report.findings) else 0)


def _say(text: str) -> None:
    print(f"hvdtrain doctor: {text}", file=sys.stderr, flush=True)
