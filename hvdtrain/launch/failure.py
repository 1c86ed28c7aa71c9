"""Which rank failed first, and how to say so. Pure functions over what was seen of the ranks."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import EXIT_SIGNALLED
from hvdtrain.world.failure import FailureRecord, is_secondary, signal_name

# What TensorFlow and its libraries print at start whatever TF_CPP_MIN_LOG_LEVEL says.
_NOISE = re.compile(
    r"absl::InitializeLog|oneDNN custom operations|TF_ENABLE_ONEDNN_OPTS|cudart_stub|cuda_fft|"
    r"cuda_dnn|cuda_blas|cpu_feature_guard|computation_placer|Unable to register cu|"
    r"rebuild TensorFlow with the appropriate compiler flags|Could not find cuda drivers|"
    r"Could not find TensorRT|failed call to cuInit")


_NO_INPUT = re.compile(r"EOFError: EOF when reading a line|bdb\.BdbQuit")


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    host: str
    code: int
    """As in `subprocess`: the exit code, or minus the signal."""
    time_s: float
    """Seconds since the epoch, by the clock of the rank's host."""
    reason: str = ""
    """Why it could not be started, or how its host was lost."""
    record: FailureRecord | None = None
    tail: tuple[str, ...] = ()
    """Its last lines of output."""

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but 0."""
        return self.code != 0

    @property
    def secondary(self) -> bool:
        """Whether it failed because another rank had gone."""
        if self.record is not None:
            return not self.record.primary
        return self.code > 0 and any(is_secondary(line) for line in self.tail)

    @property
    def exit_code(self) -> int:
        """The code as a shell shows it: 128 + signal for a rank that was killed."""
        return EXIT_SIGNALLED - self.code if self.code < 0 else self.code

    @property
    def manner(self) -> str:
        """How it ended, in words."""
        if self.reason:
            words = self.reason
        elif self.code < 0:
            words = f"killed by {signal_name(-self.code)}"
        else:
            words = f"exit code {self.code}"
        if self.record is not None and self.record.error:
            message = " ".join(self.record.message.split())
            words += f", {self.record.error}" + (f": {message}" if message else "")
        return words


def asked_for_input(end: RankEnd) -> bool:
    """Whether a rank failed because it read standard input (`input()`, a debugger), without any."""
    if end.record is not None:
        return end.record.error in ("EOFError", "BdbQuit")
    return any(_NO_INPUT.fullmatch(line) for line in end.tail)


def is_noise(line: str) -> bool:
    """Whether a line is what TensorFlow prints at every start."""
    return _NOISE.search(line) is not None


def first_failure(ends: Sequence[RankEnd], stopped_s: float | None) -> RankEnd | None:
    """The rank that is the cause: not another's consequence, then the earliest.

    Args:
        ends: All ends that were seen.
        stopped_s: When the launcher told the ranks to end; what fails later fails by that.
            None: it did not.
    """
    failed = [end for end in ends if end.failed]
    early = [end for end in failed if stopped_s is None or end.time_s <= stopped_s]
    return min(early or failed, key=lambda end: (end.secondary, _when(end)), default=None)


def describe(cause: RankEnd, ends: Mapping[int, RankEnd], *, np: int, started_s: float,
             log: str | None) -> list[str]:
    """The report, as lines: who failed, what became of the others, the last lines of output."""
    if np > 1 and _alike(ends, np):
        return [f"all {np} ranks failed alike: {cause.manner}"]
    lines, last = name_cause(cause, started_s=started_s), last_lines(cause, log)
    others = Counter(_fate(ends.get(rank)) for rank in range(np) if rank != cause.rank)
    if cause.secondary:
        left = [end for end in ends.values() if not end.failed and end.time_s <= cause.time_s]
        for end in sorted(left, key=lambda end: -end.time_s):
            lines.insert(0, f"rank {end.rank} on {end.host} left early with code 0, "
                            f"{end.time_s - started_s:.1f} s after the start; the others could "
                            "not go on without it")
        if not left:
            lines.append("every failure seen is of the kind 'another rank has gone', but none "
                         "was seen to go first")
    if others:
        lines.append("the others: " + ", ".join(f"{n} {fate}" for fate, n in others.items()))
    return lines + last


def name_cause(cause: RankEnd, *, started_s: float) -> list[str]:
    """Which rank failed, when and how."""
    lines = [f"rank {cause.rank} on {cause.host} failed {cause.time_s - started_s:.1f} s after "
             f"the start: {cause.manner}"]
    if cause.code == -signal.SIGKILL:
        lines.append("SIGKILL comes from outside: out of memory (see dmesg), a scheduler, a person")
    return lines


def last_lines(cause: RankEnd, log: str | None) -> list[str]:
    """What the rank wrote last, unless the first line of the report tells it already."""
    told = cause.record is not None and cause.tail[-1:] and cause.tail[-1].startswith("hvdtrain: ")
    if not cause.tail or told:
        return []
    where = f" (all of them in {log})" if log else ""
    return [f"the last lines of rank {cause.rank}{where}:", *(f"  | {t}" for t in cause.tail)]


def _alike(ends: Mapping[int, RankEnd], np: int) -> bool:
    """Whether every rank reported one error, as for a mistake in the job."""
    reports = {(end.code, end.record.error, end.record.message) if end.record else None
               for end in ends.values()}
    return len(ends) == np and len(reports) == 1 and None not in reports


def _when(end: RankEnd) -> float:
    return end.time_s if end.record is None else end.record.time_s


def _fate(end: RankEnd | None) -> str:
    if end is None:
        return "gave no answer"
    if end.code == -signal.SIGTERM:
        return "ended by SIGTERM"
    if end.code == -signal.SIGKILL:
        return "had to be killed"
    return f"left with code {end.exit_code}"
