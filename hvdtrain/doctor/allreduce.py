"""Two ranks that reduce known values, started as `hvdtrain launch` starts any ranks."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.doctor.finding import Finding, failed, not_applicable, ok
from hvdtrain.doctor.judge.devices import visible_gpus
from hvdtrain.doctor.judge.view import HostView
from hvdtrain.doctor.options import DoctorOptions
from hvdtrain.errors import EXIT_SIGNALLED, HvdtrainError
from hvdtrain.launch.execute import launch
from hvdtrain.launch.facts import gather_facts
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan

MARK = "HVDTRAIN-ALLREDUCE "
"""As in `allreduce_probe.py`, which loads TensorFlow's side of the package."""
CHECK = "allreduce"
_MODULE = "hvdtrain.doctor.allreduce_probe"
_LIMIT_S, _GRACE_S = 180.0, 3.0
_SHOWN_LINES = 3
# By Ctrl-C or SIGTERM, which `launch` takes and gives to the ranks.
_STOPPED = (EXIT_SIGNALLED + signal.SIGINT, EXIT_SIGNALLED + signal.SIGTERM)
# A failure of one of these on a host of the two ranks tells more than the ranks could.
_FIRST = ("ssh", "python", "hvdtrain", "tensorflow", "tensorflow-loads", "keras", "keras-backend",
          "horovod", "horovod-loads", "interface", "ports", "directory", "same-versions")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of the two ranks."""

    code: int
    told: Mapping[str, Any] | None = None
    """The line of rank 0."""
    lines: tuple[str, ...] = field(default=())
    """All else that was printed."""


def check_allreduce(views: Sequence[HostView], findings: Sequence[Finding],
                    options: DoctorOptions, environ: Mapping[str, str]) -> Finding:
    """Run it and judge it, or say why it was not run.

    Args:
        views: The hosts that are to take ranks; the first two count.
        findings: What was found so far.
        options: How hosts are reached.
        environ: The environment of this process.

    Raises:
        SystemExit: The doctor was told to stop meanwhile.
    """
    chosen = views[:2]
    name = ",".join(view.name for view in chosen)
    why = obstacle(chosen, findings)
    if why:
        return not_applicable(CHECK, name or "all", f"not run, because {why}")
    request = launch_options(chosen, options)
    try:
        outcome = _run(request, environ)
    except HvdtrainError as error:
        outcome = Outcome(code=error.exit_code, lines=tuple(str(error).splitlines()))
    if outcome.code in _STOPPED:
        raise SystemExit(outcome.code)
    return judge_allreduce(name, outcome, request)


def obstacle(chosen: Sequence[HostView], findings: Sequence[Finding]) -> str:
    """Why two ranks need not be started; "" where nothing speaks against it."""
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
    one_gpu_for_two = slots == 2 and gpu is not None and visible_gpus(gpu) == 1
    names = [view.name if len(chosen) > 1 or not view.is_local else "localhost" for view in chosen]
    return LaunchOptions(
        command=(sys.executable, "-m", _MODULE), np=2, starter="native", timeout_s=_LIMIT_S,
        hosts=",".join(f"{name}:{slots}" for name in names), grace_s=_GRACE_S,
        remote=options.remote, network_interface=options.network_interface,
        env=("CUDA_VISIBLE_DEVICES=-1",) if one_gpu_for_two else ())


def _run(request: LaunchOptions, environ: Mapping[str, str]) -> Outcome:
    names = [part.partition(":")[0] for part in (request.hosts or "").split(",")]
    plan = make_plan(request, environ, gather_facts(names))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = launch(plan)
    told, lines = None, []
    for line in printed.getvalue().splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            told = json.loads(text)
        elif line.strip():
            lines.append(line.strip())
    return Outcome(code=code, told=told, lines=tuple(lines))


def judge_allreduce(host: str, outcome: Outcome, request: LaunchOptions) -> Finding:
    """Pure: the finding for what came of it."""
    told = outcome.told
    if outcome.code == 0 and told is not None:
        # Of a ring each rank sends 2 (n - 1) / n of the bytes.
        moved = 2 * (told["size"] - 1) / told["size"] * told["bytes"]
        return ok(CHECK, host, f"{moved / told['seconds'] / 1e6:.0f} MB/s bus bandwidth: "
                  f"{told['bytes'] >> 20} MiB float32 in {told['seconds'] * 1000:.1f} ms (median "
                  f"of {told['rounds']}) with {told['collective']}, {told['device']}; sums right")
    by_hand = ["hvdtrain", "launch", "-np", "2", "-H", request.hosts or "", "--starter", "native",
               "-v", "--", *request.command]
    if request.remote.port is not None:
        by_hand[2:2] = ["--ssh-port", str(request.remote.port)]
    if request.remote.identity_file is not None:
        by_hand[2:2] = ["--ssh-identity-file", str(request.remote.identity_file)]
    if request.network_interface:
        by_hand[2:2] = ["--network-interface", ",".join(request.network_interface)]
    words = " / ".join(outcome.lines[-_SHOWN_LINES:]) or "nothing was printed"
    return failed(CHECK, host, f"exit code {outcome.code}: {words}",
                  expected="two ranks meet and their sums are right",
                  fix=f"{shlex.join(by_hand)}   (shows all that the ranks print)")
