"""Our own starter: watches the ranks through one agent per host and ends the job as a whole.

The agent (`agent.py`) is a process of its own, so that the ranks end when the launcher is killed.
This module decides: what is shown, which rank failed first, when the others are told to end, when
they are killed, and with which code the job ends.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.hosts import rank_variables
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import RankEnd, describe, first_failure, signal_name
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.signals import SignalInbox

StartProcess = Callable[[Sequence[str]], subprocess.Popen[bytes]]
AGENT = Path(__file__).with_name("agent.py")
EXIT_TIMEOUT = 124

_FAILURE_GRACE_S = 5.0
"""Ranks whose peer has gone have nothing left to save."""
_CAUSE_WAIT_S = 0.3
_SECONDARY_WAIT_S = 2.0
"""A rank that lost its peer may be seen before that peer: wait for the cause."""
_GIVE_UP_S = 2.0
"""A process in an uninterruptible wait outlives SIGKILL; the launcher does not wait for it."""
_REPEAT_S = 0.5
"""Schedulers signal twice; a second signal counts only after this time."""


class NativeJob:
    """One job while it runs."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._started_s = time.time()
        self._ends: dict[int, RankEnd] = {}
        self._pids: dict[int, int] = {}
        self._deadlines: dict[str, float] = {}
        self._why_stopped = ""
        self._stopped_s: float | None = None
        self._signal = 0
        self._agent: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._gave_up = False

    def run(self, start: StartProcess, env: Mapping[str, str], inbox: SignalInbox) -> int:
        """Start the ranks and stay to their end.

        Args:
            start: Starts the agent, with pipes on its standard input and output.
            env: The environment that all ranks share.
            inbox: The signals for this process.

        Returns:
            The exit code of the job.
        """
        self._agent = start([sys.executable, "-I", "-S", str(AGENT)])
        selector = selectors.DefaultSelector()
        try:
            self._send_work(env)
            if self._plan.timeout_s is not None:
                self._arm("timeout", self._plan.timeout_s)
            selector.register(self._output_fd(), selectors.EVENT_READ, self._read_agent)
            selector.register(inbox, selectors.EVENT_READ, lambda: self._signals(inbox))
            while len(self._ends) < self._plan.np and not self._gave_up:
                for key, _ in selector.select(self._wait_s()):
                    key.data()
                self._act_on_deadlines()
        finally:
            selector.close()
            self._close_agent()
        return self._report()

    def _send_work(self, env: Mapping[str, str]) -> None:
        work = {"command": self._plan.argv, "directory": os.getcwd(), "env": dict(env),
                "grace_s": self._plan.grace_s,
                "ranks": {slot.rank: rank_variables(slot, self._plan.np)
                          for slot in self._plan.slots}}
        data = json.dumps(work).encode()
        self._write_agent(b"%d\n%s" % (len(data), data))

    def _signal_ranks(self, number: int) -> None:
        self._write_agent(json.dumps({"signal": number}).encode() + b"\n")

    def _write_agent(self, data: bytes) -> None:
        if self._agent is not None and self._agent.stdin is not None:
            with suppress(BrokenPipeError):  # its end is seen on its output
                self._agent.stdin.write(data)
                self._agent.stdin.flush()

    def _read_agent(self) -> None:
        data = os.read(self._output_fd(), 1 << 18)
        if not data:
            self._lose_agent()
            return
        buffer, start = self._received + data, 0
        while (end := buffer.find(b"\n", start)) >= 0:
            message = json.loads(buffer[start:end])
            rest = end + 1 + message.get("size", 0)
            if len(buffer) < rest:
                break
            self._handle(message, buffer[end + 1:rest])
            start = rest
        self._received = buffer[start:]

    def _handle(self, message: dict[str, Any], payload: bytes) -> None:
        rank = message["rank"]
        if message["type"] == "output":
            self._console.feed(rank, message["stream"], payload)
        elif message["type"] == "start":
            self._pids[rank] = message["pid"]
        else:
            self._ended(rank, message["code"], message["time"], message["reason"])

    def _ended(self, rank: int, code: int, time_s: float, reason: str) -> None:
        self._console.finish(rank)
        end = RankEnd(rank=rank, host=self._plan.slots[rank].host, code=code, time_s=time_s,
                      reason=reason, record=self._console.record(rank),
                      tail=self._console.tail(rank))
        self._ends[rank] = end
        if end.failed and not self._why_stopped:
            wait_s = _SECONDARY_WAIT_S if end.secondary else _CAUSE_WAIT_S
            self._arm("failure", wait_s)

    def _lose_agent(self) -> None:
        """The agent was killed: its ranks got SIGKILL from the kernel, their children did not."""
        for rank in range(self._plan.np):
            if rank not in self._ends:
                with suppress(KeyError, ProcessLookupError, PermissionError):
                    os.killpg(self._pids[rank], signal.SIGKILL)
                self._ended(rank, -signal.SIGKILL, time.time(), "its agent ended unexpectedly")

    def _signals(self, inbox: SignalInbox) -> None:
        for number in inbox.take():
            if number not in (signal.SIGINT, signal.SIGTERM):
                self._signal_ranks(number)
            elif self._why_stopped != "signal":
                self._signal = number
                self._console.say(
                    f"{signal_name(number)} is passed on; ranks that are still there in "
                    f"{self._plan.grace_s:g} s are killed (a second signal kills them at once)")
                self._stop("signal", number, self._plan.grace_s)
            elif time.time() - (self._stopped_s or 0.0) > _REPEAT_S:
                self._arm("kill", 0.0)

    def _stop(self, why: str, number: int, grace_s: float) -> None:
        """Tell all ranks to end, and set the time at which they are killed."""
        self._deadlines.pop("failure", None)
        self._deadlines.pop("timeout", None)
        self._why_stopped = why
        self._stopped_s = time.time()
        self._signal_ranks(number)
        self._arm("kill", grace_s)

    def _arm(self, what: str, wait_s: float) -> None:
        due = time.monotonic() + wait_s
        self._deadlines[what] = min(due, self._deadlines.get(what, due))

    def _wait_s(self) -> float | None:
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - time.monotonic())

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        for what in [name for name, due in self._deadlines.items() if due <= now]:
            self._deadlines.pop(what, None)
            if what == "failure":
                self._stop("failure", signal.SIGTERM,
                           min(self._plan.grace_s, _FAILURE_GRACE_S))
            elif what == "timeout":
                self._console.say(f"the limit of {self._plan.timeout_s:g} s is over")
                self._stop("timeout", signal.SIGTERM, self._plan.grace_s)
            elif what == "kill":
                self._signal_ranks(signal.SIGKILL)
                self._arm("give up", _GIVE_UP_S)
            else:
                self._gave_up = True

    def _output_fd(self) -> int:
        if self._agent is None or self._agent.stdout is None:
            raise RuntimeError("the agent was started without pipes")
        return self._agent.stdout.fileno()

    def _close_agent(self) -> None:
        """Closing its input makes the agent end whatever is left."""
        if self._agent is None:
            return
        for stream in (self._agent.stdin, self._agent.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self._agent.wait(timeout=_GIVE_UP_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()

    def _report(self) -> int:
        """Say how it ended, and give the exit code."""
        cause = first_failure(list(self._ends.values()), self._stopped_s)
        before = cause is not None and (self._stopped_s is None or cause.time_s <= self._stopped_s)
        if cause is not None and (before or self._why_stopped in ("", "failure")):
            for line in describe(cause, self._ends, np=self._plan.np, started_s=self._started_s,
                                 log=self._console.log_path(cause.rank)):
                self._console.say(line)
            return cause.exit_code
        if self._why_stopped == "timeout":
            return EXIT_TIMEOUT
        if self._why_stopped == "signal":
            return self._after_signal()
        return 0

    def _after_signal(self) -> int:
        """A code the ranks chose themselves counts: it may ask for a requeue."""
        seconds = time.time() - self._started_s
        self._console.say(f"ended by {signal_name(self._signal)} {seconds:.1f} s after the start")
        chosen = [end.code for end in self._ends.values() if end.code > 0]
        everyone = len(self._ends) == self._plan.np
        if everyone and not any(end.failed for end in self._ends.values()):
            return 0
        return chosen[0] if chosen else 128 + self._signal
