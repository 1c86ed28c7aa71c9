"""Virtual hosts: real ssh hosts on one machine, from Linux namespaces. Root only.

Each host has its own network, hostname, processes, IPC and /dev/shm, an sshd on port 22, and the
file system of this machine, as in a cluster with a shared home. Their links can be given a speed.
The switch between them stands in a namespace of its own and /etc/ssh is laid over, so that neither
the real network nor the user's keys are touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hvdtrain.bench.namespaces import (
    check_machine,
    hear_interrupts,
    program,
    run_checked,
    run_ip,
)
from hvdtrain.errors import MachineError

ALIAS = "-ps"
"""With this at its end, the name of a host is a second name of it."""

_NETWORK = "10.77.0"
_WAIT_S = 10.0
_count = itertools.count()

_SSHD = """Port 22
HostKey /etc/ssh/hostkey
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxStartups 100:30:200
SetEnv TMPDIR=/dev/shm
PidFile none
"""
_SSH = """Host *
  IdentityFile /etc/ssh/id
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""


class VirtualHosts:
    """Some virtual hosts. A context manager; `up` and `down` do the same by hand.

    Args:
        names: The names of the hosts, e.g. `("hosta", "hostb")`.
        rate: String or None, the speed of each host's link in each direction, e.g. `100mbit`.
    """

    def __init__(self, names: Sequence[str], *, rate: str | None = None) -> None:
        self.names = tuple(names)
        self._rate = rate
        self._prefix = f"hvd{os.getpid()}-{next(_count)}"
        self._folder = Path()
        self._unshare: dict[str, subprocess.Popen[bytes]] = {}
        self._init: dict[str, int] = {}

    def __enter__(self) -> VirtualHosts:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        """Make the hosts; returns when each one answers on port 22.

        Raises:
            MachineError: This machine, or this user, cannot have them.
        """
        check_machine()
        self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-hosts-"))
        try:
            self._write_settings()
            self._make_switch()
            for number, name in enumerate(self.names, start=1):
                self._make_network(name, number)
                self._boot(name)
            for name in self.names:
                self._await_ssh(name)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove the hosts and all of their processes."""
        for name in self.names:
            self.crash(name)
            run_ip("netns", "del", self._namespace(name), check=False)
            shutil.rmtree(f"/etc/netns/{self._namespace(name)}", ignore_errors=True)
        run_ip("netns", "del", self._switch, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def address(self, name: str) -> str:
        """The IPv4 address of a host."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def enter(self, name: str, argv: Sequence[str], *, cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `argv` on a host.

        A signal to it does not reach the program.
        """
        return ["nsenter", "-t", str(self._init[name]), "-m", "-u", "-i", "-n", "-p",
                f"--wdns={cwd or os.getcwd()}", "--", "env", f"HOSTNAME={name}",
                # Hosts share /tmp, and the daemons of an MPI name their files by process number.
                "TMPDIR=/dev/shm",
                *map(str, argv)]

    def crash(self, name: str) -> None:
        """Power off: everything on the host is killed."""
        process = self._unshare.pop(name, None)
        if process is None:
            return
        if name in self._init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init[name], signal.SIGKILL)
        process.kill()  # --kill-child takes the first process of the host with it
        process.wait()

    def rate(self, rate: str | None) -> None:
        """Cap every host's network in both directions, e.g. `100mbit`; None: no cap.

        Raises:
            MachineError: The kernel refuses.
        """
        for name in self.names:
            self._cap(name, rate)

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-sw"

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _write_settings(self) -> None:
        ssh = self._folder / "ssh"
        ssh.mkdir(mode=0o700)
        for key in ("id", "hostkey"):
            run_checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key)])
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        (ssh / "sshd_config").write_text(_SSHD)
        (ssh / "ssh_config").write_text(_SSH)
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address(name)} {name} {name}{ALIAS}" for name in self.names]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)

    def _make_switch(self) -> None:
        run_ip("netns", "add", self._switch)
        run_ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        run_ip("-n", self._switch, "link", "set", "br0", "up")

    def _make_network(self, name: str, number: int) -> None:
        space = self._namespace(name)
        run_ip("netns", "add", space)
        # `ip netns exec` lays what is in this folder over /etc.
        etc = Path("/etc/netns") / space
        etc.mkdir(parents=True)
        (etc / "ssh").symlink_to(self._folder / "ssh")
        (etc / "hosts").symlink_to(self._folder / "hosts")
        (etc / "hostname").write_text(f"{name}\n")
        run_ip("-n", self._switch, "link", "add", name, "type", "veth", "peer", "name", "eth0",
               "netns", space)
        run_ip("-n", self._switch, "link", "set", name, "master", "br0", "up")
        run_ip("-n", space, "link", "set", "lo", "up")
        run_ip("-n", space, "link", "set", "eth0", "up")
        run_ip("-n", space, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
        # bbr, where it is the default, does not reach the cap of a short queue.
        subprocess.run(["ip", "netns", "exec", space, "sysctl", "-qw",
                        "net.ipv4.tcp_congestion_control=cubic"], capture_output=True, check=False)
        if self._rate is not None:
            self._cap(name, self._rate)

    def _cap(self, name: str, rate: str | None) -> None:
        for space, device in ((self._namespace(name), "eth0"), (self._switch, name)):
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"],
                           capture_output=True, check=False)
            if rate is not None:
                # The burst holds a packet of 64 KiB; the latency is the queue before drops.
                run_checked(["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf",
                             "rate", rate, "burst", "256k", "latency", "100ms"])

    def _boot(self, name: str) -> None:
        script = ('hostname "$1"; mount -t tmpfs tmpfs /dev/shm; exec "$2" -D -E "$3"')
        self._unshare[name] = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(name), "unshare", "-u", "-i", "-p", "-f",
             "--kill-child", "--mount-proc", "bash", "-c", script, "bash", name,
             program("sshd") or "sshd", str(self._folder / f"sshd.{name}.log")],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=hear_interrupts)

    def _await_ssh(self, name: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        command = ["ip", "netns", "exec", self._namespace(name), "ss", "-Hltn", "sport = :22"]
        while time.monotonic() < deadline:
            if subprocess.run(command, capture_output=True, check=False).stdout.strip():
                pid = self._unshare[name].pid
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                self._init[name] = int(children[0])
                return
            time.sleep(0.02)
        log = self._folder / f"sshd.{name}.log"
        raise MachineError(f"The sshd of the virtual host {name} did not start in {_WAIT_S:g} s: "
                           f"{log.read_text().strip() if log.exists() else 'it left no log'}. "
                           "Expected that root may make namespaces here.")
