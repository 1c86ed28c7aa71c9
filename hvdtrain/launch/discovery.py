"""Which hosts an elastic job may use now: named once, a hostfile that is watched, or a program."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import ConfigError, HvdtrainError, LaunchError
from hvdtrain.hosts import Host, parse_hosts, read_hostfile
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.process import run_program

_EVERY_S, _LIMIT_S = 1.0, 10.0


class Discovery:
    """The hosts of now; `fileno` is readable when they, or what is wrong, have changed."""

    def __init__(self, look: Callable[[], Sequence[Host]], *, again: bool) -> None:
        self.hosts: tuple[Host, ...] = tuple(look())
        self.problem = ""
        self._look = look
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True) if again else None

    def start(self) -> None:
        """Look again from now on; starts a thread."""
        if self._thread is not None:
            self._thread.start()

    def fileno(self) -> int:
        """For `selectors`."""
        return self._read_end

    def take(self) -> None:
        """What has changed was seen."""
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        while not self._closed.wait(_EVERY_S):
            try:
                found, problem = tuple(self._look()), ""
            except HvdtrainError as error:
                found, problem = self.hosts, str(error)
            if (found, problem) != (self.hosts, self.problem):
                self.hosts, self.problem = found, problem
                with suppress(BlockingIOError):
                    os.write(self._write_end, b"!")


def discovery_of(options: LaunchOptions, named: Callable[[], Sequence[Host]]) -> Discovery:
    """Where the hosts of a job come from; `named` gives those of a job that is not elastic.

    Raises:
        LaunchError: The program cannot be used.
        ConfigError: Hosts cannot be read.
    """
    script, hostfile = options.elastic.host_discovery_script, options.hostfile
    if script is not None:
        return Discovery(lambda: hosts_of_program(script), again=True)
    if options.elastic.watch and hostfile is not None:
        return Discovery(lambda: _read_changing(hostfile), again=True)
    return Discovery(named, again=False)


def hosts_of_program(script: Path, limit_s: float = _LIMIT_S) -> tuple[Host, ...]:
    """Run a discovery program, which prints a line `HOST:SLOTS` or `HOST` (one slot) for each.

    Raises:
        LaunchError: It fails, hangs, or prints something else; says what.
    """
    path = script if os.sep in str(script) else Path(".") / script
    done = run_program([path.absolute()], limit_s=limit_s)
    if done.code:
        raise LaunchError(f"The host discovery script {script} failed (code {done.code}): "
                          f"{done.last_line}. Expected lines HOST:SLOTS and code 0.")
    lines = [line.strip() for line in done.out.splitlines() if line.strip()]
    try:
        hosts = [host for line in lines for host in parse_hosts(line)]
    except ConfigError as error:
        raise LaunchError(f"The host discovery script {script}: {error}") from None
    twice = [name for name, count in Counter(host.name for host in hosts).items() if count > 1]
    if twice:
        raise LaunchError(f"The host discovery script {script} names {twice[0]} twice. Expected "
                          "one line for each host, with all of its slots.")
    return tuple(hosts)


def _read_changing(path: Path) -> tuple[Host, ...]:
    """A hostfile that another program writes; it may name no host for a while."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the hostfile {path}: {error}.") from None
    if not any(line.partition("#")[0].strip() for line in text.splitlines()):
        return ()
    return read_hostfile(path)
