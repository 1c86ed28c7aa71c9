"""`Supervisor`: starts the process of a role, starts it again when it is lost, and ends it.

The supervisors share one word, `done`, in the store of the rendezvous: the first one whose role
has ended for good puts it there, and all others end theirs.

A process that was killed is started again, in its place and at its address; TensorFlow's
coordinator then gives a worker its work again, and the chief, when parameters were lost with a
server, goes on from the last checkpoint. A process that ends with an error of its own is not: it
would end the same way again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hvdtrain.engine_config import PsConfig
from hvdtrain.engines.parameter_server.health import Health
from hvdtrain.engines.parameter_server.roles import Assignment
from hvdtrain.errors import (
    EXIT_PARAMETERS_LOST,
    EXIT_RUN_FAILED,
    EXIT_STOPPED,
    HvdtrainError,
    WorldError,
)
from hvdtrain.log import get_logger
from hvdtrain.preload.client import Process, start_program
from hvdtrain.runtime.stop import StopFlag
from hvdtrain.runtime.store import Store
from hvdtrain.runtime.waiting import Wait
from hvdtrain.world.failure import signal_name

ASSIGNMENT_VARIABLE = "HVDTRAIN_PS_ASSIGNMENT"
"""Holds an `Assignment` as JSON, in the environment of the process of a role."""

_NOT_INHERITED = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HOROVOD_", "TF_CONFIG")
"""The child is no rank of a starter."""
_POLL_S, _ASK_S = 0.05, 0.5
_END_S, _LAST_EVALUATION_S, _OTHERS_S, _CAUSE_S, _SILENCE_S = 5.0, 300.0, 5.0, 1.0, 10.0


class RoleLostError(HvdtrainError):
    """A role was lost more often than it may be started again."""

    exit_code = EXIT_RUN_FAILED


class Supervisor:
    """The supervisor of one role.

    Args:
        assignment: The role.
        store: What the supervisors share; None where there is no other one.
        config: How often to start a role again.
        argv: The command line of its process.
        environ: Its environment.
        stop: Set when this rank is told to stop; only the chief answers.
        hang_s: Float, after how long a process that does not answer is killed; 0: never.
    """

    def __init__(self, assignment: Assignment, store: Store | None, config: PsConfig,
                 argv: Sequence[str], environ: Mapping[str, str], stop: StopFlag, *,
                 hang_s: float) -> None:
        self._assignment, self._store, self._config = assignment, store, config
        self._argv, self._stop = list(argv), stop
        self._environ = {k: v for k, v in environ.items() if not k.startswith(_NOT_INHERITED)}
        self._hang_s = hang_s
        self._asked_s, self._heard_s = 0.0, time.monotonic()
        self._told_to_stop = False
        self._lost = 0
        self._child = self._start()
        self._health = Health(assignment, hang_s)

    def run(self) -> int:
        """Stay to the end of the job.

        Returns:
            Its exit code, where this role did not cause it: 0, or that of being stopped.

        Raises:
            RoleLostError: The role was lost too often.
        """
        try:
            code = self._watch()
        finally:
            self._end_child()
        return code

    def _watch(self) -> int:
        while True:
            code = self._child.poll()
            if code is not None and self._told_to_stop and code == -signal.SIGTERM:
                self._say("was told to stop before the training began")
                return self._finish(EXIT_STOPPED)
            if code is not None and self._is_final(code):
                return self._finish(code)
            if code is not None:
                self._start_again(code)
            self._pass_on_stop()
            if (done := self._done()) is not None:
                return self._follow(*done)
            if self._health.is_frozen(self._child.pid):
                self._say(f"has not answered for {self._hang_s / 2:.0f} s; killed")
                self._kill_child()
            time.sleep(_POLL_S)

    def _start(self) -> Process:
        return start_program(
            self._argv, stdin=subprocess.PIPE,
            env={**self._environ, ASSIGNMENT_VARIABLE: self._assignment.to_json()})

    def _is_final(self, code: int) -> bool:
        return code >= 0 and code != EXIT_PARAMETERS_LOST

    def _start_again(self, code: int) -> None:
        """Start a lost process anew.

        Raises:
            RoleLostError: The budget is spent.
        """
        why = (f"was killed by {signal_name(-code)}" if code < 0 else
               "lost its connection to a server and the parameters there")
        # That a server was lost is counted by its own supervisor.
        self._lost += 1
        budget = self._config.max_restarts
        if code == EXIT_PARAMETERS_LOST:
            budget *= 1 + len(self._assignment.cluster["ps"])
        if self._lost > budget:
            self._tell_done(EXIT_RUN_FAILED)
            raise RoleLostError(
                f"{self._name} {why}, for the {self._lost}. time, and is started again at most "
                f"{budget} times (--max-restarts {self._config.max_restarts}). Look at its host "
                "(memory, other jobs), then go on with --resume.")
        self._say(f"{why}; started again ({self._lost} of {budget})")
        self._close_input()
        self._told_to_stop = False
        self._assignment = replace(self._assignment, starts=self._lost)
        self._child = self._start()
        self._health = Health(self._assignment, self._hang_s)

    def _pass_on_stop(self) -> None:
        if self._stop.requested and not self._told_to_stop:
            self._told_to_stop = True
            if self._assignment.role.kind == "chief":
                self._child.send_signal(signal.SIGTERM)

    def _done(self) -> tuple[int, str] | None:
        """The end of the job, where another role has told it."""
        if self._store is None or time.monotonic() - self._asked_s < _ASK_S:
            return None
        self._asked_s = time.monotonic()
        try:
            text = self._store.get("done")
        except WorldError:
            # It may be busy; if it is gone, so is the starter or the chief's host.
            if time.monotonic() - self._heard_s > _SILENCE_S:
                raise
            return None
        self._heard_s = time.monotonic()
        if text is None:
            return None
        code, who = json.loads(text)
        return int(code), str(who)

    def _finish(self, code: int) -> int:
        """This role has ended for good, which ends the job."""
        if self._assignment.role.kind != "chief" and code == 0:
            return self._await_end()
        self._tell_done(code)
        self._await_others()
        if code in (0, EXIT_STOPPED):
            return code
        sys.stderr.flush()
        os._exit(code)  # the process of the role has said why

    def _await_end(self) -> int:
        """The evaluator is through; the others are not."""
        while (done := self._done()) is None:
            time.sleep(_POLL_S)
        return self._follow(*done)

    def _follow(self, code: int, who: str) -> int:
        """Another role has ended the job."""
        if self._store is not None:
            self._store.put(f"left.{self._assignment.rank}")
        if code in (0, EXIT_STOPPED):
            return code
        self._end_child()
        self._say(f"ends with {who}")
        time.sleep(_CAUSE_S)  # the cause is seen to end first
        os._exit(code)

    def _tell_done(self, code: int) -> None:
        if self._store is not None and self._store.get("done") is None:
            self._store.put("done", json.dumps([code, self._name]).encode())

    def _await_others(self) -> None:
        """The chief's host may serve the store, from which all read how the job ended."""
        told = self._assignment
        if self._store is not None and told.role.kind == "chief":
            # The evaluator of a TF_CONFIG is the rank after those that the chief knows of.
            ranks = 1 + told.workers + told.servers + self._config.evaluator
            others = [f"left.{r}" for r in range(max(told.size, ranks)) if r != told.rank]
            self._store.wait(others, Wait(_OTHERS_S, lambda: "the other roles", heeds_stop=False))

    def _end_child(self) -> None:
        """A worker or a server ends when its input does; the evaluator, when it is through."""
        self._close_input()
        limit_s = _LAST_EVALUATION_S if self._assignment.role.kind == "evaluator" else _END_S
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._kill_child()

    def _kill_child(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # in an uninterruptible wait, as for a device
            self._child.wait(_END_S)

    def _close_input(self) -> None:
        if self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()

    @property
    def _name(self) -> str:
        return (f"{self._assignment.role} (rank {self._assignment.rank} on "
                f"{self._assignment.host})")

    def _say(self, what: str) -> None:
        get_logger().warning("%s %s", self._name, what)
