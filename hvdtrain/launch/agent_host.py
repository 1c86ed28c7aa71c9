"""A part of the agent's program (`agent.py`): what stays on a host between works, and the keeper.

Standard library only. `launch/link.py` sends both files as one program, this one first.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import types
from typing import Any

_COMMIT, _CHANGE, _OWNER = "commit-", "change", "owner"
_TAKE_S = 10.0
FIRST_LEASE_S = 60


class Host:
    """What stays between works: the preloaded process, the folder of commits, the keeper."""

    def __init__(self, keeper: int) -> None:
        self.client = types.ModuleType("client")
        self.lease_s = FIRST_LEASE_S
        self._keeper = keeper
        self._preloader: Any = None
        self._commits = ""

    def begin(self, work: dict[str, Any]) -> None:
        """Take work; what it needs is made in the first one."""
        if work["preload"] and not vars(self.client).get("Preloader"):
            exec(work["preload"]["client"], self.client.__dict__)  # noqa: S102 - of our launcher
        commits = work.get("commits", "")
        if commits and not self._commits:
            _take_folder(commits, work["grace_s"] + _TAKE_S)
            self._commits = commits
            self.tell_keeper(f"={work['keep_s']} {commits}")
        if self._commits:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._commits, _CHANGE))

    def fork(self, work: dict[str, Any], env: dict[str, str], command: list[str],
             **streams: Any) -> Any:
        """Request a fork; RefusedError where that is not possible."""
        client, own = self.client, self._preloader is not None
        variable = client.SOCKET_VARIABLE
        if variable not in work["env"]:
            if not own:
                self._preloader = client.Preloader(work["preload"]["server"], env)
            env[variable] = self._preloader.path
        try:
            return client.ForkedProgram(env[variable], command, env=env, cwd=work["directory"],
                                        **streams)
        except client.RefusedError:
            if not own:
                raise
            self._preloader.close()  # it was killed; a new one takes its time
            self._preloader = None
            return self.fork(work, env, command, **streams)

    def prepare(self, work: dict[str, Any]) -> None:
        """Wait until ranks can be forked, and tell."""
        null = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
        if work["preload"] is not None:
            try:
                fork = self.fork(work, dict(work["env"]), [*work["command"][:1], "-c", ""], **null)
                fork.begin()
                fork.wait()
            except self.client.RefusedError as error:
                send({"type": "note", "text": f"ranks are started as new processes: {error}"})
        self.tell("ready")

    def obey(self, told: dict[str, Any]) -> None:
        """A line that is about the commits, or asks for an answer."""
        if told.get("alive"):
            send({"type": "alive"})
        if told.get("change") and self._commits:
            with open(os.path.join(self._commits, _CHANGE), "w", encoding="ascii"):
                pass
        if told.get("discard"):
            for name in _commits_in(self._commits):
                os.unlink(os.path.join(self._commits, name))
        if told.get("forget") and self._commits:
            _remove(self._commits)
            self.tell_keeper("=0 ")
            self._commits = ""

    def tell(self, kind: str) -> None:
        """Tell the launcher of an elastic job, with the newest commit."""
        if self._commits:
            numbers = [int(name.removeprefix(_COMMIT)) for name in _commits_in(self._commits)]
            send({"type": kind, "commit": max(numbers, default=0)})

    def tell_keeper(self, text: str) -> None:
        """A line for the keeper."""
        with contextlib.suppress(OSError):
            os.write(self._keeper, f"{text}\n".encode())

    def close(self) -> None:
        """End what was started."""
        if self._preloader is not None:
            self._preloader.close()


def _take_folder(folder: str, limit_s: float) -> None:
    """Make a folder, and lock it for this agent; the ranks of a former one may still be ending."""
    until = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(held)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            sys.exit(f"{folder} is not a folder of this user alone")
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this agent ends
            if os.path.samestat(found, os.lstat(folder)):
                return
        os.close(held)
        if time.monotonic() > until:
            sys.exit("another launcher runs the same elastic job, with this command in this "
                     "folder; wait for its end, or use another folder")
        time.sleep(0.1)


def _commits_in(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(folder) if name.startswith(_COMMIT)]
    return []


def _remove_unless_taken(folder: str) -> None:
    """Remove a folder of this keeper, which the agent has left, unless another agent has it."""
    with contextlib.suppress(OSError):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        for _ in range(10):  # the lock of an agent that was killed ends a moment later
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_own(folder):
                    _remove(folder)
                break
            time.sleep(0.1)


def _remove(folder: str) -> None:
    """Remove a folder of files."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def signal_group(pid: int, number: int) -> None:
    """Signal a group of processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(pid, number)


def send(message: dict[str, Any], payload: bytes = b"", *, mark: bytes = b"") -> None:
    """Write a message for the launcher, with `mark` before it."""
    data = mark + json.dumps(message).encode() + b"\n" + payload
    with contextlib.suppress(OSError):  # the launcher is gone; standard input ends too
        while data:
            data = data[os.write(1, data):]


def start_keeper() -> int:
    """Fork the keeper; returns the descriptor that takes lines `+GROUP` and `-GROUP`."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)
        return write_end
    os.close(write_end)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # ssh would wait for them to be closed
        os.dup2(null, descriptor)
    groups: set[int] = set()
    commits, keep_s = "", 0.0
    with open(read_end, encoding="utf-8") as told:
        for line in told:
            if line.startswith("="):
                seconds, _, commits = line[1:].rstrip("\n").partition(" ")
                keep_s = float(seconds)
                if commits:
                    _own(commits)
            else:
                (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        signal_group(group, signal.SIGKILL)
    if commits:
        until = time.monotonic() + keep_s
        while time.monotonic() < until and _is_own(commits) and _commits_in(commits):
            time.sleep(1.0)
        _remove_unless_taken(commits)
    os._exit(0)


def _own(commits: str) -> None:
    """Take a folder of commits over from the keeper of a former launcher."""
    with open(os.path.join(commits, _OWNER), "w", encoding="ascii") as file:
        file.write(str(os.getpid()))


def _is_own(commits: str) -> bool:
    try:
        with open(os.path.join(commits, _OWNER), encoding="ascii") as file:
            return file.read() == str(os.getpid())
    except OSError:
        return False
