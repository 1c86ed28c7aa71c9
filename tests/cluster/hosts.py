"""The virtual hosts of `hvdtrain.bench.virtual_hosts`, with what tests do to them. Root only.

    python -m tests.cluster.hosts 3      # three hosts and a shell on the first, to try things
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.bench import virtual_hosts as base
from hvdtrain.bench.virtual_hosts import hear_interrupts, run_checked
from hvdtrain.errors import MachineError
from tests.cluster.packages import HOSTS, NotPermittedError, ensure

_LETTERS = "abcdefghi"


class VirtualHosts(base.VirtualHosts):
    """hosta, ..., hosti, host10 and so on. A context manager; `up` and `down` do it by hand."""

    def __init__(self, count: int) -> None:
        super().__init__([f"host{_LETTERS[number] if number < len(_LETTERS) else number + 1}"
                          for number in range(count)])

    def up(self) -> None:
        """Make the hosts; returns when each one answers on port 22.

        Raises:
            NotPermittedError: This machine does not allow it.
        """
        ensure(HOSTS)
        try:
            super().up()
        except MachineError as error:
            raise NotPermittedError(str(error)) from error

    def start(self, name: str, argv: Sequence[str], *, cwd: Path | str | None = None,
              env: Mapping[str, str] | None = None, merge: bool = True) -> subprocess.Popen[str]:
        """Start a program on a host; its output is piped, `merge` puts stderr into stdout.

        A signal to the result does not reach the program: use `signal`.
        """
        return subprocess.Popen(
            self.enter(name, argv, cwd=cwd), env={**os.environ, **(env or {})}, text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else subprocess.PIPE, start_new_session=True,
            preexec_fn=hear_interrupts)

    def run(self, name: str, argv: Sequence[str], *, timeout: float = 60.0,
            cwd: Path | str | None = None, env: Mapping[str, str] | None = None,
            merge: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end; at the limit it is killed and the test fails."""
        process = self.start(name, argv, cwd=cwd, env=env, merge=merge)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{argv} did not end in {timeout} s:\n{out}\n{err}") from error
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def processes(self, name: str, mark: str = "") -> dict[int, str]:
        """The processes of a host whose command line holds `mark`: pid (as seen here), command."""
        own = self._pid_namespace(self._init[name])
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or self._pid_namespace(int(entry.name)) != own:
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(
                    errors="replace").strip()
                if mark in command:
                    found[int(entry.name)] = command
        return found

    def agent(self, name: str) -> int:
        """The agent of an elastic job on a host; not its keeper, which is a child of it."""
        found = self.processes(name)
        pids = [pid for pid, command in found.items() if "hvdtrain-agent" in command
                and "sshd" in found.get(_parent_of(pid), "")]
        assert len(pids) == 1, found
        return pids[0]

    def jobs_in_memory(self, name: str) -> list[str]:
        """The folders of elastic jobs in a host's memory."""
        return [found for found in self.run(name, ["ls", "/dev/shm"]).stdout.split()
                if found.startswith("hvdtrain-")]

    def signal(self, name: str, mark: str, number: int) -> list[int]:
        """Send a signal to the processes of a host whose command line holds `mark`."""
        found = self.processes(name, mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return sorted(found)

    def cut(self, name: str) -> None:
        """Unplug the network cable of a host."""
        run_checked("ip", "-n", self._switch, "link", "set", name, "down")

    def join(self, name: str) -> None:
        """Plug it in again."""
        run_checked("ip", "-n", self._switch, "link", "set", name, "up")

    def interface(self, name: str, interface: str, address: str) -> None:
        """Give a host one more network interface, which leads nowhere."""
        run_checked("ip", "-n", self._namespace(name), "link", "add", interface, "type", "veth",
                    "peer", "name", f"{interface}-end")
        run_checked("ip", "-n", self._namespace(name), "addr", "add", address, "dev", interface)
        run_checked("ip", "-n", self._namespace(name), "link", "set", interface, "up")

    @staticmethod
    def _pid_namespace(pid: int) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:
            return ""


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    with VirtualHosts(int(sys.argv[1])) as hosts:
        subprocess.run(hosts.enter(hosts.names[0], [os.environ.get("SHELL", "/bin/bash")]),
                       check=False)
