"""Our own starter: watches the ranks through one agent per host and ends the job as a whole.

An agent (`agent.py`) is a process of its own, so that the ranks end when the launcher is killed.
This module decides: what is shown, which rank failed first, when the others are told to end, when
they are killed, and with which code the job ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.errors import (
    EXIT_HOST_LOST,
    EXIT_RUN_FAILED,
    EXIT_SIGNALLED,
    EXIT_STOPPED,
    EXIT_TIME_OVER,
)
from hvdtrain.launch.console import Console
from hvdtrain.launch.crew import Crew, OpenRendezvous
from hvdtrain.launch.failure import RankEnd, describe, first_failure
from hvdtrain.launch.link import AgentLink, StartProcess
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.signals import SignalInbox
from hvdtrain.world.failure import signal_name

_FAILURE_GRACE_S = 5.0
"""Ranks whose peer has gone have nothing left to save."""
_CAUSE_WAIT_S = 0.3
_SECONDARY_WAIT_S = 2.0
"""A rank that lost its peer may be seen before that peer: wait for the cause."""
_GIVE_UP_S = 2.0
"""A process in an uninterruptible wait outlives SIGKILL; the launcher does not wait for it."""
_PAUSE_S = 0.2
_REPEAT_S = 0.5
"""Schedulers signal twice; a second signal counts only after this time."""


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended."""

    code: int
    """The exit code of the job."""
    cause: RankEnd | None = None
    """The rank that failed first."""
    report: tuple[str, ...] = ()
    """What is to be said of it: which rank failed and how, what became of the others."""
    signal: int = 0
    """The signal to the launcher that ended the job; 0: none did."""


