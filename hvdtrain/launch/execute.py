"""Does a launch plan. The only module of the driver that starts processes for a launch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hvdtrain.errors import LaunchError, MachineError
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import signal_name
from hvdtrain.launch.native import EXIT_TIMEOUT, NativeJob
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.signals import WITH_STOP, SignalInbox
from hvdtrain.world.detect import STARTER_VARIABLE
from hvdtrain.world.failure import REPORT_VARIABLE
from hvdtrain.world.rendezvous import listen, serve

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


def launch(plan: LaunchPlan) -> int:
    """Start the ranks, stay until all of them have ended, and leave none behind.

    Args:
        plan: From `make_plan`.

    Returns:
        0 when every rank left with 0; the code of the rank that failed first, 128 + N for one
        killed by signal N; 124 when the time limit ended the job.

    Raises:
        LaunchError: The starter itself cannot be started.
    """
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(plan.unset)} | dict(plan.env)
    if plan.starter == "native":
        return _launch_native(plan, env)
    return _launch_foreign(plan, env)


def _launch_native(plan: LaunchPlan, env: Mapping[str, str]) -> int:
    slots = {slot.host: slot.local_size for slot in plan.slots}
    only_here = set(slots) <= plan.local_hosts
    server = serve(listen("127.0.0.1" if only_here else ""), hosts=list(slots),
                   slots=list(slots.values()))
    shared = dict(env) | {STARTER_VARIABLE: "native", REPORT_VARIABLE: "1"}
    try:
        console = Console(plan.np, out=sys.stdout, err=sys.stderr, directory=plan.output,
                          verbose=plan.verbose)
        try:
            with SignalInbox(WITH_STOP) as inbox:
                return NativeJob(plan, console).run(_start_agent, shared, inbox, server.port)
        finally:
            console.close()
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


def _launch_foreign(plan: LaunchPlan, env: Mapping[str, str]) -> int:
    """Run mpirun or horovodrun, which shows the output itself."""
    libc = ctypes.CDLL(None)
    try:
        # Should this launcher be killed, the kernel tells the starter to end.
        process = subprocess.Popen(
            plan.argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
    except OSError as error:
        raise LaunchError(f"The starter {plan.argv[0]} cannot be started: {error}. Install it, or "
                          "use --starter native.") from error
    try:
        with SignalInbox() as inbox:
            code = _wait_foreign(process, plan, inbox)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        sys.stderr.write(f"hvdtrain launch: {plan.starter} was killed by {signal_name(-code)}\n")
    return 128 - code if code < 0 else code


def _wait_foreign(process: subprocess.Popen[bytes], plan: LaunchPlan, inbox: SignalInbox) -> int:
    limit = None if plan.timeout_s is None else time.monotonic() + plan.timeout_s
    kill_at: float | None = None
    timed_out = False
    stopped_by = 0
    while process.poll() is None:
        for number in inbox.take():
            process.send_signal(number)
            if number in (signal.SIGINT, signal.SIGTERM):
                stopped_by, kill_at = number, time.monotonic() + plan.grace_s
        if limit is not None and time.monotonic() >= limit and not timed_out:
            sys.stderr.write(f"hvdtrain launch: the limit of {plan.timeout_s:g} s is over\n")
            process.terminate()
            timed_out, kill_at = True, time.monotonic() + plan.grace_s
        if kill_at is not None and time.monotonic() >= kill_at:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    if timed_out:
        return EXIT_TIMEOUT
    # mpirun answers every signal with 1; any other code was chosen by a rank.
    return 128 + stopped_by if stopped_by and process.returncode == 1 else process.returncode
