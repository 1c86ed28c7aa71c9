"""The examination: asks every host, in this order, then judges."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.doctor import judge_together
from hvdtrain.doctor.facts import facts_from_json
from hvdtrain.doctor.findings import DoctorReport, Finding, HostView, not_applicable, warning
from hvdtrain.doctor.judge_host import judge_host
from hvdtrain.doctor.options import DoctorOptions
from hvdtrain.doctor.probe_client import HostSilentError, ProbeClient
from hvdtrain.errors import EXIT_RUN_FAILED, EXIT_SIGNALLED, HvdtrainError
from hvdtrain.launch.execute import launch
from hvdtrain.launch.facts import gather_facts
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan

T = TypeVar("T")

_START_LIMIT_S, _FACTS_LIMIT_S = 30.0, 90.0
_CLOCK_ROUNDS = 5
_AT_ONCE = 64
_PEERS = 3  # a host may not know some names; looking up many takes long
# The part of this environment that ranks on other hosts get and that matters here.
_SENT = ("HOME", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "SLURM_CONF")
_SENT_BEGINNINGS = ("PYTHON", "KERAS_", "HVDTRAIN_", "HOROVOD_", "NCCL_", "TF_")
_DEFAULT_OUTPUT = "runs"

_ALLREDUCE_MODULE = "hvdtrain.doctor.allreduce_probe"
_ALLREDUCE_LIMIT_S, _GRACE_S = 180.0, 3.0
# By Ctrl-C or SIGTERM, which `launch` passes on to the ranks.
_STOPPED = (EXIT_SIGNALLED + signal.SIGINT, EXIT_SIGNALLED + signal.SIGTERM)
# A failure of one of these on a host of the two ranks tells more than the ranks could.
_FIRST = ("ssh", "probe", "python", "hvdtrain", "tensorflow", "tensorflow-loads", "keras",
          "keras-backend", "horovod", "horovod-loads", "interface", "ports", "directory",
          "same-versions")


def examine(options: DoctorOptions, environ: Mapping[str, str],
            say: Callable[[str], None]) -> DoctorReport:
    """Examine this host, or the named ones, in bounded time; `say` takes lines on the progress."""
    began = time.monotonic()
    with contextlib.closing(_Examination(options, environ)) as asked:
        say(f"asking {', '.join(asked.clients)}")
        findings = asked.run()
    if options.allreduce:
        say("two ranks reduce known values; importing TensorFlow takes 5 to 15 s")
        findings.append(check_allreduce(asked.ranks(), findings, options, environ))
    return DoctorReport(hosts=tuple(asked.clients), findings=tuple(findings),
                        seconds=time.monotonic() - began)


class _Examination:
    def __init__(self, options: DoctorOptions, environ: Mapping[str, str]) -> None:
        self._options = options
        self._slots = {host.name: host.slots for host in options.read_hosts()}
        names, own = list(self._slots), os.uname().nodename
        here = gather_facts(names).local_names | {own}
        self._launcher: str | None = None  # this host, if it takes no ranks
        if not here & set(names):
            names.append(own)
            self._launcher = own if self._slots else None
        sent = {name: value for name, value in environ.items()
                if name in _SENT or name.startswith(_SENT_BEGINNINGS)}
        self._token = uuid.uuid4().hex
        self.clients = {name: ProbeClient(name, None if name in here else options.remote, sent)
                        for name in names}
        self._views: dict[str, HostView] = {}
        self._silent: dict[str, Finding] = {}

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def ranks(self) -> list[HostView]:
        """The hosts that take ranks and answered."""
        return [view for name, view in self._views.items() if name != self._launcher]

    def run(self) -> list[Finding]:
        self._views = self._ask_each(self._facts_of, self.clients)
        self._views |= self._ask_each(self._clock_of, self._others())
        views, ranks = list(self._views.values()), self.ranks()
        addresses = judge_together.addresses_of(views, self._options.network_interface)
        targets = {view.name: some for view in views if (some := judge_together.targets_of(
            view, views, addresses, self._launcher))}
        answers: dict[str, Any] = self._ask_each(lambda name: self.clients[name].ask(
            "connect", token=self._token, targets=targets[name]), targets)
        folders = self._judge_folders(views)
        findings = list(self._silent.values())
        for view in views:
            findings += judge_together.judge_reached(view)
        for view in ranks:
            findings += judge_host(view)
            findings.append(judge_together.judge_interface(view, self._options.network_interface,
                                            several=len(views) > 1))
        findings += judge_together.judge_ports(answers, addresses)
        findings += [judge_together.judge_clock(view) for view in views if not view.is_local]
        findings += judge_together.judge_same_versions(ranks)
        return findings + judge_together.judge_same_code(views) + folders

    def _others(self) -> list[str]:
        return [name for name, view in self._views.items() if not view.is_local]

    def _facts_of(self, name: str) -> HostView:
        client = self.clients[name]
        began = time.monotonic()
        client.start()
        client.ask("clock", limit_s=_START_LIMIT_S)
        answer_s = time.monotonic() - began
        peers = [other for other in self.clients if other != name][:_PEERS]
        told = client.ask("facts", limit_s=_FACTS_LIMIT_S, token=self._token, peers=peers,
                          directory=os.getcwd())
        try:
            facts = facts_from_json(told)
        except (TypeError, LookupError, AttributeError) as error:
            raise HostSilentError(EXIT_RUN_FAILED, f"the probe of another hvdtrain answers there "
                                                   f"({error})") from error
        return HostView(name=name, facts=facts, slots=self._slots.get(name),
                        is_local=client.remote is None, answer_s=answer_s,
                        noise=tuple(client.noise))

    def _clock_of(self, name: str) -> HostView:
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            asked = time.time()
            told = self.clients[name].ask("clock")
            error_s = (time.time() - asked) / 2
            rounds.append((error_s, told - asked - error_s))
        error_s, offset_s = min(rounds)
        return replace(self._views[name], clock_offset_s=offset_s, clock_error_s=error_s)

    def _judge_folders(self, views: list[HostView]) -> list[Finding]:
        """Whether the directory, and the output folder, are the same folder on all hosts."""
        findings: list[Finding] = []
        folders = {"directory": Path.cwd()}
        output = (self._options.output or Path(_DEFAULT_OUTPUT)).absolute()
        output = next(path for path in (output, *output.parents) if path.is_dir())
        if self._options.output is not None or output.name == _DEFAULT_OUTPUT:
            folders["output"] = output
        for what, folder in folders.items():
            try:
                seen = self._who_sees(folder / f".hvdtrain-doctor-{self._token}")
            except OSError as error:
                findings.append(warning(
                    what, os.uname().nodename, f"{folder} cannot be written: {error.strerror}",
                    expected="a folder for checkpoints and logs",
                    fix=f"chown {os.geteuid()} {folder}   (or start from another folder)"))
                continue
            findings += judge_together.judge_directory(views, seen, what=what, path=str(folder))
            if what == "directory":
                own = next((view.facts.directory.code_hash for view in views
                            if view.is_local and view.facts.directory is not None), "")
                findings += judge_together.judge_job_files(views, seen, own=own, path=str(folder))
        return findings

    def _who_sees(self, file: Path) -> dict[str, bool]:
        file.write_text(self._token, encoding="utf-8")
        try:
            return self._ask_each(lambda name: self.clients[name].ask(
                "file", file=str(file), token=self._token), self._others())
        finally:
            file.unlink(missing_ok=True)

    def _ask_each(self, question: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
        """Ask several hosts at once; those that do not answer are left out."""
        pool = ThreadPoolExecutor(max_workers=_AT_ONCE)
        answers = {}
        try:
            running = {name: pool.submit(question, name) for name in names}
            for name, future in running.items():
                try:
                    answers[name] = future.result()
                except HostSilentError as error:
                    silent = judge_together.judge_silent(
                        name, error.code, error.words, self.clients[name].remote)
                    if name in self._views:
                        silent = replace(
                            silent, found=f"it answered, and then no more: {silent.found}")
                    self._silent.setdefault(name, silent)
        except BaseException:
            for client in self.clients.values():  # their threads wait for an answer
                client.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return answers


def check_allreduce(views: Sequence[HostView], findings: Sequence[Finding],
                    options: DoctorOptions, environ: Mapping[str, str]) -> Finding:
    """Run it on the first two hosts and judge it, or say why not; SystemExit if told to stop."""
    chosen = views[:2]
    names = [view.name for view in chosen]
    why = obstacle(chosen, findings)
    if why:
        return not_applicable("allreduce", ",".join(names) or "all", f"not run, because {why}")
    request = launch_options(chosen, options)
    printed = io.StringIO()
    try:
        plan = make_plan(request, environ, gather_facts(names))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = launch(plan)
    except HvdtrainError as error:
        code = error.exit_code
        printed.write(str(error))
    if code in _STOPPED:
        raise SystemExit(code)
    return judge_together.judge_allreduce(",".join(names), code, printed.getvalue(), request)


def obstacle(chosen: Sequence[HostView], findings: Sequence[Finding]) -> str:
    """Why starting two ranks would tell nothing new; "" if nothing speaks against it."""
    if not chosen:
        return "no host can be reached"
    names = {view.name for view in chosen}
    for finding in findings:
        if finding.status == "failed" and finding.check in _FIRST and finding.host in names:
            return f"{finding.check} failed on {finding.host}"
    for view in chosen:
        check = view.facts.horovod
        if check is None or not check.ok or not check.gloo:
            return f"Horovod cannot be used with Gloo on {view.name}"
    return ""


def launch_options(chosen: Sequence[HostView], options: DoctorOptions) -> LaunchOptions:
    """One rank on each of two hosts, or two on one."""
    slots = 1 if len(chosen) > 1 else 2
    gpu = chosen[0].facts.gpu
    one_gpu_for_two = slots == 2 and gpu is not None and gpu.count_visible() == 1
    names = [view.name if len(chosen) > 1 or not view.is_local else "localhost" for view in chosen]
    return LaunchOptions(
        command=(sys.executable, "-m", _ALLREDUCE_MODULE), np=2, starter="native",
        timeout_s=_ALLREDUCE_LIMIT_S, grace_s=_GRACE_S,
        hosts=",".join(f"{name}:{slots}" for name in names),
        remote=options.remote, network_interface=options.network_interface,
        env=("CUDA_VISIBLE_DEVICES=-1",) if one_gpu_for_two else ())
