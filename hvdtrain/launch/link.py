"""How a host is reached: the command lines of ssh, and `AgentLink`, the connection to its agent.

What the user typed is quoted for that host's shell; secrets go through standard input, never on a
command line.

A thread per link writes, and renews the lease: a host that does not read must not delay the others,
and a launcher that is blocked on its terminal must not lose its ranks.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from hvdtrain.errors import LaunchError
from hvdtrain.fork import Fork
from hvdtrain.launch import agent
from hvdtrain.launch.options import RemoteOptions
from hvdtrain.process import run_program
from hvdtrain.world.network import find_interface, is_own_address, listed, no_interface, route_to

LEASE_S = 12  # an agent that hears nothing for so long ends its ranks
CUT_OFF_END_S = LEASE_S + 4.0  # and they are gone: see `agent.py`
_PING_S, _KILL_S = 3.0, 2.0
_STDERR_LINES = 5
_LARGEST_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 10
_ALIVE_INTERVAL_S, _ALIVE_COUNT = 3, 3  # a cut cable is seen in 9 to 12 s; TCP alone takes hours
_CONFIGURATION_S = 3.0  # `ssh -G` does not connect, but a `Match exec` may take a moment
_SOURCE = b"".join(
    line for part in ("agent_host.py", "agent.py")
    for line in Path(__file__).with_name(part).read_bytes().splitlines(keepends=True)
    if not line.startswith(b"from hvdtrain."))  # the second file follows the first one
# Reads exactly the program, so that what follows it stays for the program.
_BOOT = ("import os\ns=b''\nwhile len(s)<{size}:\n d=os.read(0,{size}-len(s))\n"
         " if not d: os._exit(1)\n s+=d\n"
         "exec(compile(s,'{name}','exec'),{{'__name__':'__main__'}})")


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What an agent reports of its host.

    `clock_offset_s` is to be added to its times. `interfaces` maps names to IPv4 addresses;
    `own_address` is that from which it reaches a peer (None: it knows none); `ssh_client` is the
    launcher's address as that host sees it, `ssh_server` its own.
    """

    clock_offset_s: float
    interfaces: dict[str, str]
    own_address: str | None
    ssh_client: str | None
    ssh_server: str | None


