"""Runs a launch plan, with the environment and the streams of this process.

Our own starter is `native.py`; another one, such as mpirun, is run by `by_starter.py`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

from hvdtrain.launch.discovery import Discovery
from hvdtrain.launch.facts import is_this_host
from hvdtrain.launch.native import NativeJob
from hvdtrain.launch.output import RankOutput
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running_job import JobEnd, asked_for_input
from hvdtrain.launch.starters import starter_named
from hvdtrain.process import WITH_STOP, SignalInbox
from hvdtrain.rendezvous.secret import SECRET_VARIABLE, new_secret, secret_in
from hvdtrain.world.detect import STARTER_VARIABLE
from hvdtrain.world.failure import REPORT_VARIABLE


def launch(plan: LaunchPlan, discovery: Discovery | None = None) -> int:
    """Start the ranks, wait until all have ended, and leave none behind.

    With `discovery` the job is elastic.

    Returns 0 if every rank ended with 0; else the code of the rank that failed first (128 + N if
    signal N killed it); 124 at the time limit. LaunchError if the starter cannot be started,
    MachineError if hosts cannot be reached; then nothing was started.
    """
    native = plan.starter == "native"
    output = RankOutput(plan.np, out=sys.stdout, err=sys.stderr, directory=plan.options.output,
                        verbose=plan.options.verbose,
                        live=native and plan.np == 1 and discovery is None)
    try:
        if discovery is not None:
            end = _launch_elastic(plan, output, discovery)
        elif native:
            end = launch_native(plan, output, stdin=_input_of(plan))
        else:
            # Imported here: native ranks need not wait for psutil, which takes 18 ms.
            from hvdtrain.launch.by_starter import launch_by_starter
            end = launch_by_starter(plan, output, _environment(plan))
        for line in end.report:
            output.say(line)
        if native and plan.np > 1 and end.cause is not None and asked_for_input(end.cause):
            output.say("standard input is there with one rank only: input() and debuggers "
                       "work with -np 1")
        return end.code
    finally:
        output.close()


def launch_native(plan: LaunchPlan, output: RankOutput, *, stdin: int | None = None) -> JobEnd:
    """As `launch`, with our own starter; the ranks of this host read the descriptor `stdin`."""
    env = _environment(plan) | {STARTER_VARIABLE: "native"}
    with SignalInbox(WITH_STOP) as inbox:
        return NativeJob(plan, output, env, stdin).run(inbox)


def _launch_elastic(plan: LaunchPlan, output: RankOutput, discovery: Discovery) -> JobEnd:
    # Imported here: few jobs need it.
    from hvdtrain.launch.elastic import ElasticJob
    env = _environment(plan) | {STARTER_VARIABLE: "native"}
    is_own = cache(lambda name: name in plan.local_hosts or is_this_host(name))
    with SignalInbox(WITH_STOP) as inbox:
        return ElasticJob(plan, output, env, discovery, is_own).run(inbox)


def _environment(plan: LaunchPlan) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(plan.unset)} | dict(plan.env) | {REPORT_VARIABLE: "1"}
    env[SECRET_VARIABLE] = secret_in(env) or new_secret()
    if not starter_named(plan.starter).hides_environment:
        del env[SECRET_VARIABLE]
    return env


def _input_of(plan: LaunchPlan) -> int | None:
    """Standard input, where it is that of the only rank."""
    here = plan.np == 1 and plan.slots[0].host in plan.local_hosts
    if not here or sys.stdin is None or sys.stdin.closed:
        return None
    with suppress(OSError):  # no terminal, or one of another session
        if os.tcgetpgrp(0) != os.getpgrp():
            return None  # in the background: typed text is for the shell
    return 0
