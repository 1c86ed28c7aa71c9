"""Does a launch plan, with the environment and the streams of this process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

from hvdtrain.errors import EXIT_SIGNALLED, LaunchError, MachineError
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import asked_for_input
from hvdtrain.launch.foreign import ForeignJob
from hvdtrain.launch.native import JobEnd, NativeJob
from hvdtrain.launch.network import await_names
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.signals import WITH_STOP, SignalInbox
from hvdtrain.launch.waiting import WaitingWords
from hvdtrain.world.detect import STARTER_VARIABLE
from hvdtrain.world.failure import REPORT_VARIABLE
from hvdtrain.world.rendezvous import listen_on_all, serve
from hvdtrain.world.secret import SECRET_VARIABLE, JobKey, new_secret, secret_in


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
    native = plan.starter == "native"
    console = Console(plan.np, out=sys.stdout, err=sys.stderr, directory=plan.output,
                      verbose=plan.verbose, live=native and plan.np == 1)
    try:
        if native:
            end = launch_native(plan, console, stdin=_input_of(plan))
            for line in end.report:
                console.say(line)
            if plan.np > 1 and end.cause is not None and asked_for_input(end.cause):
                console.say("standard input is there with one rank only: input() and debuggers "
                            "work with -np 1")
            return end.code
        with SignalInbox() as inbox:
            number = _await_others(plan, inbox, console)
            return (EXIT_SIGNALLED + number if number
                    else ForeignJob(plan, console).run(_environment(plan), inbox))
    finally:
        console.close()


def _environment(plan: LaunchPlan) -> dict[str, str]:
    """That of every rank."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(plan.unset)} | dict(plan.env) | {REPORT_VARIABLE: "1"}
    secret = secret_in(env) or new_secret()
    if plan.starter == "horovodrun":  # it writes the whole environment on command lines
        env.pop(SECRET_VARIABLE, None)
    else:
        env[SECRET_VARIABLE] = secret
    return env


def _input_of(plan: LaunchPlan) -> int | None:
    """The standard input of this process, where it is that of its only rank."""
    here = plan.np == 1 and plan.slots[0].host in plan.local_hosts
    if not here or sys.stdin is None or sys.stdin.closed:
        return None
    with suppress(OSError):  # no terminal, or one of another session
        if os.tcgetpgrp(0) != os.getpgrp():
            return None  # in the background: what is typed is for the shell
    return 0


def _check_folder(plan: LaunchPlan, folder: str) -> None:
    """Refuse what horovodrun would hand to the shells of other hosts without quotes."""
    elsewhere = not {slot.host for slot in plan.slots} <= plan.local_hosts
    if plan.starter == "horovodrun" and elsewhere and shlex.quote(folder) != folder:
        raise LaunchError(
            f"horovodrun cannot be used on other hosts from the folder {folder!r}, whose name it "
            "gives to a shell without quotes. Use --starter native, or another folder.")


def _await_others(plan: LaunchPlan, inbox: SignalInbox, console: Console) -> int:
    """Wait for the names of other hosts where that was asked; the signal that ended it, or 0."""
    taken: list[int] = []
    waiting = WaitingWords(console.say)

    def interrupted(missing: Sequence[str]) -> bool:
        waiting.tick(lambda: f"the names of {', '.join(missing)} to be known on this host")
        taken.extend(inbox.take())
        return bool(taken)

    if plan.start_timeout_s and plan.starter != "srun":
        others = {slot.host for slot in plan.slots} - plan.local_hosts
        await_names(sorted(others), plan.start_timeout_s, interrupted)
    return taken[0] if taken else 0


def launch_native(plan: LaunchPlan, console: Console, *, stdin: int | None = None) -> JobEnd:
    """Start the ranks with our own starter, and stay until all of them have ended.

    Args:
        plan: From `make_plan`, for the starter `native`.
        console: Takes what the ranks write.
        stdin: Integer, a descriptor for the standard input of the ranks of this host. None: they
            have none.

    Raises:
        LaunchError: A host cannot be used as asked.
        MachineError: Hosts that cannot be reached; nothing was started.
    """
    env = _environment(plan) | {STARTER_VARIABLE: "native"}
    slots = {slot.host: slot.local_size for slot in plan.slots}
    with ExitStack() as stack:
        def open_rendezvous(addresses: Sequence[str], sources: Sequence[str]) -> dict[str, int]:
            try:
                listeners = listen_on_all(addresses)
            except OSError as error:
                raise LaunchError(
                    f"The ranks cannot reach this launcher: they see it as "
                    f"{' and '.join(addresses)}, where it cannot listen ({error}). Expected hosts "
                    "that reach this one without network address translation. Start the launch "
                    "on one of them.") from error
            server = serve(listeners, hosts=list(slots), slots=list(slots.values()),
                           key=JobKey(env[SECRET_VARIABLE]), sources=sources)
            stack.callback(server.close)
            return server.ports

        given = () if stdin is None else (os.dup(stdin),)
        for descriptor in given:
            stack.callback(os.close, descriptor)
        inbox = stack.enter_context(SignalInbox(WITH_STOP))
        return NativeJob(plan, console, *given).run(
            partial(_start_agent, descriptors=given), env, inbox, open_rendezvous)


def _start_agent(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which decides.
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True,
                                pass_fds=descriptors)
    except OSError as error:
        raise MachineError(f"{command[0]} cannot be started: {error}. Other hosts are reached "
                           "with it; install it (Debian/Ubuntu: apt-get install openssh-client)."
                           ) from error
