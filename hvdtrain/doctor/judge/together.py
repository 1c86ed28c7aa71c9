"""What must be the same on all hosts: versions, code, directory."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from hvdtrain.doctor.facts import PythonFacts
from hvdtrain.doctor.finding import ALL_HOSTS, Finding, failed, not_applicable, ok, warning
from hvdtrain.doctor.judge.view import HostView

_PACKAGES = ("tensorflow", "keras", "horovod")
ONE_HOST = "no second host to compare with"
_NONE = "not installed"


def judge_same_versions(hosts: Sequence[HostView]) -> list[Finding]:
    """Versions that all hosts must share; the host that differs is named."""
    if len(hosts) < 2:
        return [not_applicable("same-versions", ALL_HOSTS, ONE_HOST)]
    seen = {host.name: _versions(host.facts.python) for host in hosts
            if host.facts.python is not None}
    findings, shared = [], []
    for name in ("python", *_PACKAGES):
        values = {host: versions[name] for host, versions in seen.items()}
        usual = most_common(list(values.values()))
        shared.append(f"{name} {usual}")
        findings += [
            failed("same-versions", host, f"{name} {value}; the others have {usual}",
                   expected=f"the same {name} on every host", fix=_fix(name, usual))
            for host, value in values.items() if value != usual]
    return findings or [ok("same-versions", ALL_HOSTS, ", ".join(shared))]


def _versions(python: PythonFacts) -> dict[str, str]:
    return {"python": python.version} | {
        name: python.packages.get(name, _NONE) for name in _PACKAGES}


def _fix(name: str, version: str) -> str:
    if name == "python":
        return f"uv python install {version}   (or start from one environment on a shared disk)"
    if name == "horovod":
        return "hvdtrain build-horovod --install   (on that host)"
    if version == _NONE:
        return f"pip uninstall {name}   (on that host)"
    return f"pip install '{name}=={version}'   (on that host)"


def most_common(values: Sequence[str]) -> str:
    """The value that most have; of several the first."""
    return Counter(values).most_common(1)[0][0] if values else ""


def judge_same_code(hosts: Sequence[HostView]) -> list[Finding]:
    """The source of hvdtrain on every host."""
    seen = {host.name: (host.facts.python.hvdtrain_hash or "", host.facts.python.hvdtrain_at or "")
            for host in hosts if host.facts.python is not None
            and host.facts.python.hvdtrain_hash is not None}
    if len(seen) < 2:
        return [not_applicable("same-code", ALL_HOSTS, ONE_HOST)]
    usual = most_common([digest for digest, _ in seen.values()])
    model = next(host for host, (digest, _) in seen.items() if digest == usual)
    findings = [
        failed("same-code", host, f"hvdtrain in {place} is {digest}, on {model} it is {usual}",
               expected="the same source of hvdtrain on every host",
               fix=f"ssh {model} rsync -a --delete {shlex.quote(seen[model][1])}/ "
                   f"{host}:{shlex.quote(place)}/")
        for host, (digest, place) in seen.items() if digest != usual]
    return findings or [ok("same-code", ALL_HOSTS, f"hvdtrain {usual}")]


def judge_directory(hosts: Sequence[HostView], seen: Mapping[str, bool | None],
                    *, what: str, path: str) -> list[Finding]:
    """Whether a folder of this host is the same folder on the others.

    Args:
        hosts: The hosts.
        seen: For each other host whether the file that was written here was there; None where
            it could not be asked.
        what: String, the name of the check: `directory` or `output`.
        path: String, the folder.
    """
    others = [host for host in hosts if host.name in seen]
    if not others:
        return [ok(what, ALL_HOSTS, f"{path} can be written")]
    findings = []
    for host in others:
        there = host.facts.directory
        if what == "directory" and there is not None and not there.exists:
            findings.append(failed(
                what, host.name, f"{path} does not exist there",
                expected="the directory in which the ranks are to run",
                fix=f"rsync -a --mkpath {shlex.quote(path)}/ {host.name}:{shlex.quote(path)}/"))
        elif not seen[host.name]:
            findings.append(warning(
                what, host.name, f"{path} is another folder there",
                expected="a shared file system: rank 0 writes the checkpoints, and a job that "
                         "goes on on other hosts needs them",
                fix="mount a shared file system there, or keep rank 0 on one host and copy: "
                    f"rsync -a {shlex.quote(path)}/ {host.name}:{shlex.quote(path)}/"))
    return findings or [ok(what, ALL_HOSTS, f"{path} is shared by {len(others) + 1} hosts")]


def judge_job_files(hosts: Sequence[HostView], seen: Mapping[str, bool | None], *, own: str,
                    path: str) -> list[Finding]:
    """Programs and job files in the directory, where it is not shared.

    Args:
        hosts: The hosts.
        seen: As in `judge_directory`.
        own: String, the hash over the files here.
        path: String, the directory.
    """
    apart = [host for host in hosts if host.name in seen and not seen[host.name]
             and host.facts.directory is not None and host.facts.directory.exists]
    findings = [
        warning("job-files", host.name, f"the programs and job files in {path} differ",
                expected="the same files as here",
                fix=f"rsync -a {shlex.quote(path)}/ {host.name}:{shlex.quote(path)}/")
        for host in apart if host.facts.directory is not None
        and host.facts.directory.code_hash != own]
    if findings:
        return findings
    if not apart:
        return [not_applicable("job-files", ALL_HOSTS, "no other host has a copy of its own")]
    return [ok("job-files", ALL_HOSTS, f"the same in {path}")]
