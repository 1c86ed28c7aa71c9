"""What the user sees: lines of the ranks, marked with their rank, and messages of the launcher.

Shown are the chief's standard output and every rank's standard error, without what TensorFlow
prints at each start; with `verbose` everything. With `live` the chief's output is shown unbuffered,
as if the chief were this process, for progress bars and prompts.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from hvdtrain.world.failure import DONE_LINE, FailureRecord

FIRST_NOTICE_S = 5.0
_TAIL_LINES = 15
_LONGEST_LINE = 1 << 16

# What TensorFlow and its libraries print at start whatever TF_CPP_MIN_LOG_LEVEL says.
_NOISE = re.compile(
    r"absl::InitializeLog|oneDNN custom operations|TF_ENABLE_ONEDNN_OPTS|cudart_stub|cuda_fft|"
    r"cuda_dnn|cuda_blas|cpu_feature_guard|computation_placer|Unable to register cu|"
    r"rebuild TensorFlow with the appropriate compiler flags|Could not find cuda drivers|"
    r"Could not find TensorRT|failed call to cuInit")


def is_noise(line: str) -> bool:
    """Whether a line is one that TensorFlow prints at every start."""
    return _NOISE.search(line) is not None


class RankOutput:
    """The output of one job of `np` ranks, on `out` and `err`; to be closed.

    `directory` takes a log file per rank (None: no files), `done` holds the ranks that have
    reported that they finished. `verbose` and `live` are those of the module's docstring.
    """

    def __init__(self, np: int, *, out: TextIO, err: TextIO, directory: Path | None = None,
                 verbose: bool = False, live: bool = False) -> None:
        self._streams = {"stdout": out, "stderr": err}
        # Reports, which are not shown, come on standard error; prompts on standard output.
        self._live = {"stdout": LiveStream(),
                      "stderr": LiveStream(hides=self._hides)} if live else {}
        self._verbose, self._width = verbose, len(str(np - 1))
        self._open_lines: dict[tuple[int, str], bytes] = {}
        self._tails: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))
        self._records: dict[int, FailureRecord] = {}
        self.done: set[int] = set()
        self._logs: dict[int, IO[str]] = {}
        self._directory = directory
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for rank in range(np):
                self._open_log(rank)

    def begin_again(self) -> None:
        """Other ranks follow, with the same numbers and files."""
        self._open_lines.clear()
        self._tails.clear()
        self._records.clear()
        self.done.clear()

    def say(self, text: str) -> None:
        """Print a line of the launcher itself."""
        self._write("stderr", f"hvdtrain launch: {text}\n")

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take what a rank wrote; whole lines are shown, the rest waits for its end."""
        if rank == 0 and self._live:
            self._write(stream, self._live[stream].take(data))
        *lines, rest = (self._open_lines.pop((rank, stream), b"") + data).split(b"\n")
        for line in lines:
            self._line(rank, stream, line)
        if len(rest) > _LONGEST_LINE:
            self._line(rank, stream, rest)
        elif rest:
            self._open_lines[rank, stream] = rest

    def pass_on(self, stream: str, text: str) -> None:
        """Print a line of the starter itself."""
        if not is_noise(text) or self._verbose:
            self._write(stream, f"{text}\n")

    def finish(self, rank: int) -> None:
        """Show the unfinished line of a rank that has ended."""
        for stream in ("stdout", "stderr"):
            if rest := self._open_lines.pop((rank, stream), b""):
                self._line(rank, stream, rest)
            if rank == 0 and self._live:
                self._write(stream, self._live[stream].end())

    def tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank, unless they were shown live."""
        return () if rank == 0 and self._live else tuple(self._tails[rank])

    def record(self, rank: int) -> FailureRecord | None:
        """The failure that the rank reported."""
        return self._records.get(rank)

    def log_path(self, rank: int) -> str | None:
        """The log file of a rank."""
        return self._logs[rank].name if rank in self._logs else None

    def _open_log(self, rank: int) -> None:
        assert self._directory is not None  # noqa: S101
        path = self._directory / f"rank.{rank:0{self._width}d}.log"
        self._logs[rank] = path.open("w", encoding="utf-8")

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            log.close()

    def _hides(self, line: str) -> bool:
        return (line == DONE_LINE or FailureRecord.from_line(line) is not None
                or (is_noise(line) and not self._verbose))

    def _line(self, rank: int, stream: str, data: bytes) -> None:
        text = data.decode("utf-8", "replace").rstrip("\r")
        if record := FailureRecord.from_line(text):
            self._records.setdefault(rank, record)
            return
        if text == DONE_LINE:
            self.done.add(rank)
            return
        # A progress bar redraws its line; keep its last state.
        text = text.rpartition("\r")[2]
        if self._directory is not None and rank not in self._logs:
            self._open_log(rank)
        if rank in self._logs:
            self._logs[rank].write(f"{time.strftime('%H:%M:%S')} {stream} {text}\n")
            self._logs[rank].flush()
        if is_noise(text) and not self._verbose:
            return
        self._tails[rank].append(text)
        if self._live:
            shown = rank != 0 and self._verbose  # rank 0 was shown as it came
        else:
            shown = rank == 0 or stream == "stderr" or self._verbose
        if shown:
            # Lines of our own log name their rank already.
            prefix = "" if text.startswith("[rank ") else f"[{rank:>{self._width}}] "
            self._write(stream, f"{prefix}{text}\n")

    def _write(self, stream: str, text: str) -> None:
        target = self._streams[stream]
        try:
            target.write(text)
            target.flush()
        except BrokenPipeError:
            # The reader is gone (`| head`); training and log files go on.
            with suppress(OSError, ValueError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), target.fileno())


class LiveStream:
    """One stream of a rank, live; with `hides` line by line, or when a line is redrawn."""

    def __init__(self, hides: Callable[[str], bool] | None = None) -> None:
        self._hides, self._held, self._is_open = hides, b"", False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> str:
        """What to show, now that this has come."""
        if self._hides is not None:
            *lines, self._held = (self._held + data).split(b"\n")
            data = b"".join(line + b"\n" for line in lines
                            if not self._hides(line.decode("utf-8", "replace")))
            if b"\r" in self._held or len(self._held) > _LONGEST_LINE:
                data, self._held = data + self._held, b""
        if data:
            self._is_open = not data.endswith(b"\n")
        return self._decoder.decode(data)

    def end(self) -> str:
        """What to show at the end of the rank."""
        return self.take(b"\n") if self._held or self._is_open else ""


class WaitingNotice:
    """Says what is waited for, after `first_s`; then again at each doubling of the time."""

    def __init__(self, say: Callable[[str], None], first_s: float = FIRST_NOTICE_S) -> None:
        self._say, self._next_s, self._began_s = say, first_s, time.monotonic()

    def tick(self, text: Callable[[], str]) -> None:
        """Call often; `text` is called only when a message is due, and "" prints none."""
        waited_s = time.monotonic() - self._began_s
        if waited_s < self._next_s:
            return
        self._next_s = 2 * waited_s
        if what := text():
            self._say(f"waiting for {what}: {waited_s:.0f} s so far")