class AgentLink:
    """One agent; `remote` is None for this host. It looks for a route to one of `peers`.

    `by_slurm`: the host is reached by srun, as a node of the job in which this process is.
    """

    def __init__(self, host: str, peers: Sequence[str], remote: RemoteOptions | None, *,
                 by_slurm: bool = False) -> None:
        self.host, self.is_local, self._remote = host, remote is None, remote
        self.by_slurm = by_slurm
        self.facts: HostFacts | None = None
        self.last_words: deque[str] = deque(maxlen=_STDERR_LINES)
        self._hello = json.dumps({"peers": list(peers)}).encode() + b"\n"
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._process: Any = None
        self._sender: threading.Thread | None = None

    def prepare(self) -> None:
        """Read the configuration of ssh for this host, once; it may ask a slow name server."""
        if self._remote is not None and not self.by_slurm:
            asks_about_keys(self.host, self._remote)

    def start(self, start: Callable[[Sequence[str]], Any], *, is_there: bool = False) -> None:
        """Start the agent. Its facts come with the first messages that are read.

        `is_there` tells that `start` starts programs on that host itself.
        """
        boot = sent_program("hvdtrain-agent", len(_SOURCE))
        command = boot if is_there else self.command_for(boot)
        self._begin(start(command))
        self._outbox.put(_SOURCE + self._hello)
        self.start_sending()

    def fork(self, keep: Sequence[int]) -> int:
        """As `start`, for the agent of this host as a fork, which has the descriptors `keep`.

        Returns its pid.
        """
        # Starts no thread, so that the rendezvous can be a fork too.
        process = Fork(agent.main, name="hvdtrain-agent", keep=keep, captured=True)
        self._begin(process)
        process.stdin.write(self._hello)
        process.stdin.flush()
        return process.pid

    def start_sending(self) -> None:
        """Start the thread that sends, and renews the lease, if it does not run yet."""
        if self._sender is None:
            self._sender = threading.Thread(target=feed, args=(self._process.stdin, self._outbox),
                                            name=f"to-{self.host}", daemon=True)
            self._sender.start()

    def _begin(self, process: Any) -> None:
        self._process, self._sender = process, None
        self._received, self._outbox = b"", queue.Queue()
        # A shared ssh connection (ControlPersist) keeps the pipe open after the process.
        os.set_blocking(self.stderr_fileno(), False)

    def command_for(self, argv: Sequence[str]) -> Sequence[str]:
        """The command line that runs `argv` on this host."""
        if self.by_slurm and self._remote is not None:
            return ["srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1",
                    f"--nodelist={self.host}", *argv]
        return argv if self._remote is None else remote_command(self.host, argv, self._remote)

    def fileno(self) -> int:
        """For `selectors`: the messages."""
        return int(self._process.stdout.fileno())

    def stderr_fileno(self) -> int:
        """For `selectors`: the errors of ssh and of the agent."""
        return int(self._process.stderr.fileno())

    def send(self, message: dict[str, Any], *, is_work: bool = False) -> None:
        """Send a control message; the first is the work."""
        self.start_sending()
        data = json.dumps(message).encode()
        self._outbox.put(b"%d\n%s" % (len(data), data) if is_work else data + b"\n")

    def read(self) -> list[tuple[dict[str, Any], bytes]] | None:
        """New messages with their payloads; None at the end of the stream."""
        data = os.read(self.fileno(), 1 << 18)
        if not data:
            return None
        self._received += data
        try:
            return list(self._messages())
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.last_words.append(f"it sent what no agent sends ({type(error).__name__}: {error})")
            return None

    def read_stderr(self) -> list[str] | None:
        """New lines of standard error; None at its end."""
        try:
            data = os.read(self.stderr_fileno(), 1 << 16)
        except BlockingIOError:
            return None
        lines = [line.strip() for line in data.decode(errors="replace").splitlines()
                 if line.strip()]
        self.last_words.extend(lines)
        return lines if data else None

    def close(self) -> None:
        """Close its input, which makes the agent end its ranks."""
        self._outbox.put(None)
        if self._process is not None:
            self.start_sending()

    def has_ended(self) -> bool:
        """Whether the process has ended, or was never there."""
        return self._process is None or self._process.poll() is not None

    def reap(self, limit_s: float) -> int | None:
        """Wait for the exit code of the process, which is killed at the limit."""
        process = self._process
        if process is None:
            return None
        self.close()
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
                process.wait(_KILL_S)
        if self._sender is not None:
            self._sender.join()
        while self.read_stderr() is not None:
            pass
        process.stdout.close()
        process.stderr.close()
        self._process = None
        return cast(int | None, process.returncode)

    def _messages(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        buffer, start = self._received, 0
        while (end := buffer.find(b"\n", start)) >= 0:
            if self.facts is None:
                _, mark, text = buffer[start:end].partition(agent.MARK)
                if mark:  # login scripts may print before it
                    told = json.loads(text)
                    offset_s = time.time() - told.pop("time")
                    self.facts = HostFacts(clock_offset_s=0.0 if self.is_local else offset_s,
                                           **told)
                start = end + 1
                continue
            message = json.loads(buffer[start:end])
            size = message.get("size", 0)
            if not (type(size) is int and 0 <= size <= _LARGEST_BYTES):
                raise ValueError(f"a size of {size!r}")
            rest = end + 1 + size
            if len(buffer) < rest:
                break
            yield message, buffer[end + 1:rest]
            start = rest
        self._received = buffer[start:]
        if len(self._received) > _LARGEST_BYTES:
            raise ValueError(f"{len(self._received)} bytes without an end")


def feed(pipe: IO[bytes], outbox: queue.Queue[bytes | None], ping: bytes = b"{}\n") -> None:
    """Thread: write what is in the outbox, and pings, which renew the lease."""
    with suppress(OSError, ValueError):  # the end of the agent is seen on its output
        while True:
            try:
                data = outbox.get(timeout=_PING_S)
            except queue.Empty:
                data = ping
            if data is None:
                break
            pipe.write(data)
            pipe.flush()
    with suppress(OSError):
        pipe.close()


def choose_interface(host: str, facts: HostFacts, wanted: Sequence[str]) -> str:
    """For the ranks' traffic: the first of `wanted` (names, networks), else that to other hosts."""
    has = facts.interfaces
    if found := find_interface(wanted, has):
        return found
    if wanted:
        raise LaunchError(no_interface(host, wanted, has, "--network-interface"))
    for address in (facts.own_address, facts.ssh_server):
        for name, own in has.items():
            if own == address and name != "lo":
                return name
    raise LaunchError(
        f"No network interface of {host} leads to the other hosts by their names. It has: "
        f"{listed(has)}. Name one: --network-interface NAME or NETWORK/BITS.")


def rendezvous_address(host: str, facts: HostFacts) -> str:
    """The address of this launcher as seen from another host."""
    if facts.ssh_client is not None and ":" not in facts.ssh_client:
        return facts.ssh_client
    try:
        return route_to(host).own_address
    except OSError as error:
        raise LaunchError(
            f"The address of {host} is not known here: {error}. Expected a name that this host "
            "can resolve, because its ranks must reach the launcher.") from error


def launcher_address(host: str, facts: HostFacts) -> str:
    """An address at which a host reaches this launcher, and at which it can listen.

    With ProxyJump or address translation ssh reports another one; then that of the route there.
    """
    address = rendezvous_address(host, facts)
    return address if is_own_address(address) else rendezvous_address(
        host, replace(facts, ssh_client=None))


def remote_command(host: str, argv: Sequence[str], options: RemoteOptions) -> list[str]:
    """The ssh command that runs `argv`: asks nothing, waits a bounded time, notices a lost host."""
    return ["ssh", *without_questions(accept_new=asks_about_keys(host, options)),
            "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}",
            "-o", f"ServerAliveInterval={_ALIVE_INTERVAL_S}",
            "-o", f"ServerAliveCountMax={_ALIVE_COUNT}", *login_words(options), host,
            shlex.join(argv)]


@cache
def asks_about_keys(host: str, options: RemoteOptions) -> bool:
    """Whether ssh would ask about an unknown key, its default; a user's other setting is obeyed.

    Asked once for each host.
    """
    said = run_program(["ssh", "-G", *login_words(options), host], limit_s=_CONFIGURATION_S)
    # Where it fails, the command itself tells what is wrong.
    return said.code != 0 or "\nstricthostkeychecking ask\n" in f"\n{said.out}"


def sent_program(name: str, size: int) -> list[str]:
    """The command line of a program called `name`, the first `size` bytes of standard input."""
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(name=name, size=size)]


def without_questions(*, accept_new: bool) -> list[str]:
    """The options with which ssh asks nothing; `accept_new` accepts unknown keys."""
    keys = ["-o", "StrictHostKeyChecking=accept-new"] if accept_new else []
    return ["-o", "BatchMode=yes", *keys]


def login_words(options: RemoteOptions) -> list[str]:
    """The options of ssh that the user has given."""
    given = {"-p": options.port, "-i": options.identity_file}
    return [word for option, value in given.items() if value is not None
            for word in (option, str(value))]
