"""The examination: asks every host, then judges. What is asked in which order stands here."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from hvdtrain.doctor.allreduce import check_allreduce
from hvdtrain.doctor.facts import facts_from_json
from hvdtrain.doctor.finding import Finding, failed, warning
from hvdtrain.doctor.judge.devices import DEVICES
from hvdtrain.doctor.judge.network import (
    judge_clock,
    judge_interface,
    judge_ports,
    judge_reached,
    unreached,
)
from hvdtrain.doctor.judge.slurm import SLURM
from hvdtrain.doctor.judge.software import SOFTWARE, too_old_python
from hvdtrain.doctor.judge.together import (
    judge_directory,
    judge_job_files,
    judge_same_code,
    judge_same_versions,
)
from hvdtrain.doctor.judge.view import HostView
from hvdtrain.doctor.mesh import addresses_of, targets_of
from hvdtrain.doctor.options import DoctorOptions
from hvdtrain.doctor.session import HostSession, HostSilentError
from hvdtrain.hosts import Host
from hvdtrain.launch.commands import local_hosts
from hvdtrain.launch.facts import gather_facts
from hvdtrain.launch.remote_shell import kubectl_of

T = TypeVar("T")
Say = Callable[[str], None]

START_LIMIT_S, FACTS_LIMIT_S, ANSWER_LIMIT_S = 30.0, 90.0, 15.0
_CLOCK_ROUNDS = 5
_AT_ONCE = 64
_PEERS = 3
"""Some names may not be known to a host; looking up each of many would take long."""
# What of this environment the ranks of other hosts will have, and what matters here.
_SENT = ("HOME", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "SLURM_CONF")
_SENT_BEGINNINGS = ("PYTHON", "KERAS_", "HVDTRAIN_", "HOROVOD_", "NCCL_", "TF_")
_DEFAULT_OUTPUT = "runs"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found."""

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float


def examine(options: DoctorOptions, environ: Mapping[str, str], say: Say) -> Report:
    """Examine this host, or the hosts that were named, within limits of time.

    Args:
        options: What was asked for.
        environ: The environment of this process.
        say: Takes a line about what is going on.

    Raises:
        ConfigError: The hosts cannot be read.
    """
    began = time.monotonic()
    hosts = options.read_hosts()
    with Round(options, hosts, environ) as asked:
        say(f"asking {', '.join(asked.sessions)}")
        asked.ask_facts()
        asked.ask_clocks()
        findings = asked.judge_all()
    if options.allreduce:
        say("two ranks reduce known values; importing TensorFlow takes 5 to 15 s")
        findings.append(check_allreduce(asked.rank_views(), findings, options, environ))
    return Report(hosts=tuple(asked.sessions), findings=tuple(findings),
                  seconds=time.monotonic() - began)


