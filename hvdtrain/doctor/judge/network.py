"""ssh, interfaces, ports and clocks of the hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hvdtrain.doctor.finding import ALL_HOSTS, Finding, failed, not_applicable, ok, warning
from hvdtrain.doctor.judge.view import HostView
from hvdtrain.errors import EXIT_NOT_STARTED, LaunchError
from hvdtrain.launch.link import HostFacts as LinkFacts
from hvdtrain.launch.network import choose_interface
from hvdtrain.launch.remote_shell import RemoteOptions

_CLOCK_WARNING_S, _CLOCK_FAILED_S = 1.0, 60.0
_NO_WAY = ("Invalid argument", "unreachable", "No route")
"""What the routing table of a host says, not the firewall of another."""
#: What ssh says -> what repairs it; `{port}` is `-p N ` or nothing.
_SSH_FIXES = (
    ("Permission denied", "ssh-copy-id {port}{host}"),
    ("Host key verification failed", "ssh-keygen -R {host}"),
    ("IDENTIFICATION HAS CHANGED", "ssh-keygen -R {host}"),
    ("Could not resolve hostname", "getent hosts {host}   (add it to the DNS or to /etc/hosts)"),
    ("Name or service not known", "getent hosts {host}   (add it to the DNS or to /etc/hosts)"),
    ("Connection refused", "systemctl start ssh   (on {host}; or name its port: --ssh-port N)"),
    ("cannot be started", "apt-get install openssh-client"),
    ("Bad owner or permissions", "chmod 600 ~/.ssh/config"),
    ("UNPROTECTED PRIVATE KEY", "chmod 600 ~/.ssh/id_*"),
)


def judge_reached(host: HostView) -> list[Finding]:
    """How a host that answered was reached, and whether its login scripts are quiet."""
    if host.is_local:
        return []
    findings = [ok("ssh", host.name, f"answers in {host.answer_s:.1f} s")]
    if host.noise:
        findings.append(warning(
            "login-output", host.name, f"a login script prints: {host.noise[0][:80]}",
            expected="nothing on standard output without a terminal: scp, rsync and MPI's "
                     "daemons break on it",
            fix="echo 'case $- in *i*) ;; *) return;; esac' | cat - ~/.bashrc > ~/.bashrc.new && "
                f"mv ~/.bashrc.new ~/.bashrc   (on {host.name})"))
    return findings


def unreached(host: str, code: int | None, words: str, remote: RemoteOptions | None) -> Finding:
    """The finding for a host that gave no answer.

    Args:
        host: String, the host.
        code: Integer, the exit code of ssh or of the probe; None when it had to be given up.
        words: String, what ssh said last.
        remote: How it was to be reached; None for this host.
    """
    if remote is None:
        return failed("probe", host, words, expected="an answer of the probe on this host",
                      fix="hvdtrain doctor   (again; if it stays so, the host is overloaded)")
    if code == EXIT_NOT_STARTED and "cannot be started" not in words:
        return failed("python", host, words,
                      expected="this Python at the same path: a shared file system, or the same "
                               "installation on every host",
                      fix=f"rsync -a --relative {sys.prefix} {host}:/")
    port = f"-p {remote.port} " if remote.port is not None else ""
    identity = f"-i {remote.identity_file} " if remote.identity_file is not None else ""
    fix = next((text for sign, text in _SSH_FIXES if sign in words),
               "ssh -v {port}-o BatchMode=yes {host} true   (is it up, and does the network let "
               "ssh through?)")
    return failed("ssh", host, words or "no answer", expected="an answer without a question",
                  fix=fix.format(port=identity + port, host=host))


def link_facts(host: HostView) -> LinkFacts:
    """What `hvdtrain launch` would know of the host.

    Raises:
        LaunchError: Its network could not be looked at.
    """
    network = host.facts.network
    if network is None:
        raise LaunchError(f"The network of {host.name} could not be looked at: "
                          f"{host.facts.problems.get('network', 'no answer')}")
    return LinkFacts(clock_offset_s=-host.clock_offset_s, interfaces=network.interfaces,
                     own_address=network.own_address, ssh_client=network.ssh_client,
                     ssh_server=network.ssh_server)


def judge_interface(host: HostView, wanted: Sequence[str], *, several: bool) -> Finding:
    """The interfaces of a host, and which one its ranks would use."""
    try:
        facts = link_facts(host)
        chosen = choose_interface(host.name, facts, wanted) if several or wanted else ""
    except LaunchError as error:
        found, _, expected = str(error).partition(" Expected ")
        names = "ip -brief -4 address"
        return failed("interface", host.name, found,
                      expected=expected.rstrip(".") or "a way to the other hosts",
                      fix=names if host.is_local else f"ssh {host.name} {names}")
    listed = ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items())
    use = f"; ranks use {chosen}" if chosen else "; ranks of one host use lo"
    return ok("interface", host.name, listed + use)


def judge_ports(answers: Mapping[str, Mapping[str, str]],
                addresses: Mapping[str, str]) -> list[Finding]:
    """Whether hosts can open connections to each other.

    Args:
        answers: For each host that tried, for each host that it tried: "" or what went wrong.
        addresses: The addresses of the hosts that tried.
    """
    tried = sum(len(targets) for targets in answers.values())
    if not tried:
        return [not_applicable("ports", ALL_HOSTS, "no second host to connect to")]
    findings = [
        failed("ports", source, f"cannot connect to {target}: {problem}",
               expected="TCP connections on all ports from 32768 to 60999, both ways",
               fix=_ports_fix(source, target, problem, addresses))
        for source, targets in answers.items() for target, problem in targets.items() if problem]
    if findings:
        return findings
    return [ok("ports", ALL_HOSTS, f"{tried} connections between {len(answers)} hosts")]


def _ports_fix(source: str, target: str, problem: str, addresses: Mapping[str, str]) -> str:
    other = "or use another network: --network-interface NAME"
    if any(sign in problem for sign in _NO_WAY):
        return f"ip route get {addresses.get(target, target)}   (on {source}; {other})"
    return (f"iptables -I INPUT -p tcp -s {addresses.get(source, source)} -j ACCEPT   (on "
            f"{target}; {other})")


def judge_clock(host: HostView) -> list[Finding]:
    """The clock of another host against this one."""
    if host.is_local:
        return []
    offset = host.clock_offset_s
    found = f"{_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}, " \
            f"within {_seconds(host.clock_error_s)}"
    surely_s = abs(offset) - host.clock_error_s
    if surely_s <= _CLOCK_WARNING_S:
        return [ok("clock", host.name, found)]
    make = failed if surely_s > _CLOCK_FAILED_S else warning
    return [make("clock", host.name, found, expected=f"at most {_CLOCK_WARNING_S:g} s: logs and "
                 "checkpoints are told apart by time",
                 fix=f"chronyc makestep   (on {host.name}; install chrony if it is not there)")]


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"
