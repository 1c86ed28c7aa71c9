"""Does a launch plan, with the environment and the streams of this process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hvdtrain.errors import EXIT_SIGNALLED, LaunchError, MachineError
from hvdtrain.launch.console import Console
from hvdtrain.launch.foreign import ForeignJob
from hvdtrain.launch.native import NativeJob
from hvdtrain.launch.network import await_names
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.signals import WITH_STOP, SignalInbox
from hvdtrain.world.detect import STARTER_VARIABLE
from hvdtrain.world.failure import REPORT_VARIABLE
from hvdtrain.world.rendezvous import listen, serve


def launch(plan: LaunchPlan) -> int:
    """Start the ranks, stay until all of them have ended, and leave none behind.

    Args:
        plan: From `make_plan`.

    Returns:
        0 when every rank left with 0; the code of the rank that failed first, 128 + N for one
        killed by signal N; 124 when the time limit ended the job.

    Raises:
        LaunchError: The starter itself cannot be started, or not from this folder.
        MachineError: Hosts that cannot be reached; nothing was started.
    """
    _check_folder(plan, os.getcwd())
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(plan.unset)} | dict(plan.env) | {REPORT_VARIABLE: "1"}
    console = Console(plan.np, out=sys.stdout, err=sys.stderr, directory=plan.output,
                      verbose=plan.verbose)
    try:
        if plan.starter == "native":
            return _launch_native(plan, env, console)
        with SignalInbox() as inbox:
            number = _await_others(plan, inbox)
            return EXIT_SIGNALLED + number if number else ForeignJob(plan, console).run(env, inbox)
    finally:
        console.close()


def _check_folder(plan: LaunchPlan, folder: str) -> None:
    """Refuse what horovodrun would hand to the shells of other hosts without quotes."""
    elsewhere = not {slot.host for slot in plan.slots} <= plan.local_hosts
    if plan.starter == "horovodrun" and elsewhere and shlex.quote(folder) != folder:
        raise LaunchError(
            f"horovodrun cannot be used on other hosts from the folder {folder!r}, whose name it "
            "gives to a shell without quotes. Use --starter native, or another folder.")


def _await_others(plan: LaunchPlan, inbox: SignalInbox) -> int:
    """Wait for the names of other hosts where that was asked; the signal that ended it, or 0."""
    taken: list[int] = []

    def interrupted() -> bool:
        taken.extend(inbox.take())
        return bool(taken)

    if plan.start_timeout_s and plan.starter != "srun":
        others = {slot.host for slot in plan.slots} - plan.local_hosts
        await_names(sorted(others), plan.start_timeout_s, interrupted)
    return taken[0] if taken else 0


def _launch_native(plan: LaunchPlan, env: Mapping[str, str], console: Console) -> int:
    slots = {slot.host: slot.local_size for slot in plan.slots}
    only_here = set(slots) <= plan.local_hosts
    server = serve(listen("127.0.0.1" if only_here else ""), hosts=list(slots),
                   slots=list(slots.values()))
    try:
        with SignalInbox(WITH_STOP) as inbox:
            return NativeJob(plan, console).run(
                _start_agent, dict(env) | {STARTER_VARIABLE: "native"}, inbox, server.port)
    finally:
        server.close()


def _start_agent(command: Sequence[str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which decides.
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise MachineError(f"{command[0]} cannot be started: {error}. Other hosts are reached "
                           "with it; install it (Debian/Ubuntu: apt-get install openssh-client)."
                           ) from error