@dataclass
class Round:
    """One round of questions to all hosts. A context manager: its end ends the probes."""

    options: DoctorOptions
    hosts: Sequence[Host]
    environ: Mapping[str, str]
    sessions: dict[str, HostSession] = field(default_factory=dict)
    views: dict[str, HostView] = field(default_factory=dict)
    lost: dict[str, Finding] = field(default_factory=dict)
    """Hosts that gave no answer."""
    launcher: str | None = None
    """This host, where it is none of those that take ranks."""

    def __post_init__(self) -> None:
        """Make a session for each host, and one for this host in any case."""
        names = [host.name for host in self.hosts]
        own = os.uname().nodename
        here = local_hosts(gather_facts(names))
        self.token = uuid.uuid4().hex
        self.remote = replace(self.options.remote, kubectl=kubectl_of(self.environ))
        if not here & set(names):
            names.append(own)
            here |= {own}
            self.launcher = own if self.hosts else None
        self.sessions = {name: HostSession(name, None if name in here else self.remote)
                         for name in names}

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.sessions.values():
            session.close()

    def rank_views(self) -> list[HostView]:
        """The hosts that take ranks and answered."""
        return [view for name, view in self.views.items() if name != self.launcher]

    def ask_facts(self) -> None:
        """Start the probes and take their facts."""
        for name, view in self._each(self._facts_of, list(self.sessions)).items():
            if isinstance(view, HostView):
                self.views[name] = view
            else:
                self.lost[name] = view

    def ask_clocks(self) -> None:
        """Measure the clocks of the other hosts."""
        others = [name for name, view in self.views.items() if not view.is_local]
        for name, view in self._each(self._clock_of, others).items():
            if isinstance(view, HostView):
                self.views[name] = view
            else:
                self._lose(name, view)

    def judge_all(self) -> list[Finding]:
        """All findings but that of the allreduce."""
        ports, folders = self._judge_ports(), self._judge_folders()
        views = self.rank_views()
        findings = list(self.lost.values())
        for view in self.views.values():
            findings += judge_reached(view)
        for judge in (*SOFTWARE, *DEVICES, *SLURM):
            findings += [finding for view in views for finding in judge(view)]
        findings += [judge_interface(view, self.options.network_interface,
                                     several=len(self.views) > 1) for view in views]
        findings += ports
        findings += [finding for view in self.views.values() for finding in judge_clock(view)]
        findings += judge_same_versions(views)
        findings += judge_same_code(list(self.views.values()))
        return findings + folders

    def _facts_of(self, name: str) -> HostView | Finding:
        session = self.sessions[name]
        peers = [other for other in self.sessions if other != name][:_PEERS]
        began = time.monotonic()
        session.start()
        first = session.ask("clock", limit_s=START_LIMIT_S)
        answer_s = time.monotonic() - began
        if "too_old" in first:
            return too_old_python(name, first["too_old"])
        told = session.ask("facts", limit_s=FACTS_LIMIT_S, token=self.token, peers=peers,
                           directory=os.getcwd(), env=self._sent_env(session))
        slots = next((host.slots for host in self.hosts if host.name == name), None)
        return HostView(name=name, facts=facts_from_json(told), slots=slots,
                        is_local=session.is_local, answer_s=answer_s, noise=tuple(session.noise))

    def _sent_env(self, session: HostSession) -> dict[str, str]:
        if session.is_local:
            return {}
        return {name: value for name, value in self.environ.items()
                if name in _SENT or name.startswith(_SENT_BEGINNINGS)}

    def _clock_of(self, name: str) -> HostView:
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_ROUNDS):
            asked = time.time()
            told = self.sessions[name].ask("clock", limit_s=ANSWER_LIMIT_S)["time"]
            error_s = (time.time() - asked) / 2
            if best is None or error_s < best[0]:
                best = error_s, told - asked - error_s
        error_s, offset_s = best or (0.0, 0.0)
        return replace(self.views[name], clock_offset_s=offset_s, clock_error_s=error_s)

    def _judge_ports(self) -> list[Finding]:
        addresses = addresses_of(list(self.views.values()), self.options.network_interface)
        targets = {name: targets_of(view, list(self.views.values()), addresses, self.launcher)
                   for name, view in self.views.items()}

        def connect(name: str) -> dict[str, str]:
            answer = self.sessions[name].ask("connect", limit_s=ANSWER_LIMIT_S, token=self.token,
                                             targets=targets[name])
            return {str(host): str(problem) for host, problem in answer.items()}

        results = self._each(connect, [name for name, some in targets.items() if some])
        answers = {}
        for name, result in results.items():
            if isinstance(result, Finding):
                self._lose(name, result)
            else:
                answers[name] = result
        return judge_ports(answers, addresses)

    def _judge_folders(self) -> list[Finding]:
        """Whether the directory, and the output folder, are one folder on all hosts."""
        findings: list[Finding] = []
        folders = {"directory": Path.cwd()}
        output = _existing(self.options.output or Path(_DEFAULT_OUTPUT))
        if self.options.output is not None or output.name == _DEFAULT_OUTPUT:
            folders["output"] = output
        views = list(self.views.values())
        for what, folder in folders.items():
            file = folder / f".hvdtrain-doctor-{self.token}"
            try:
                file.write_text(self.token, encoding="utf-8")
            except OSError as error:
                findings.append(warning(
                    what, os.uname().nodename, f"{folder} cannot be written: {error.strerror}",
                    expected="a folder for checkpoints and logs",
                    fix=f"chown {os.geteuid()} {folder}   (or start from another folder)"))
                continue
            try:
                seen = self._seen(str(file))
            finally:
                file.unlink(missing_ok=True)
            findings += judge_directory(views, seen, what=what, path=str(folder))
            if what == "directory":
                own = next((view.facts.directory.code_hash for view in views
                            if view.is_local and view.facts.directory is not None), "")
                findings += judge_job_files(views, seen, own=own, path=str(folder))
        return findings

    def _seen(self, file: str) -> dict[str, bool | None]:
        def ask(name: str) -> bool:
            answer = self.sessions[name].ask("file", limit_s=ANSWER_LIMIT_S, token=self.token,
                                             paths=[file])
            return bool(answer[file])

        others = [name for name, view in self.views.items() if not view.is_local]
        seen: dict[str, bool | None] = {}
        for name, result in self._each(ask, others).items():
            if isinstance(result, Finding):
                self._lose(name, result)
            else:
                seen[name] = result
        return seen

    def _lose(self, name: str, finding: Finding) -> None:
        """A host that answered at first and then no more."""
        self.lost.setdefault(name, failed(
            finding.check, name, f"it answered, and then no more: {finding.found}",
            expected=finding.expected, fix=finding.fix))

    def _each(self, question: Callable[[str], T], names: Sequence[str]
              ) -> dict[str, T | Finding]:
        """Put a question to several hosts at once; a finding for each that does not answer."""
        def put(name: str) -> T | Finding:
            session = self.sessions[name]
            try:
                return question(name)
            except HostSilentError as error:
                return unreached(name, error.code, error.words,
                                 None if session.is_local else self.remote)

        pool = ThreadPoolExecutor(max_workers=_AT_ONCE)
        try:
            running = {name: pool.submit(put, name) for name in names}
            return {name: future.result() for name, future in running.items()}
        except BaseException:
            for session in self.sessions.values():  # their threads wait for an answer
                session.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
