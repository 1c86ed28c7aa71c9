"""Virtual hosts: real ssh hosts on one machine, from Linux namespaces. Root only.

Each host has its own network, hostname, processes, IPC and /dev/shm, an sshd on port 22, and the
file system of this machine, as in a cluster with a shared home. Links can be given a speed. The
switch has its own namespace, and /etc/ssh is overlaid, so that the real network and the user's keys
are not touched.
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

from hvdtrain.errors import MachineError
from hvdtrain.process import run_program

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
            "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
"""Required, with the Debian packages that have them."""
ALIAS = "-ps"  # the name of a host with this at its end is its second name

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
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


def check_machine() -> None:
    """MachineError where the machine or the user lacks what virtual hosts need."""
    if os.geteuid() != 0:
        raise MachineError("Virtual hosts are network namespaces, which need root; this is user "
                           f"{os.geteuid()}. Run it as root, or in a container that is given "
                           "CAP_SYS_ADMIN and CAP_NET_ADMIN.")
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        packages = " ".join(sorted({PROGRAMS[name] for name in missing}))
        raise MachineError(f"Virtual hosts need {', '.join(missing)}, which this machine does not "
                           f"have. Install them (Debian/Ubuntu: apt-get install {packages}).")


def program(name: str) -> str | None:
    """The path of a program, also from sbin."""
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def hear_interrupts() -> None:
    """In a new process: stop ignoring SIGINT.

    A shell lets background jobs, and their children, ignore it; a Slurm daemon that does so fails
    every job that is requeued.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_checked(*command: str, text: str = "") -> None:
    """Run a program that reads `text` to its end; MachineError with its output if it fails."""
    done = run_program(command, text=text)
    if done.code:
        raise MachineError(f"{' '.join(command)} failed with exit code {done.code}: "
                           f"{done.err.strip()}. Expected that root may make network "
                           "namespaces and limit their speed here.")


def _mac(number: int) -> str:
    """The hardware address of the host with this number."""
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


class VirtualHosts:
    """Virtual hosts with these names; a context manager, or `up` and `down` by hand."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
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
        """Make the hosts; returns when each one answers on port 22."""
        check_machine()
        self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-hosts-"))
        try:
            self._write_settings()
            run_checked("ip", "netns", "add", self._switch)
            run_checked("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            run_checked("ip", "-n", self._switch, "link", "set", "br0", "up")
            for number, name in enumerate(self.names, start=1):
                self._start(name, number)
            for name in self.names:
                self._introduce(name)
            for name in self.names:
                self._await_ssh(name)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove the hosts and all of their processes."""
        for name in self.names:
            self.crash(name)
            run_program(["ip", "netns", "del", self._namespace(name)])
            shutil.rmtree(f"/etc/netns/{self._namespace(name)}", ignore_errors=True)
        run_program(["ip", "netns", "del", self._switch])
        shutil.rmtree(self._folder, ignore_errors=True)

    def address(self, name: str) -> str:
        """The IPv4 address of a host."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def enter(self, name: str, argv: Sequence[str], *, cwd: Path | str | None = None) -> list[str]:
        """The command line of `argv` on a host; a signal to it does not reach the program."""
        return ["nsenter", "-t", str(self._init[name]), "-m", "-u", "-i", "-n", "-p",
                f"--wdns={cwd or os.getcwd()}", "--", "env", f"HOSTNAME={name}",
                # Hosts share /tmp, where the daemons of MPIs name files by process number.
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
        """Cap every host's network in both directions, e.g. `100mbit`; None: no cap."""
        for space, device in [link for name in self.names for link in (
                (self._namespace(name), "eth0"), (self._switch, name))]:
            run_program(["tc", "-n", space, "qdisc", "del", "dev", device, "root"])
            if rate is not None:
                # The burst holds a packet of 64 KiB; the latency is the queue before drops.
                run_checked("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf",
                            "rate", rate, "burst", "256k", "latency", "100ms")

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-sw"

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _write_settings(self) -> None:
        ssh = self._folder / "ssh"
        ssh.mkdir(mode=0o700)
        for key in ("id", "hostkey"):
            run_checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key))
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        (ssh / "sshd_config").write_text(_SSHD)
        (ssh / "ssh_config").write_text(_SSH)
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address(name)} {name} {name}{ALIAS}" for name in self.names]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)

    def _start(self, name: str, number: int) -> None:
        space = self._namespace(name)
        run_checked("ip", "netns", "add", space)
        # `ip netns exec` overlays /etc with this folder.
        etc = Path("/etc/netns") / space
        etc.mkdir(parents=True)
        (etc / "ssh").symlink_to(self._folder / "ssh")
        (etc / "hosts").symlink_to(self._folder / "hosts")
        (etc / "hostname").write_text(f"{name}\n")
        for words in (f"{self._switch} link add {name} type veth peer name eth0 address "
                      f"{_mac(number)} netns {space}",
                      f"{self._switch} link set {name} master br0 up", f"{space} link set lo up",
                      f"{space} link set eth0 up",
                      f"{space} addr add {_NETWORK}.{number}/24 dev eth0"):
            run_checked("ip", "-n", *words.split())
        # bbr, where it is the default, does not reach the cap of a short queue.
        run_program(["ip", "netns", "exec", space, "sysctl", "-qw",
                     "net.ipv4.tcp_congestion_control=cubic"])
        script = 'hostname "$1"; mount -t tmpfs tmpfs /dev/shm; exec "$2" -D -E "$3"'
        self._unshare[name] = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "-u", "-i", "-p", "-f", "--kill-child",
             "--mount-proc", "bash", "-c", script, "bash", name, program("sshd") or "sshd",
             str(self._folder / f"sshd.{name}.log")],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=hear_interrupts)

    def _introduce(self, name: str) -> None:
        """Tell a host the links of all others."""
        # All namespaces share one table of 1024 learned addresses, which 32 hosts overflow.
        lines = [f"neigh replace {_NETWORK}.{number} lladdr {_mac(number)} dev eth0 nud permanent\n"
                 for number, other in enumerate(self.names, start=1) if other != name]
        run_checked("ip", "-n", self._namespace(name), "-batch", "-", text="".join(lines))

    def _await_ssh(self, name: str) -> None:
        import psutil
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            if run_program(["ip", "netns", "exec", self._namespace(name), "ss", "-Hltn",
                            "sport = :22"]).out:
                self._init[name] = psutil.Process(self._unshare[name].pid).children()[0].pid
                return
            time.sleep(0.02)
        log = self._folder / f"sshd.{name}.log"
        raise MachineError(f"The sshd of the virtual host {name} did not start in {_WAIT_S:g} s: "
                           f"{log.read_text().strip() if log.exists() else 'it left no log'}. "
                           "Expected that root may make namespaces here.")
