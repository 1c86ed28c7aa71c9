"""mpirun, horovodrun and srun as starters: their output is read, their end is made certain.

Each of them marks the lines of the ranks in a way of its own; read back, ranks look the same on
the screen and in log files under every starter, and the rank that failed is known.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from hvdtrain.errors import (
    EXIT_COLLECTIVE,
    EXIT_RUN_FAILED,
    EXIT_SIGNALLED,
    EXIT_STOPPED,
    EXIT_TIME_OVER,
    LaunchError,
)
from hvdtrain.launch.console import Console
from hvdtrain.launch.failure import RankEnd, first_failure, last_lines, name_cause
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.signals import SignalInbox
from hvdtrain.launch.starter_words import RANK_LINES, StarterWords
from hvdtrain.launch.waiting import FIRST_WORDS_S, WaitingWords, runs_below
from hvdtrain.world.failure import signal_name

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.1
_ELSEWHERE_S = 20.0
"""Ranks on other hosts are not seen before they write something, and they load TensorFlow first."""
_LAST_WORDS_S = 0.5
_FAILURE_GRACE_S = 10.0
"""How long a starter may take to end a job of which a rank has said that it failed."""
_KILL_AFTER_S = 5.0
_GIVE_UP_S, _REAP_S = 2.0, 0.01
_SRUN_CAUSE_S, _SRUN_PATIENCE_S = 3.0, 1.0
"""srun does not end a job itself (its --kill-on-bad-exit would also strike at ranks that stop on
request, one after the other); this launcher does, after the cause and the others had time to
fail."""


class ForeignJob:
    """One job under another starter."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._line = RANK_LINES[plan.starter]
        self._words = StarterWords(plan.starter)
        self._rest = {"stdout": b"", "stderr": b""}
        self._started_s = time.time()
        self._ends: dict[int, RankEnd] = {}
        self._limit = None if plan.timeout_s is None else time.monotonic() + plan.timeout_s
        seen = plan.waits_for or {slot.host for slot in plan.slots} & plan.local_hosts
        self._waiting = WaitingWords(console.say, FIRST_WORDS_S if seen else _ELSEWHERE_S)
        self._ranks_seen = False
        self._end_at: float | None = None
        self._terminated = False
        self._stopped_by = 0
        self._stopped_s: float | None = None
        self._timed_out = False

    def run(self, env: Mapping[str, str], inbox: SignalInbox) -> int:
        """Start the starter and stay to its end, which leaves no process on this host.

        Args:
            env: The environment of the starter.
            inbox: The signals for this process.

        Returns:
            The exit code of the job.

        Raises:
            LaunchError: The starter cannot be started.
        """
        libc, before = ctypes.CDLL(None), _children()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the starter come to this process
        try:
            # Should this launcher be killed, the kernel tells the starter to end.
            process = subprocess.Popen(
                self._plan.argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
        except OSError as error:
            raise LaunchError(f"The starter {self._plan.argv[0]} cannot be started: {error}. "
                              "Install it, or use --starter native.") from error
        try:
            self._serve(process, inbox)
        finally:
            left = _kill_descendants(process, before)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if left:
            self._console.say(f"{len(left)} processes outlive SIGKILL and are left on this host: "
                              f"{', '.join(map(str, sorted(left)))}")
        return self._report(process.returncode)

    def _serve(self, process: subprocess.Popen[bytes], inbox: SignalInbox) -> None:
        pidfd = os.pidfd_open(process.pid)
        with selectors.DefaultSelector() as selector:
            for name in self._rest:
                selector.register(getattr(process, name), selectors.EVENT_READ, name)
            selector.register(inbox, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            while process.poll() is None:
                for key, _ in selector.select(_POLL_S):
                    if key.data is not None and not self._read(key.data, key.fd):
                        selector.unregister(key.fileobj)
                self._act(process, inbox)
            selector.unregister(pidfd)
            selector.unregister(inbox)
            # What was written before the end; a process that is left may hold the pipes open.
            while selector.get_map():
                events = selector.select(_LAST_WORDS_S)
                for key, _ in events:
                    if not self._read(key.data, key.fd):
                        selector.unregister(key.fileobj)
                if not events:
                    break
        os.close(pidfd)
        for rank in range(self._plan.np):
            self._console.finish(rank)

    def _act(self, process: subprocess.Popen[bytes], inbox: SignalInbox) -> None:
        """Pass on signals, keep the limits, say when nothing happens."""
        if not self._ranks_seen:
            self._waiting.tick(lambda: self._waited_for(process.pid))
        for number in inbox.take():
            if number in (signal.SIGINT, signal.SIGTERM):
                again, self._stopped_by = self._stopped_by, number
                self._stopped_s = self._stopped_s or time.time()
                asked = self._plan.stop_signal if number == signal.SIGTERM else number
                self._ask(process, signal.SIGTERM if again else asked, self._plan.grace_s)
            else:
                process.send_signal(number)
        if self._limit is not None and time.monotonic() >= self._limit and not self._timed_out:
            self._console.say(f"the limit of {self._plan.timeout_s:g} s is over")
            self._timed_out = True
            self._ask(process, self._plan.stop_signal, self._plan.grace_s)
        failed = [end for end in self._ends.values() if end.failed and end.code != EXIT_STOPPED]
        if self._end_at is None and failed:
            self._end_at = time.monotonic() + self._patience_s(failed)
        if self._end_at is not None and time.monotonic() >= self._end_at:
            # A starter that has not been asked to end may still end ranks on other hosts.
            self._stopped_s = self._stopped_s or time.time()
            self._ask(process, signal.SIGKILL if self._terminated else signal.SIGTERM,
                      _KILL_AFTER_S)

    def _waited_for(self, pid: int) -> str:
        """Why no rank has written anything yet, unless one is seen to run here."""
        self._ranks_seen = runs_below(pid, self._plan.command)
        if self._ranks_seen:
            return ""
        hosts = ", ".join(dict.fromkeys(slot.host for slot in self._plan.slots))
        return self._plan.waits_for or (
            f"{self._plan.starter} (process {pid}); no rank on {hosts} has written anything yet")

    def _patience_s(self, failed: list[RankEnd]) -> float:
        if self._plan.starter != "srun":
            return _FAILURE_GRACE_S
        return _SRUN_CAUSE_S if all(end.secondary for end in failed) else _SRUN_PATIENCE_S

    def _ask(self, process: subprocess.Popen[bytes], number: int, wait_s: float) -> None:
        """Send a signal; what comes next is due after `wait_s`."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        self._terminated = self._terminated or number == signal.SIGTERM
        self._end_at = time.monotonic() + wait_s

    def _read(self, stream: str, descriptor: int) -> bool:
        data = os.read(descriptor, 1 << 18)
        *lines, self._rest[stream] = (self._rest[stream] + data).split(b"\n")
        if not data and self._rest[stream]:
            lines, self._rest[stream] = [*lines, self._rest[stream]], b""
        for line in lines:
            self._take(stream, line)
        return bool(data)

    def _take(self, stream: str, line: bytes) -> None:
        found = self._line.fullmatch(line)
        rank = int(found["rank"]) if found else -1
        self._ranks_seen = self._ranks_seen or found is not None
        if found is None or rank >= self._plan.np:
            self._take_of_starter(stream, line)
            return
        named = found.groupdict().get("stream")
        self._console.feed(rank, named.decode() if named else stream, found["text"] + b"\n")
        record = self._console.record(rank)
        if record is not None and rank not in self._ends:
            self._ends[rank] = self._end(rank, record.code, record.time_s)

    def _take_of_starter(self, stream: str, line: bytes) -> None:
        text = line.decode(errors="replace")
        said = self._words.read(text)
        if said is not None and said.rank < self._plan.np and said.rank not in self._ends:
            self._ends[said.rank] = self._end(said.rank, said.code, time.time(), said.reason)
        self._console.pass_on(stream, text)

    def _end(self, rank: int, code: int, time_s: float, reason: str = "") -> RankEnd:
        return RankEnd(rank=rank, host=self._plan.slots[rank].host, code=code, time_s=time_s,
                       reason=reason, record=self._console.record(rank),
                       tail=self._console.tail(rank))

    def _report(self, code: int) -> int:
        """Say how it ended, and give the exit code."""
        if self._timed_out:
            return EXIT_TIME_OVER
        if code == 0:
            return self._check_done()
        ends = [self._end(end.rank, end.code, end.time_s, end.reason)
                for end in self._ends.values()]
        if ends and all(end.code == EXIT_STOPPED for end in ends):
            self._console.say("all ranks stopped on request")
            return EXIT_STOPPED
        cause = first_failure(ends, self._stopped_s)
        if self._stopped_by and (cause is None or cause.time_s > (self._stopped_s or 0.0)):
            # mpirun answers every signal with 1; any other code was chosen by a rank.
            chosen = [end.code for end in ends if end.code > 0]
            if chosen:
                return chosen[0]
            return EXIT_SIGNALLED + self._stopped_by if code == 1 else _shell(code)
        if cause is not None:
            self._name_silent(cause)
            log = self._console.log_path(cause.rank)
            for line in name_cause(cause, started_s=self._started_s) + last_lines(cause, log):
                self._console.say(line)
            told = cause.record is not None or not cause.secondary
            return cause.exit_code if told else EXIT_COLLECTIVE
        if code < 0:
            self._console.say(f"{self._plan.starter} was killed by {signal_name(-code)}")
        return _shell(code)

    def _name_silent(self, cause: RankEnd) -> None:
        """The ranks of which nothing was heard, where the others only tell that one has gone."""
        silent = [rank for rank in range(self._plan.np)
                  if rank not in self._console.done and rank not in self._ends]
        if self._plan.says_done and cause.secondary and silent:
            named = ", ".join(f"rank {rank} on {self._plan.slots[rank].host}" for rank in silent)
            self._console.say(f"{named} told neither that it was done nor why it failed: it was "
                              "killed, or left early with code 0. The others could not go on")

    def _check_done(self) -> int:
        """Open MPI 5 ends with 0 after it has lost a host."""
        missing = [rank for rank in range(self._plan.np) if rank not in self._console.done]
        if not self._plan.says_done or not missing:
            return 0
        named = ", ".join(f"{rank} on {self._plan.slots[rank].host}" for rank in missing)
        self._console.say(
            f"{self._plan.starter} ended with code 0, but not all ranks have finished: rank "
            f"{named}. Was a host lost? Look at its messages above.")
        return EXIT_RUN_FAILED


def _shell(code: int) -> int:
    return EXIT_SIGNALLED - code if code < 0 else code


def _kill_descendants(process: subprocess.Popen[bytes], before: set[int]) -> set[int]:
    """End the starter, and what it has left behind on this host.

    Returns:
        The processes that outlive SIGKILL, as in an uninterruptible wait.
    """
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GIVE_UP_S)
    deadline = time.monotonic() + _GIVE_UP_S
    while orphans := _children() - before:  # those of a killed one come in the next round
        for pid in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(_REAP_S)
    return orphans


def _children() -> set[int]:
    """The processes whose parent is this one."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            found.update(map(int, file.read().split()))
    return found
