"""From facts to findings of hosts together: ssh, network, clocks, versions, folders, two ranks.

Pure, except that host names are looked up.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hvdtrain.doctor.findings import (
    ALL_HOSTS,
    Finding,
    HostView,
    failed,
    not_applicable,
    ok,
    warning,
)
from hvdtrain.doctor.probe_client import OLDEST_PYTHON, TOO_OLD
from hvdtrain.errors import EXIT_NOT_STARTED, EXIT_RUN_FAILED, LaunchError
from hvdtrain.launch.link import HostFacts, choose_interface, rendezvous_address
from hvdtrain.launch.options import LaunchOptions, RemoteOptions
from hvdtrain.process import ANSWER_MARK, answer_in

MOST_FOR_ALL_PAIRS = 8  # above it, each tries its two neighbors in a ring, as ranks do
_CLOCK_WARNING_S, _CLOCK_FAILED_S = 1.0, 60.0
_NO_WAY = ("Invalid argument", "unreachable", "No route")  # from routing tables, not firewalls
_OTHER = "or use another network: --network-interface NAME"
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
    ("", "ssh -v {port}-o BatchMode=yes {host} true   (is it up, and does the network let ssh "
         "through?)"),
)
_PACKAGES = ("tensorflow", "keras", "horovod")
_ONE_HOST = "no second host to compare with"
_NONE = "not installed"
_SHOWN_LINES = 3


def judge_reached(host: HostView) -> Iterator[Finding]:
    """How a host that answered was reached, and whether its login scripts are quiet."""
    if host.is_local:
        return
    yield ok("ssh", host.name, f"answers in {host.answer_s:.1f} s")
    if host.noise:
        yield warning(
            "login-output", host.name, f"a login script prints: {host.noise[0][:80]}",
            expected="nothing on standard output without a terminal: scp, rsync and MPI's "
                     "daemons break on it",
            fix="echo 'case $- in *i*) ;; *) return;; esac' | cat - ~/.bashrc > ~/.bashrc.new && "
                f"mv ~/.bashrc.new ~/.bashrc   (on {host.name})")


def judge_silent(host: str, code: int | None, words: str,
                 remote: RemoteOptions | None) -> Finding:
    """The finding for a host that gave no answer.

    `code` is the exit code of ssh or of the probe (None: killed); `words` are its last output.
    """
    if TOO_OLD in words:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return failed("python", host, words, expected=f"{wanted} or newer",
                      fix=f"python{wanted} -m venv .venv && .venv/bin/pip install hvdtrain")
    if code == EXIT_RUN_FAILED and "No module named" in words:
        return failed("hvdtrain", host, f"{sys.executable} cannot import it: {words}",
                      expected="hvdtrain, installed for the Python of the ranks",
                      fix=f"{sys.executable} -m pip install hvdtrain   (on {host})")
    if remote is None or code == EXIT_RUN_FAILED:
        return failed("probe", host, words, expected="an answer of the probe",
                      fix=f"hvdtrain doctor   (on {host}; if it is as silent there, the host is "
                          "overloaded or its hvdtrain is broken)")
    if code == EXIT_NOT_STARTED and "cannot be started" not in words:
        return failed("python", host, words,
                      expected="this Python at the same path: a shared file system, or the same "
                               "installation on every host",
                      fix=f"rsync -a --relative {sys.prefix} {host}:/")
    port = f"-i {remote.identity_file} " if remote.identity_file is not None else ""
    port += f"-p {remote.port} " if remote.port is not None else ""
    fix = next(text for sign, text in _SSH_FIXES if sign in words)
    return failed("ssh", host, words or "no answer", expected="an answer without a question",
                  fix=fix.format(port=port, host=host))


def _link_facts(host: HostView) -> HostFacts:
    """What `hvdtrain launch` would know of the host; LaunchError where nothing is known."""
    network = host.facts.network
    if network is None:
        raise LaunchError(f"The network of {host.name} could not be looked at: "
                          f"{host.facts.problems.get('network', 'no answer')}")
    return network


def judge_interface(host: HostView, wanted: Sequence[str], *, several: bool) -> Finding:
    """The interfaces of a host, and which one its ranks would use."""
    try:
        facts = _link_facts(host)
        chosen = choose_interface(host.name, facts, wanted) if several or wanted else ""
    except LaunchError as error:
        found, _, expected = str(error).partition(" Expected ")
        names = "ip -brief -4 address"
        return failed("interface", host.name, found,
                      expected=expected.rstrip(".") or "a way to the other hosts",
                      fix=names if host.is_local else f"ssh {host.name} {names}")
    listed = ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items())
    use = f"ranks use {chosen}" if chosen else "ranks of one host use lo"
    return ok("interface", host.name, f"{listed}; {use}")


def addresses_of(views: Sequence[HostView], wanted: Sequence[str]) -> dict[str, str]:
    """The address of each host for its ranks; none for a host without a usable interface."""
    found = {}
    for view in views if len(views) > 1 else ():
        with suppress(LaunchError):  # `judge_interface` reports it
            facts = _link_facts(view)
            found[view.name] = facts.interfaces[choose_interface(view.name, facts, wanted)]
    return found


def targets_of(view: HostView, views: Sequence[HostView], addresses: Mapping[str, str],
               launcher: str | None) -> list[dict[str, Any]]:
    """To whom a host connects: the others, and the rendezvous at the launcher.

    `launcher` is one that takes no ranks, from which nothing must be reached.
    """
    if view.name == launcher:
        return []
    ranks = [other for other in views if other.name != launcher and other.name in addresses]
    partners = ranks
    if len(ranks) > MOST_FOR_ALL_PAIRS and view in ranks:
        at = ranks.index(view)
        partners = [ranks[at - 1], ranks[(at + 1) % len(ranks)]]
    places = {other.name: addresses[other.name] for other in partners
              if other.name != view.name}
    if launcher is not None and not view.is_local:
        with suppress(LaunchError):  # `judge_interface` reports it
            places[launcher] = rendezvous_address(view.name, _link_facts(view))
    ports = {other.name: other.facts.network.port for other in views
             if other.facts.network is not None}
    return [{"host": name, "address": address, "port": ports[name]}
            for name, address in places.items() if name in ports]


def judge_ports(answers: Mapping[str, Mapping[str, str]],
                addresses: Mapping[str, str]) -> list[Finding]:
    """Whether hosts can connect; `answers[from][to]` is "" or the error."""
    tried = sum(len(targets) for targets in answers.values())
    if not tried:
        return [not_applicable("ports", ALL_HOSTS, "no second host to connect to")]
    findings = [
        failed("ports", source, f"cannot connect to {target}: {problem}",
               expected="TCP connections on all ports from 32768 to 60999, both ways",
               fix=(f"ip route get {addresses.get(target, target)}   (on {source}; {_OTHER})"
                    if any(sign in problem for sign in _NO_WAY) else
                    f"iptables -I INPUT -p tcp -s {addresses.get(source, source)} -j ACCEPT   "
                    f"(on {target}; {_OTHER})"))
        for source, targets in answers.items() for target, problem in targets.items() if problem]
    return findings or [
        ok("ports", ALL_HOSTS, f"{tried} connections between {len(answers)} hosts")]


def judge_clock(host: HostView) -> Finding:
    """The clock of another host against this one."""
    offset_s = host.clock_offset_s
    found = (f"{_seconds(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}, within "
             f"{_seconds(host.clock_error_s)}")
    surely_s = abs(offset_s) - host.clock_error_s
    if surely_s <= _CLOCK_WARNING_S:
        return ok("clock", host.name, found)
    make = failed if surely_s > _CLOCK_FAILED_S else warning
    return make("clock", host.name, found, expected=f"at most {_CLOCK_WARNING_S:g} s: logs and "
                "checkpoints are told apart by time",
                fix=f"chronyc makestep   (on {host.name}; install chrony if it is not there)")


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def judge_same_versions(hosts: Sequence[HostView]) -> list[Finding]:
    """Versions that all hosts must share; the host that differs is named."""
    if len(hosts) < 2:
        return [not_applicable("same-versions", ALL_HOSTS, _ONE_HOST)]
    findings, shared = [], []
    for name in ("python", *_PACKAGES):
        values = {host.name: {"python": python.version, **python.packages}.get(name, _NONE)
                  for host in hosts if (python := host.facts.python) is not None}
        usual = _most_common(list(values.values()))
        shared.append(f"{name} {usual}")
        findings += [
            failed("same-versions", host, f"{name} {value}; the others have {usual}",
                   expected=f"the same {name} on every host", fix=_version_fix(name, usual))
            for host, value in values.items() if value != usual]
    return findings or [ok("same-versions", ALL_HOSTS, ", ".join(shared))]


def _version_fix(name: str, version: str) -> str:
    if name == "python":
        return f"uv python install {version}   (or start from one environment on a shared disk)"
    command = ("hvdtrain build-horovod --install" if name == "horovod" else
               f"pip uninstall {name}" if version == _NONE else f"pip install '{name}=={version}'")
    return f"{command}   (on that host)"


def _most_common(values: Sequence[str]) -> str:
    """The first of the most frequent values."""
    return Counter(values).most_common(1)[0][0] if values else ""


def judge_same_code(hosts: Sequence[HostView]) -> list[Finding]:
    """The source of hvdtrain on every host."""
    seen = {host.name: host.facts.python for host in hosts if host.facts.python is not None}
    if len(seen) < 2:
        return [not_applicable("same-code", ALL_HOSTS, _ONE_HOST)]
    usual = _most_common([python.hvdtrain_hash for python in seen.values()])
    model = next(host for host, python in seen.items() if python.hvdtrain_hash == usual)
    findings = [
        failed("same-code", host,
               f"hvdtrain in {python.hvdtrain_at} is {python.hvdtrain_hash}, on {model} it is "
               f"{usual}", expected="the same source of hvdtrain on every host",
               fix=f"ssh {model} rsync -a --delete {shlex.quote(seen[model].hvdtrain_at)}/ "
                   f"{host}:{shlex.quote(python.hvdtrain_at)}/")
        for host, python in seen.items() if python.hvdtrain_hash != usual]
    return findings or [ok("same-code", ALL_HOSTS, f"hvdtrain {usual}")]


def judge_directory(hosts: Sequence[HostView], seen: Mapping[str, bool],
                    *, what: str, path: str) -> list[Finding]:
    """Whether a folder of this host is the same on the others; `seen` says which have its new file.

    `what` is the name of the check, `directory` or `output`.
    """
    others = [host for host in hosts if host.name in seen]
    if not others:
        return [ok(what, ALL_HOSTS, f"{path} can be written")]
    findings, quoted = [], shlex.quote(path)
    for host in others:
        there = host.facts.directory
        if what == "directory" and there is not None and not there.exists:
            findings.append(failed(
                what, host.name, f"{path} does not exist there",
                expected="the directory in which the ranks are to run",
                fix=f"rsync -a --mkpath {quoted}/ {host.name}:{quoted}/"))
        elif not seen[host.name]:
            findings.append(warning(
                what, host.name, f"{path} is another folder there",
                expected="a shared file system: rank 0 writes the checkpoints, and a job that "
                         "goes on on other hosts needs them",
                fix="mount a shared file system there, or keep rank 0 on one host and copy: "
                    f"rsync -a {quoted}/ {host.name}:{quoted}/"))
    return findings or [ok(what, ALL_HOSTS, f"{path} is shared by {len(others) + 1} hosts")]


def judge_job_files(hosts: Sequence[HostView], seen: Mapping[str, bool], *, own: str,
                    path: str) -> list[Finding]:
    """Programs and job files in a directory that is not shared; `own` is their hash here."""
    hashes = {host.name: host.facts.directory.code_hash for host in hosts
              if seen.get(host.name) is False and host.facts.directory is not None
              and host.facts.directory.exists}
    if not hashes:
        return [not_applicable("job-files", ALL_HOSTS, "no other host has a copy of its own")]
    findings = [
        warning("job-files", host, f"the programs and job files in {path} differ",
                expected="the same files as here",
                fix=f"rsync -a {shlex.quote(path)}/ {host}:{shlex.quote(path)}/")
        for host, code_hash in hashes.items() if code_hash != own]
    return findings or [ok("job-files", ALL_HOSTS, f"the same in {path}")]


def judge_allreduce(host: str, code: int, printed: str, request: LaunchOptions) -> Finding:
    """The finding for how the two ranks ended and what they printed."""
    told = answer_in(printed)
    if code == 0 and told:
        # Of a ring each rank sends 2 (n - 1) / n of the bytes.
        moved = 2 * (told["size"] - 1) / told["size"] * told["bytes"]
        return ok("allreduce", host,
                  f"{moved / told['seconds'] / 1e6:.0f} MB/s bus bandwidth: {told['bytes'] >> 20} "
                  f"MiB float32 in {told['seconds'] * 1000:.1f} ms (median of {told['rounds']}) "
                  f"with {told['collective']}, {told['device']}; sums right")
    reached = {"--network-interface": ",".join(request.network_interface),
               "--ssh-identity-file": request.remote.identity_file,
               "--ssh-port": request.remote.port}
    by_hand = ["hvdtrain", "launch",
               *(str(word) for pair in reached.items() if pair[1] for word in pair), "-np", "2",
               "-H", request.hosts or "", "--starter", "native", "-v", "--", *request.command]
    shown = [text for line in printed.splitlines()
             if (text := line.strip()) and ANSWER_MARK not in text][-_SHOWN_LINES:]
    return failed("allreduce", host,
                  f"exit code {code}: {' / '.join(shown) or 'nothing was printed'}",
                  expected="two ranks meet and their sums are right",
                  fix=f"{shlex.join(by_hand)}   (shows all that the ranks print)")
