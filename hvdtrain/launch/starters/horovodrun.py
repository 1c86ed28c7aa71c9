"""Horovod's own horovodrun, over Gloo or an MPI."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.starters.base import GET_HOROVOD, Request, Starter
from hvdtrain.launch.starters.mpirun import (
    check_mpi,
    interface_names,
    need_mpirun,
    plain_login_words,
    ssh_args,
)


class Horovodrun(Starter):
    """On request."""

    name = "horovodrun"
    hides_environment = False
    rank_line = re.compile(rb"\[(?P<rank>\d+)\]<(?P<stream>stdout|stderr)>: ?(?P<text>.*)")
    rank_exits = ((r"Process (?P<rank>\d+) exit with status code (?P<code>\d+)\.", None, ""),)

    def check(self, request: Request) -> list[str]:
        notes, facts = list[str](), request.facts
        if request.options.collective == "horovod-mpi":
            notes = check_mpi(request)
        else:
            self.refuse_mpi(request)
        if not facts.horovod_ok:
            raise LaunchError(
                f"horovodrun needs Horovod: {facts.horovod_problem or 'it is not installed'}. "
                f"Install it with: {GET_HOROVOD}")
        if request.has_other_hosts and shlex.quote(folder := os.getcwd()) != folder:
            raise LaunchError(
                f"horovodrun cannot be used on other hosts from the folder {folder!r}, whose name "
                "it gives to a shell without quotes. Use --starter native, or another folder.")
        return notes

    def command(self, request: Request, env: Mapping[str, str]) -> tuple[str, ...]:
        options, facts = request.options, request.facts
        line = [str(Path(facts.scripts_dir) / "horovodrun"), "-np", str(request.np),
                "-H", request.host_list]
        if options.collective == "horovod-mpi":
            line.append("--mpi")
            if need_mpirun(facts).flavour == "openmpi":
                # Its own default has one dash, which Open MPI 5 takes for the program's name.
                line.append("--binding-args=--bind-to none --map-by slot")
        else:
            line.append("--gloo")
        if options.network_interface:
            line += ["--network-interfaces", ",".join(interface_names(options, self.name))]
        return (*line, *plain_login_words(options.remote, self.name), *options.command)

    def environment(self, request: Request) -> dict[str, str]:
        """It looks for mpirun on PATH only, and knows the ssh options of old Open MPI only."""
        if request.options.collective != "horovod-mpi":
            return {}
        mpirun = need_mpirun(request.facts)
        args = "PRTE_MCA_plm_ssh_args" if mpirun.major >= 5 else "OMPI_MCA_plm_rsh_args"
        path = request.environ.get("PATH", "/usr/bin:/bin")
        return {"PATH": f"{Path(mpirun.path).parent}:{path}",
                args: ssh_args(request.options.remote, request.facts)}


STARTER = Horovodrun()
