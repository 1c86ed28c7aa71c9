"""A job while it runs, under any starter: how its ranks end, which failed first, when it ends."""

from __future__ import annotations

import re
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hvdtrain.errors import EXIT_SIGNALLED
from hvdtrain.launch.output import RankOutput
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.process import SignalInbox, signal_name
from hvdtrain.world.failure import FailureRecord, is_secondary

FAILURE_GRACE_S = 5.0  # ranks whose peer is gone have nothing left to save
GIVE_UP_S = 2.0  # a process in an uninterruptible wait outlives SIGKILL; do not wait for it
_REPEAT_S = 0.5  # schedulers signal twice; a second signal counts only after this time
_NO_INPUT = re.compile(r"EOFError: EOF when reading a line|bdb\.BdbQuit")


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    `code` is as in `subprocess`, `time_s` by the clock of this host, `reason` why it did not start
    or how its host was lost, `record` its own report, `tail` its last lines of output.
    """

    rank: int
    host: str
    code: int
    time_s: float
    reason: str = ""
    record: FailureRecord | None = None
    tail: tuple[str, ...] = ()

    @property
    def secondary(self) -> bool:
        """Whether it failed because another rank was gone."""
        if self.record is not None:
            return not self.record.primary
        return self.code > 0 and any(is_secondary(line) for line in self.tail)

    @property
    def exit_code(self) -> int:
        """The code as a shell shows it: 128 + signal for a rank that was killed."""
        return shell_code(self.code)

    @property
    def manner(self) -> str:
        """How it ended, in words."""
        text = self.reason or (f"killed by {signal_name(-self.code)}" if self.code < 0
                               else f"exit code {self.code}")
        if self.record is not None and self.record.error:
            message = " ".join(self.record.message.split())
            text += f", {self.record.error}" + (f": {message}" if message else "")
        return text


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended; `cause` failed first. `signal` to the launcher ended it, if not 0."""

    code: int
    cause: RankEnd | None = None
    report: tuple[str, ...] = ()
    signal: int = 0


class RunningJob:
    """What all starters share; a subclass starts the ranks and reports their ends."""

    def __init__(self, plan: LaunchPlan, output: RankOutput) -> None:
        self.plan, self.output = plan, output
        self.started_s = time.time()
        self.ends: dict[int, RankEnd] = {}
        self.why_stopped, self.signal = "", 0
        self.stopped_s: float | None = None
        self.selector = selectors.DefaultSelector()
        self._deadlines: dict[str, tuple[float, Callable[[], None]]] = {}
        self._gave_up = False

    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        raise NotImplementedError

    def send(self, number: int) -> None:
        """Send a signal to all ranks."""
        raise NotImplementedError

    def failure_wait_s(self, end: RankEnd) -> float | None:
        """How long the others may go on after a rank has failed; None: no limit."""
        raise NotImplementedError

    def pause(self) -> None:
        """React to Ctrl-Z."""

    def watch(self, source: Any, action: Callable[[], None]) -> None:
        """Call `action` when there is something to read."""
        self.selector.register(source, selectors.EVENT_READ, action)

    def serve(self, inbox: SignalInbox) -> None:
        """Handle events until the job is over."""
        self.watch(inbox, lambda: self._take_signals(inbox))
        if (limit_s := self.plan.options.timeout_s) is not None:
            self.arm("timeout", limit_s, self._time_is_over)
        while not (self.is_over() or self._gave_up):
            due = min((due for due, _ in self._deadlines.values()), default=None)
            for key, _ in self.selector.select(due and max(0.0, due - time.monotonic())):
                if key.fd in self.selector.get_map():  # an earlier event may have closed it
                    key.data()
            for name, (due, action) in list(self._deadlines.items()):
                if due <= time.monotonic() and name in self._deadlines:
                    del self._deadlines[name]
                    action()

    def arm(self, name: str, wait_s: float, action: Callable[[], None]) -> None:
        """Call `action` after `wait_s`, unless an earlier time is set for `name`."""
        due = time.monotonic() + wait_s
        if name not in self._deadlines or due < self._deadlines[name][0]:
            self._deadlines[name] = due, action

    def end_rank(self, rank: int, code: int, time_s: float, reason: str = "",
                 offset_s: float = 0.0) -> None:
        """Record the end of a rank, by a clock that is behind by `offset_s`."""
        record = self.output.record(rank)
        if record is not None:
            record = replace(record, time_s=record.time_s + offset_s)
        self.ends[rank] = end = RankEnd(
            rank=rank, host=self.plan.slots[rank].host, code=code, time_s=time_s + offset_s,
            reason=reason, record=record, tail=self.output.tail(rank))
        wait_s = self.failure_wait_s(end) if code and not self.why_stopped else None
        if wait_s is not None:
            grace_s = min(self.plan.options.grace_s, FAILURE_GRACE_S)
            self.arm("failure", wait_s, partial(self.stop, "failure", signal.SIGTERM, grace_s))

    def first_failure(self, ends: Sequence[RankEnd]) -> RankEnd | None:
        """The rank that is the cause; None where the job was told to end before any failed."""
        cause, told = first_failure(ends, self.stopped_s), self.why_stopped in ("signal", "timeout")
        late = cause is not None and cause.time_s > (self.stopped_s or 0.0)
        return None if told and late else cause

    def stop(self, why: str, number: int, grace_s: float) -> None:
        """Signal all ranks to end; they are killed after `grace_s`."""
        self._deadlines.pop("failure", None)
        self._deadlines.pop("timeout", None)
        self.why_stopped, self.stopped_s = why, time.time()
        self.send(number)
        self.arm("kill", grace_s, self.kill)

    def kill(self) -> None:
        """End what is left."""
        self.send(signal.SIGKILL)
        self.arm("give up", GIVE_UP_S, partial(setattr, self, "_gave_up", True))

    def _time_is_over(self) -> None:
        self.output.say(f"the limit of {self.plan.options.timeout_s:g} s is over")
        self.stop("timeout", self.plan.stop_signal, self.plan.options.grace_s)

    def _take_signals(self, inbox: SignalInbox) -> None:
        for number in inbox.take():
            if number == signal.SIGTSTP:
                self.pause()
            elif number not in (signal.SIGINT, signal.SIGTERM):
                self.send(number)
            elif self.why_stopped != "signal":
                self.signal, grace_s = number, self.plan.options.grace_s
                self.output.say(
                    f"{signal_name(number)} is passed on; ranks that are still there in "
                    f"{grace_s:g} s are killed (a second signal kills them at once)")
                asked = self.plan.stop_signal if number == signal.SIGTERM else number
                self.stop("signal", asked, grace_s)
            elif time.time() - (self.stopped_s or 0.0) > _REPEAT_S:
                self.arm("kill", 0.0, self.kill)


