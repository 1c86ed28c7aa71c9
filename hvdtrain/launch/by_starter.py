"""Starts a job by another program, such as mpirun, which is a child process here.

Each starter marks the lines of the ranks in its own way; they are parsed, so that screen and log
files look the same under every starter, and the rank that failed is known.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any

import psutil

from hvdtrain.errors import (
    EXIT_COLLECTIVE,
    EXIT_RUN_FAILED,
    EXIT_SIGNALLED,
    EXIT_STOPPED,
    EXIT_TIME_OVER,
    LaunchError,
    MachineError,
)
from hvdtrain.launch.output import FIRST_NOTICE_S, RankOutput, WaitingNotice
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running_job import (
    FAILURE_GRACE_S,
    GIVE_UP_S,
    JobEnd,
    RankEnd,
    RunningJob,
    last_lines,
    name_cause,
    shell_code,
)
from hvdtrain.launch.starters import starter_named
from hvdtrain.launch.starters.base import RankExit, Starter
from hvdtrain.process import SignalInbox, signal_name

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 0.5
_ELSEWHERE_S = 20.0  # not seen before they write, after loading TensorFlow
_RETRY_S, _LAST_WORDS_S, _REAP_S = 1.0, 0.5, 0.01


def launch_by_starter(plan: LaunchPlan, output: RankOutput, env: Mapping[str, str]) -> JobEnd:
    """As `launch`, with the starter of the plan, which gets the environment `env`."""
    with SignalInbox() as inbox:
        if starter_named(plan.starter).by_ssh and (number := _await_names(plan, output, inbox)):
            return JobEnd(code=EXIT_SIGNALLED + number)
        return StarterJob(plan, output).run(env, inbox)


def _await_names(plan: LaunchPlan, output: RankOutput, inbox: SignalInbox) -> int:
    """Wait until the names of all hosts resolve here. Returns the signal that ended it, or 0."""
    waiting, limit_s = WaitingNotice(output.say), plan.start_timeout_s
    deadline = time.monotonic() + limit_s
    missing = sorted({*plan.hosts} - plan.local_hosts) if limit_s else []
    while missing := [host for host in missing if not _is_known(host)]:
        names = ", ".join(missing)
        waiting.tick(partial("the names of {} to be known on this host".format, names))
        if numbers := inbox.take():
            return numbers[0]
        if time.monotonic() > deadline:
            raise MachineError(
                f"After {limit_s:g} s these hosts are not known here: {names}. "
                "Expected names that this host can resolve. Have all pods of the job started?")
        time.sleep(_RETRY_S)
    return 0


def _is_known(host: str) -> bool:
    with suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


class StarterJob(RunningJob):
    """A job whose starter is another program."""

    def __init__(self, plan: LaunchPlan, output: RankOutput) -> None:
        super().__init__(plan, output)
        self._starter = starter_named(plan.starter)
        self._exits = ExitReader(self._starter)
        self._rest = {"stdout": b"", "stderr": b""}
        self._process: Any = None
        self._ranks_seen = self._terminated = False

    def run(self, env: Mapping[str, str], inbox: SignalInbox) -> JobEnd:
        """Start it and wait for its end; no process stays on this host."""
        libc, others = ctypes.CDLL(None), {*psutil.Process().children()}
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the starter come to this process
        try:
            # If this launcher is killed, the kernel signals the starter.
            self._process = subprocess.Popen(
                self.plan.argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
        except OSError as error:
            raise LaunchError(f"The starter {self.plan.argv[0]} cannot be started: {error}. "
                              "Install it, or use --starter native.") from error
        try:
            self._read_to_the_end(inbox)
        finally:
            left = _kill_all(self._process, others)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            self._process.stdout.close()
            self._process.stderr.close()
        if left:
            self.output.say(f"{len(left)} processes outlive SIGKILL and are left on this host: "
                            f"{', '.join(str(one.pid) for one in left)}")
        code = self._process.returncode
        return self._end(-signal.SIGKILL if code is None else code)

    def is_over(self) -> bool:
        """See `RunningJob.is_over`."""
        return self._process.poll() is not None

    def send(self, number: int) -> None:
        """Through the starter."""
        self._terminated = self._terminated or number == signal.SIGTERM
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def failure_wait_s(self, end: RankEnd) -> float | None:
        """Ranks that stop on request get as long as the starter allows."""
        return None if end.code == EXIT_STOPPED else self._starter.patience_s[end.secondary]

    def kill(self) -> None:
        """SIGTERM first if the starter got none: it may still end ranks on other hosts."""
        if self._terminated:
            super().kill()
        else:
            self.send(signal.SIGTERM)
            self.arm("kill", FAILURE_GRACE_S, self.kill)

    def _read_to_the_end(self, inbox: SignalInbox) -> None:
        pidfd = os.pidfd_open(self._process.pid)
        for name in self._rest:
            stream = getattr(self._process, name)
            self.watch(stream, partial(self._read, name, stream))
        self.watch(pidfd, lambda: None)
        here = {*self.plan.hosts} & self.plan.local_hosts
        waiting = WaitingNotice(self.output.say, FIRST_NOTICE_S if here else _ELSEWHERE_S)
        self._look(waiting)
        self.serve(inbox)
        self.selector.unregister(pidfd)
        self.selector.unregister(inbox)
        os.close(pidfd)
        # Read what was written before the end; a leftover process may hold the pipes open.
        while self.selector.get_map() and (events := self.selector.select(_LAST_WORDS_S)):
            for key, _ in events:
                key.data()
        self.selector.close()
        for rank in range(self.plan.np):
            self.output.finish(rank)

    def _look(self, waiting: WaitingNotice) -> None:
        if not self._ranks_seen:
            waiting.tick(self._waited_for)
            self.arm("look", _LOOK_S, partial(self._look, waiting))

    def _waited_for(self) -> str:
        self._ranks_seen = runs_below(self._process.pid, self.plan.options.command)
        return "" if self._ranks_seen else (
            f"{self.plan.starter} (process {self._process.pid}); no rank on "
            f"{', '.join(self.plan.hosts)} has written anything yet")

    def _read(self, name: str, stream: IO[bytes]) -> None:
        data = os.read(stream.fileno(), 1 << 18)
        *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
        if not data:
            lines, self._rest[name] = [rest] if (rest := self._rest[name]) else [], b""
            self.selector.unregister(stream)
        for line in lines:
            self._take(name, line)

    def _take(self, stream: str, line: bytes) -> None:
        found = self._starter.rank_line.fullmatch(line)
        self._ranks_seen = self._ranks_seen or found is not None
        if found is None or int(found["rank"]) >= self.plan.np:
            text = line.decode(errors="replace")
            said = self._exits.read(text)
            if said is not None and said.rank < self.plan.np and said.rank not in self.ends:
                self.end_rank(said.rank, said.code, time.time(), said.reason)
            self.output.pass_on(stream, text)
            return
        rank, named = int(found["rank"]), found.groupdict().get("stream")
        self.output.feed(rank, named.decode() if named else stream, found["text"] + b"\n")
        record = self.output.record(rank)
        if record is not None and rank not in self.ends:
            self.end_rank(rank, record.code, record.time_s)

    def _end(self, code: int) -> JobEnd:
        if self.why_stopped == "timeout":
            return JobEnd(code=EXIT_TIME_OVER)
        untold = sorted({*range(self.plan.np)} - self.output.done) if self.plan.says_done else []
        if code == 0 and untold:  # Open MPI 5 ends with 0 after it has lost a host
            return JobEnd(code=EXIT_RUN_FAILED, report=(
                f"{self.plan.starter} ended with code 0, but not all ranks have finished: rank "
                f"{self._named(untold)}. Was a host lost? Look at its messages above.",))
        if code == 0:
            return JobEnd(code=0)
        ends = [replace(end, record=self.output.record(end.rank), tail=self.output.tail(end.rank))
                for end in self.ends.values()]  # some wrote more after it was known
        if ends and all(end.code == EXIT_STOPPED for end in ends):
            return JobEnd(code=EXIT_STOPPED, report=("all ranks stopped on request",))
        cause = self.first_failure(ends)
        if cause is None and self.signal:
            # mpirun answers every signal with 1; any other code was chosen by a rank.
            own = EXIT_SIGNALLED + self.signal if code == 1 else shell_code(code)
            return JobEnd(code=next((end.code for end in ends if end.code > 0), own))
        if cause is None:
            return JobEnd(code=shell_code(code), report=(
                f"{self.plan.starter} was killed by {signal_name(-code)}",) if code < 0 else ())
        lines = (name_cause(cause, started_s=self.started_s)
                 + last_lines(cause, self.output.log_path(cause.rank)))
        silent = [rank for rank in untold if rank not in self.ends]
        if silent and cause.secondary:  # the others only report that one is gone
            lines.insert(0, f"{self._named(silent, 'rank ')} told neither that it was done nor why "
                            "it failed: it was killed, or left early with code 0. The others could "
                            "not go on")
        told = cause.record is not None or not cause.secondary
        return JobEnd(code=cause.exit_code if told else EXIT_COLLECTIVE, cause=cause,
                      report=tuple(lines))

    def _named(self, ranks: Iterable[int], before: str = "") -> str:
        return ", ".join(f"{before}{rank} on {self.plan.slots[rank].host}" for rank in ranks)


class ExitReader:
    """Parses the starter's own lines, in order."""

    def __init__(self, starter: Starter) -> None:
        self._starter, self._before = starter, ""

    def read(self, line: str) -> RankExit | None:
        """The end of a rank that this line reports, alone or with the line before it."""
        joined, self._before = f"{self._before} {line.strip()}", line.strip()
        for pattern, code, reason in self._starter.rank_exits:
            if found := re.search(pattern, joined):
                self._before, said = "", found.groupdict()
                if code is None:
                    code = int(said["code"]) if "code" in said else -int(said["signal"])
                return RankExit(int(said["rank"]), code, reason)
        return None


def runs_below(pid: int, command: Sequence[str]) -> bool:
    """Whether a descendant of `pid` on this host runs a command."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if child.cmdline() == list(command):
                    return True
    return False


def _kill_all(process: subprocess.Popen[bytes],
              others: set[psutil.Process]) -> set[psutil.Process]:
    """End the starter and what it left on this host; returns what outlives SIGKILL."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GIVE_UP_S)
    deadline = time.monotonic() + GIVE_UP_S
    # Those of a killed one come in the next round.
    while (orphans := {*psutil.Process().children()} - others) and time.monotonic() < deadline:
        for orphan in orphans:
            with suppress(psutil.Error):
                orphan.kill()
            with suppress(ChildProcessError):  # psutil's wait would block for one that is traced
                os.waitpid(orphan.pid, os.WNOHANG)
        time.sleep(_REAP_S)
    return orphans
