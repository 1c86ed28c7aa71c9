"""Command lines that run a program on another host: ssh, or kubectl where there is no sshd.

What the user typed reaches the other host's shell quoted; secrets never stand on a command line
(`native.py` sends them through standard input).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.settings import setting

CONNECT_TIMEOUT_S = 10
_ALIVE_INTERVAL_S, _ALIVE_COUNT = 3, 3
"""A host whose cable is cut is lost after 9 to 12 s; TCP alone would take hours."""
_CONFIGURATION_S = 3.0
"""For `ssh -G`, which connects to nobody; a `Match exec` in the configuration may take a moment."""
_KUBEXEC = re.compile(r"(?P<kubectl>\S*kubectl)\s+exec\s+\$\{?POD_NAME\}?"
                      r"(?:\s+(?:--container|-c)[\s=](?P<container>\S+))?")

# Reads exactly the program, so that what follows it stays for the program.
_BOOT = ("import os\ns=b''\nwhile len(s)<{size}:\n d=os.read(0,{size}-len(s))\n"
         " if not d: os._exit(1)\n s+=d\n"
         "exec(compile(s,'{name}','exec'),{{'__name__':'__main__'}})")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How other hosts are reached; what is not given here comes from the user's ssh_config."""

    port: int | None = setting(
        None, "Port of ssh on the other hosts.", option="--ssh-port", unset="ssh's own")
    identity_file: Path | None = setting(
        None, "Private key for ssh.", option="--ssh-identity-file", unset="ssh's own")
    kubectl: tuple[str, ...] | None = None
    """`kubectl` and the options of `kubectl exec`, in place of ssh."""

    def __post_init__(self) -> None:
        """Check the port.

        Raises:
            ConfigError: It is out of range.
        """
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"--ssh-port is {self.port}. Expected 1 to 65535.")


def remote_command(host: str, argv: Sequence[str], options: RemoteOptions) -> list[str]:
    """The command line that runs `argv` on `host`, with its standard streams here.

    Args:
        host: String, a name that ssh knows.
        argv: The program there with its arguments; they arrive as they are.
        options: Port and identity.
    """
    if options.kubectl is not None:
        program, *exec_options = options.kubectl
        return [program, "exec", "-i", host, *exec_options, "--", *argv]
    return ["ssh", *ssh_options(options, accept_new=asks_about_keys(host, options)), host,
            shlex.join(argv)]


def asks_about_keys(host: str, options: RemoteOptions) -> bool:
    """Whether ssh would ask the user about a key of `host` that is not known: its default.

    A configuration that says what to do (`StrictHostKeyChecking yes`) is the user's, and obeyed.

    Args:
        host: String, a name that ssh knows.
        options: Port and identity, by which a configuration may differ.
    """
    try:
        said = subprocess.run(["ssh", "-G", *_reach(options), host], capture_output=True,
                              text=True, errors="replace", stdin=subprocess.DEVNULL,
                              timeout=_CONFIGURATION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True  # the command itself tells what is wrong
    return said.returncode != 0 or "\nstricthostkeychecking ask\n" in f"\n{said.stdout}"


def sent_program(name: str, size: int) -> list[str]:
    """The command line of this Python that runs a program sent through standard input.

    Args:
        name: String, by which the process is known; no quotes.
        size: Integer, the bytes of the program. What follows them is left to it.
    """
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(name=name, size=size)]


def ssh_options(options: RemoteOptions, *, accept_new: bool) -> list[str]:
    """The options of ssh: no questions, a bounded wait, a lost host is noticed."""
    return [*without_questions(accept_new=accept_new),
            "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}",
            "-o", f"ServerAliveInterval={_ALIVE_INTERVAL_S}",
            "-o", f"ServerAliveCountMax={_ALIVE_COUNT}", *_reach(options)]


def without_questions(*, accept_new: bool) -> list[str]:
    """The options by which ssh asks nothing; `accept_new` answers that about an unknown key."""
    keys = ["-o", "StrictHostKeyChecking=accept-new"] if accept_new else []
    return ["-o", "BatchMode=yes", *keys]


def _reach(options: RemoteOptions) -> list[str]:
    line = []
    if options.port is not None:
        line += ["-p", str(options.port)]
    if options.identity_file is not None:
        line += ["-i", str(options.identity_file)]
    return line


def kubectl_of(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """How early MPI operators reach the pods, from their kubexec.sh; None where there is none.

    Their script gives the program in the pod no standard input, so it is read, not run.

    Raises:
        LaunchError: The script cannot be read or is of an unknown kind.
    """
    agent = environ.get("OMPI_MCA_plm_rsh_agent", "")
    if not agent.endswith("kubexec.sh"):
        return None
    try:
        text = Path(agent).read_text(encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"OMPI_MCA_plm_rsh_agent names {agent}, which cannot be read: {error}. "
                          "Expected the script that the MPI operator mounts.") from error
    found = _KUBEXEC.search(text)
    if found is None:
        raise LaunchError(f"{agent} holds no line `kubectl exec ${{POD_NAME}} ...`. Expected the "
                          "script of the MPI operator; unset OMPI_MCA_plm_rsh_agent to use ssh.")
    options = ("--container", found["container"]) if found["container"] else ()
    return (found["kubectl"], *options)
