"""Virtual hosts: real ssh hosts on one machine, from Linux namespaces. Root only.

Each host has its own network, hostname, processes, IPC and /dev/shm, an sshd on port 22, and the
file system of this machine, as in a cluster with a shared home. The switch between them stands in
a namespace of its own and /etc/ssh is laid over, so that neither the real network nor the user's
keys are touched.

    python -m tests.cluster.hosts 3      # three hosts and a shell on the first, to try things
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.packages import HOSTS, NotPermittedError, ensure, program

_NETWORK = "10.77.0"
_LETTERS = "abcdefghi"
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
    """Some virtual hosts. A context manager; `up` and `down` do the same by hand."""

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        self.names = tuple(f"host{letter}" for letter in _LETTERS[:count])
        self._rate = rate
        self._prefix = f"hvd{os.getpid()}-{next(_count)}"
        self._folder = Path()
        self._unshare: dict[str, subprocess.Popen[bytes]] = {}
        self._init: dict[str, int] = {}

    def __enter__(self) -> VirtualHosts:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Make the hosts; returns when each one answers on port 22.

        Raises:
            NotPermittedError: This machine does not allow it.
        """
        ensure(HOSTS)
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
            _ip("netns", "del", self._namespace(name), check=False)
            shutil.rmtree(f"/etc/netns/{self._namespace(name)}", ignore_errors=True)
        _ip("netns", "del", self._switch, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def address(self, name: str) -> str:
        """The IPv4 address of a host."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def enter(self, name: str, argv: Sequence[str], *, cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `argv` on a host."""
        return ["nsenter", "-t", str(self._init[name]), "-m", "-u", "-i", "-n", "-p",
                f"--wdns={cwd or os.getcwd()}", "--", "env", f"HOSTNAME={name}",
                # Hosts share /tmp, and the daemons of an MPI name their files by process number.
                "TMPDIR=/dev/shm",
                *map(str, argv)]

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

    def signal(self, name: str, mark: str, number: int) -> list[int]:
        """Send a signal to the processes of a host whose command line holds `mark`."""
        found = self.processes(name, mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return sorted(found)

    def cut(self, name: str) -> None:
        """Unplug the network cable of a host."""
        _ip("-n", self._switch, "link", "set", name, "down")

    def join(self, name: str) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", name, "up")

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
        """Cap every host's network in both directions, e.g. `100mbit`; None: no cap."""
        for name in self.names:
            self._cap(name, rate)

    def interface(self, name: str, interface: str, address: str) -> None:
        """Give a host one more network interface, which leads nowhere."""
        _ip("-n", self._namespace(name), "link", "add", interface, "type", "veth", "peer",
            "name", f"{interface}-end")
        _ip("-n", self._namespace(name), "addr", "add", address, "dev", interface)
        _ip("-n", self._namespace(name), "link", "set", interface, "up")

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-sw"

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _write_settings(self) -> None:
        ssh = self._folder / "ssh"
        ssh.mkdir(mode=0o700)
        for key in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key)],
                           check=True, stdin=subprocess.DEVNULL)
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        (ssh / "sshd_config").write_text(_SSHD)
        (ssh / "ssh_config").write_text(_SSH)
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address(name)} {name}" for name in self.names]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)

    def _make_switch(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def _make_network(self, name: str, number: int) -> None:
        space = self._namespace(name)
        _ip("netns", "add", space)
        # `ip netns exec` lays what is in this folder over /etc.
        etc = Path("/etc/netns") / space
        etc.mkdir(parents=True)
        (etc / "ssh").symlink_to(self._folder / "ssh")
        (etc / "hosts").symlink_to(self._folder / "hosts")
        (etc / "hostname").write_text(f"{name}\n")
        _ip("-n", self._switch, "link", "add", name, "type", "veth", "peer", "name", "eth0",
            "netns", space)
        _ip("-n", self._switch, "link", "set", name, "master", "br0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
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
                _checked(["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                          rate, "burst", "256k", "latency", "100ms"])

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
        raise NotPermittedError(f"the sshd of {name} did not start: "
                                f"{log.read_text() if log.exists() else 'no log'}")

    @staticmethod
    def _pid_namespace(pid: int) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:
            return ""


def hear_interrupts() -> None:
    """In a new process: heed SIGINT. A shell lets its background jobs, and theirs, ignore it; a
    Slurm daemon that does so fails every job that is requeued.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ip(*words: str, check: bool = True) -> None:
    if check:
        _checked(["ip", *words])
    else:
        subprocess.run(["ip", *words], capture_output=True, check=False)


def _checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def virtual_hosts(count: int, *, rate: str | None = None) -> Iterator[VirtualHosts]:
    """As the class, for `with` statements in scripts."""
    with VirtualHosts(count, rate=rate) as made:
        yield made


if __name__ == "__main__":
    with VirtualHosts(int(sys.argv[1])) as hosts:
        subprocess.run(hosts.enter(hosts.names[0], [os.environ.get("SHELL", "/bin/bash")]),
                       check=False)
