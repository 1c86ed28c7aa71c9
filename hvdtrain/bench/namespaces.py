"""What virtual hosts need of this machine: root, programs, and a way to run them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

from hvdtrain.errors import MachineError

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
            "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
"""What is needed, and the Debian packages that have it."""

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def check_machine() -> None:
    """Refuse a machine or a user without what virtual hosts need.

    Raises:
        MachineError: This is not root, or programs are missing; the message names them.
    """
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
    """The path of a program, also of those in sbin."""
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def hear_interrupts() -> None:
    """In a new process: heed SIGINT.

    A shell lets its background jobs, and theirs, ignore it; a Slurm daemon that does so fails
    every job that is requeued.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_ip(*words: str, check: bool = True) -> None:
    """Run `ip`.

    Raises:
        MachineError: It fails, and `check` is set.
    """
    if check:
        run_checked(["ip", *words])
    else:
        subprocess.run(["ip", *words], capture_output=True, check=False)


def run_checked(command: Sequence[str]) -> None:
    """Run a program to its end.

    Raises:
        MachineError: It fails; the message holds what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(command)} failed with exit code {done.returncode}: "
                           f"{done.stderr.strip()}. Expected that root may make network "
                           "namespaces and limit their speed here.")
