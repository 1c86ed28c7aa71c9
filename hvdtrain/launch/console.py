"""What the ranks print: lines with their rank on the screen, everything in log files.

Shown are the chief's standard output and every rank's standard error, without what TensorFlow
prints at each start; with `verbose` everything. With `live` the chief's output is shown as it
comes, as if the chief were this process: progress bars, and prompts that wait for an answer.
"""

from __future__ import annotations

import codecs
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from hvdtrain.launch.failure import is_noise
from hvdtrain.world.failure import DONE_LINE, FailureRecord

_TAIL_LINES = 15
_LONGEST_LINE = 1 << 16


class Console:
    """The output of one job. `close` it at the end.

    Args:
        np: Integer, the number of ranks.
        out: Where standard output is shown.
        err: Where standard error is shown.
        directory: Folder for one log file per rank. None: none are written.
        verbose: Boolean, whether to show everything.
        live: Boolean, whether to show the chief's output as it comes and without its rank, and
            of the other ranks nothing.
    """

    def __init__(self, np: int, *, out: TextIO, err: TextIO, directory: Path | None = None,
                 verbose: bool = False, live: bool = False) -> None:
        self._streams = {"stdout": out, "stderr": err}
        self._live = {
            # Reports, which are not shown, come on standard error; prompts on standard output.
            "stdout": LiveStream(),
            "stderr": LiveStream(hides=self._hides)} if live else {}
        self._verbose = verbose
        self._width = len(str(np - 1))
        self._open_lines: dict[tuple[int, str], bytes] = {}
        self._tails: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))
        self._records: dict[int, FailureRecord] = {}
        self.done: set[int] = set()
        """Ranks that have said that they finished."""
        self._logs: dict[int, IO[str]] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for rank in range(np):
                path = directory / f"rank.{rank:0{self._width}d}.log"
                self._logs[rank] = path.open("w", encoding="utf-8")

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
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
        """A line of the starter's own."""
        if not is_noise(text) or self._verbose:
            self._write(stream, f"{text}\n")

    def finish(self, rank: int) -> None:
        """Show what a rank that has ended left without a line end."""
        for stream in ("stdout", "stderr"):
            rest = self._open_lines.pop((rank, stream), b"")
            if rest:
                self._line(rank, stream, rest)
            if rank == 0 and self._live:
                self._write(stream, self._live[stream].end())

    def tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank, unless they have been shown as they came."""
        return () if rank == 0 and self._live else tuple(self._tails[rank])

    def record(self, rank: int) -> FailureRecord | None:
        """What the rank reported of its failure."""
        return self._records.get(rank)

    def log_path(self, rank: int) -> str | None:
        """The log file of a rank."""
        return self._logs[rank].name if rank in self._logs else None

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            log.close()

    def _hides(self, line: str) -> bool:
        """Whether a line is not to be shown: a report, or what TensorFlow prints at each start."""
        return (line == DONE_LINE or FailureRecord.from_line(line) is not None
                or (is_noise(line) and not self._verbose))

    def _line(self, rank: int, stream: str, data: bytes) -> None:
        text = data.decode("utf-8", "replace").rstrip("\r")
        record = FailureRecord.from_line(text)
        if record is not None:
            self._records.setdefault(rank, record)
            return
        if text == DONE_LINE:
            self.done.add(rank)
            return
        # A progress bar redraws its line; only its last state is worth a line.
        text = text.rpartition("\r")[2]
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
            # The reader has gone (`| head`); hours of training go on, the log files too.
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, target.fileno())
                os.close(null)


class LiveStream:
    """One stream of a rank that is shown as it comes.

    Args:
        hides: Callable that tells of a whole line whether it is kept back. Then a line is shown
            at its end only, or when it redraws itself. None: all is shown at once.
    """

    def __init__(self, hides: Callable[[str], bool] | None = None) -> None:
        self._hides = hides
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False

    def take(self, data: bytes) -> str:
        """What is to be shown, now that this has come."""
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
        """What is to be shown at the end of the rank."""
        if self._held:
            return self.take(b"\n")
        return "\n" if self._is_open else ""