def shell_code(code: int) -> int:
    """An exit code of `subprocess` as a shell shows it."""
    return EXIT_SIGNALLED - code if code < 0 else code


def asked_for_input(end: RankEnd) -> bool:
    """Whether a rank failed because it read standard input (`input()`, a debugger) and had none."""
    if end.record is not None:
        return end.record.error in ("EOFError", "BdbQuit")
    return any(_NO_INPUT.fullmatch(line) for line in end.tail)


def first_failure(ends: Sequence[RankEnd], stopped_s: float | None) -> RankEnd | None:
    """The first failure, preferably one not caused by another, nor by the stop at `stopped_s`."""
    failed = [end for end in ends if end.code]
    early = [end for end in failed if stopped_s is None or end.time_s <= stopped_s]
    return min(early or failed, default=None, key=lambda end: (
        end.secondary, end.record.time_s if end.record else end.time_s))


def describe(cause: RankEnd, ends: Mapping[int, RankEnd], *, np: int, started_s: float,
             log: str | None) -> list[str]:
    """The lines of the report: who failed, how the others ended, the last lines of output."""
    reports = {(end.code, end.record.error, end.record.message) if end.record else None
               for end in ends.values()}
    if len(ends) == np > len(reports) == 1 and None not in reports:
        return [f"all {np} ranks failed alike: {cause.manner}"]
    lines = name_cause(cause, started_s=started_s)
    others = Counter(_fate(ends.get(rank)) for rank in range(np) if rank != cause.rank)
    if cause.secondary:
        left = [end for end in ends.values() if not end.code and end.time_s <= cause.time_s]
        lines = [f"rank {end.rank} on {end.host} left early with code 0, "
                 f"{end.time_s - started_s:.1f} s after the start; the others could not go on "
                 "without it" for end in sorted(left, key=lambda end: end.time_s)] + lines
        if not left:
            lines.append("every failure seen is of the kind 'another rank has gone', but none "
                         "was seen to go first")
    if others:
        lines.append("the others: " + ", ".join(f"{n} {fate}" for fate, n in others.items()))
    return lines + last_lines(cause, log)


def name_cause(cause: RankEnd, *, started_s: float) -> list[str]:
    """Which rank failed, when and how."""
    lines = [f"rank {cause.rank} on {cause.host} failed {cause.time_s - started_s:.1f} s after "
             f"the start: {cause.manner}"]
    if cause.code == -signal.SIGKILL:
        lines.append("SIGKILL comes from outside: out of memory (see dmesg), a scheduler, a person")
    return lines


def last_lines(cause: RankEnd, log: str | None) -> list[str]:
    """The last lines of the rank, unless the first line of the report already tells it."""
    if not cause.tail or (cause.record is not None and cause.tail[-1].startswith("hvdtrain: ")):
        return []
    where = f" (all of them in {log})" if log else ""
    return [f"the last lines of rank {cause.rank}{where}:", *(f"  | {t}" for t in cause.tail)]


def _fate(end: RankEnd | None) -> str:
    if end is None:
        return "gave no answer"
    return {-signal.SIGTERM: "ended by SIGTERM", -signal.SIGKILL: "had to be killed"}.get(
        end.code, f"left with code {end.exit_code}")