class NativeJob:
    """One job while it runs.

    Args:
        plan: The plan.
        console: Takes what the ranks write.
        stdin: Integer, a descriptor that `start` hands on, for the standard input of the ranks of
            this host. None: they have none.
    """

    def __init__(self, plan: LaunchPlan, console: Console, stdin: int | None = None) -> None:
        self._plan = plan
        self._console = console
        self._started_s = time.time()
        self._ends: dict[int, RankEnd] = {}
        self._deadlines: dict[str, float] = {}
        self._why_stopped = ""
        self._stopped_s: float | None = None
        self._signal = 0
        self._crew = Crew(plan, stdin)
        self._selector = selectors.DefaultSelector()
        self._gave_up = False
        self._notes: set[str] = set()

    def run(self, start: StartProcess, env: Mapping[str, str], inbox: SignalInbox,
            open_rendezvous: OpenRendezvous) -> JobEnd:
        """Start the ranks and stay to their end.

        Args:
            start: Starts an agent, or the ssh to it, with pipes on its three streams.
            env: The environment that all ranks share.
            inbox: The signals for this process.
            open_rendezvous: Starts the rendezvous at some addresses of this host, for requests
                from some addresses and networks; gives the port at each address.

        Returns:
            How the job ended, of which nothing is said yet.

        Raises:
            MachineError: Hosts that cannot be reached; nothing was started.
            LaunchError: A host has no usable network interface; nothing was started.
        """
        try:
            if not self._crew.bring_up(start, lambda: self._interrupted(inbox),
                                       self._console.say):
                return JobEnd(
                    code=EXIT_SIGNALLED + self._signal, signal=self._signal,
                    report=(f"ended by {signal_name(self._signal)} before the ranks started",))
            ports = open_rendezvous(self._crew.launcher_addresses(), self._crew.sources())
            self._crew.send_work(env, ports)
            if self._plan.timeout_s is not None:
                self._arm("timeout", self._plan.timeout_s)
            for link in self._crew.links.values():
                self._watch(link)
            self._selector.register(inbox, selectors.EVENT_READ, lambda: self._signals(inbox))
            while len(self._ends) < self._plan.np and not self._gave_up:
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fd in self._selector.get_map():  # an earlier event may have closed it
                        key.data()
                self._act_on_deadlines()
        finally:
            self._selector.close()
            self._crew.close()
        return self._end()

    def _interrupted(self, inbox: SignalInbox) -> bool:
        """Whether a signal ends the job before it has begun."""
        for number in inbox.take():
            if number in (signal.SIGINT, signal.SIGTERM):
                self._signal = number
        return self._signal != 0

    def _watch(self, link: AgentLink) -> None:
        errors = link.stderr_fileno()

        def read_errors() -> None:
            lines = link.read_stderr()
            if lines is None:
                self._selector.unregister(errors)
            for line in lines or ():
                self._console.say(f"{link.host}: {line}")

        self._selector.register(link, selectors.EVENT_READ, lambda: self._read(link))
        self._selector.register(errors, selectors.EVENT_READ, read_errors)

    def _read(self, link: AgentLink) -> None:
        messages = link.read()
        for message, payload in messages or ():
            self._handle(link, message, payload)
        if messages is None:
            for descriptor in (link.fileno(), link.stderr_fileno()):
                if descriptor in self._selector.get_map():
                    self._selector.unregister(descriptor)
            self._lose(link)

    def _handle(self, link: AgentLink, message: dict[str, Any], payload: bytes) -> None:
        if message["type"] == "note":
            self._note(f"{link.host}: {message['text']}")
            return
        rank = message["rank"]
        if not (type(rank) is int and 0 <= rank < self._plan.np
                and self._plan.slots[rank].host == link.host):
            self._note(f"{link.host}: its agent speaks for rank {rank!r}, which is not there")
            return
        if message["type"] == "output":
            self._console.feed(rank, message["stream"], payload)
        else:
            offset_s = link.facts.clock_offset_s if link.facts is not None else 0.0
            self._ended(rank, message["code"], message["time"], message["reason"], offset_s)

    def _note(self, text: str) -> None:
        if text not in self._notes:  # each rank of a host has the same one
            self._notes.add(text)
            self._console.say(text)

    def _ended(self, rank: int, code: int, time_s: float, reason: str, offset_s: float) -> None:
        self._console.finish(rank)
        if code == 0 and self._plan.says_done and rank not in self._console.done:
            code, reason = EXIT_RUN_FAILED, "left early with code 0"
        record = self._console.record(rank)
        if record is not None:
            record = replace(record, time_s=record.time_s + offset_s)
        end = RankEnd(rank=rank, host=self._plan.slots[rank].host, code=code,
                      time_s=time_s + offset_s, reason=reason, record=record,
                      tail=self._console.tail(rank))
        self._ends[rank] = end
        if end.failed and not self._why_stopped:
            if end.code == EXIT_STOPPED:  # all ranks leave so, one after the other
                wait_s = min(self._plan.grace_s, _FAILURE_GRACE_S)
            else:
                wait_s = _SECONDARY_WAIT_S if end.secondary else _CAUSE_WAIT_S
            self._arm("failure", wait_s)

    def _lose(self, link: AgentLink) -> None:
        """The stream of an agent has ended; with ranks left, it or its host is gone."""
        left = [slot.rank for slot in self._plan.slots
                if slot.host == link.host and slot.rank not in self._ends]
        if not left:
            return
        code = -signal.SIGKILL if link.is_local else EXIT_HOST_LOST
        reason = "its agent ended unexpectedly"
        if not link.is_local:
            link.reap(_CAUSE_WAIT_S)
            reason = f"the connection to {link.host} was lost"
            reason += f" ({'; '.join(link.last_words)})" if link.last_words else ""
        for rank in left:
            self._ended(rank, code, time.time(), reason, 0.0)

    def _signals(self, inbox: SignalInbox) -> None:
        for number in inbox.take():
            if number == signal.SIGTSTP:
                self._pause()
            elif number not in (signal.SIGINT, signal.SIGTERM):
                self._crew.send({"signal": number})
            elif self._why_stopped != "signal":
                self._signal = number
                self._console.say(
                    f"{signal_name(number)} is passed on; ranks that are still there in "
                    f"{self._plan.grace_s:g} s are killed (a second signal kills them at once)")
                self._stop("signal", number, self._plan.grace_s)
            elif time.time() - (self._stopped_s or 0.0) > _REPEAT_S:
                self._arm("kill", 0.0)

    def _pause(self) -> None:
        """Ctrl-Z: the ranks stand still as well, or their agents would miss this launcher."""
        self._console.say("stopped, and all ranks with it; `fg` goes on")
        self._crew.send({"pause": True})
        time.sleep(_PAUSE_S)  # the links' threads send it
        os.kill(os.getpid(), signal.SIGSTOP)
        self._crew.send({"pause": False})

    def _stop(self, why: str, number: int, grace_s: float) -> None:
        """Tell all ranks to end, and set the time at which they are killed."""
        self._deadlines.pop("failure", None)
        self._deadlines.pop("timeout", None)
        self._why_stopped = why
        self._stopped_s = time.time()
        self._crew.send({"signal": number})
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
                self._crew.send({"signal": signal.SIGKILL})
                self._arm("give up", _GIVE_UP_S)
            else:
                self._gave_up = True

    def _end(self) -> JobEnd:
        """How it ended."""
        ends = list(self._ends.values())
        if len(ends) == self._plan.np and all(end.code == EXIT_STOPPED for end in ends):
            code = EXIT_TIME_OVER if self._why_stopped == "timeout" else EXIT_STOPPED
            return JobEnd(code=code, signal=self._signal, report=("all ranks stopped on request",))
        cause = first_failure(ends, self._stopped_s)
        before = cause is not None and (self._stopped_s is None or cause.time_s <= self._stopped_s)
        if cause is not None and (before or self._why_stopped in ("", "failure")):
            return JobEnd(code=cause.exit_code, cause=cause, report=tuple(describe(
                cause, self._ends, np=self._plan.np, started_s=self._started_s,
                log=self._console.log_path(cause.rank))))
        if self._why_stopped == "timeout":
            return JobEnd(code=EXIT_TIME_OVER)
        return self._after_signal() if self._why_stopped == "signal" else JobEnd(code=0)

    def _after_signal(self) -> JobEnd:
        """A code the ranks chose themselves counts: it may ask for a requeue."""
        seconds = time.time() - self._started_s
        chosen = [end.code for end in self._ends.values() if end.code > 0]
        everyone = len(self._ends) == self._plan.np
        done = everyone and not any(end.failed for end in self._ends.values())
        code = chosen[0] if chosen else EXIT_SIGNALLED + self._signal
        return JobEnd(code=0 if done else code, signal=self._signal, report=(
            f"ended by {signal_name(self._signal)} {seconds:.1f} s after the start",))
