"""`hvdtrain plan`: measures a job here, and predicts its steps on other ranks and networks.

Loads no TensorFlow: `job_profile.py`, `exchange_probe.py` and `short_job.py` run as processes. The
model is in `predict.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvdtrain.bench import predict
from hvdtrain.bench.measure import read_lines, read_series
from hvdtrain.bench.options import PlanOptions, bits_per_s
from hvdtrain.bench.plan import Point
from hvdtrain.bench.predict import Prediction
from hvdtrain.bench.profile import Cluster, ExchangeCost, Profile, ServerCost, Transfer
from hvdtrain.bench.report import ReportTable, bytes_text, number
from hvdtrain.bench.usage import USAGE_VARIABLE
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.job import SHORT_JOB_VARIABLE
from hvdtrain.process import FinishedProgram, answer_in, run_program

_PROGRAM = (sys.executable, "-m", "hvdtrain")
_LIMIT_S = 600.0
_WARM_STEPS = 3
_LAST_LINES = 12
_MS = 1e3

Say = Callable[[str], None]


def forecast(options: PlanOptions, environ: Mapping[str, str],
             say: Say) -> tuple[Profile, list[Prediction]]:
    """Measure, or read what was measured, and predict each engine on each cluster.

    ConfigError if the profile is of another job; LaunchError if a measuring program fails.
    """
    profile = _profile(options, environ, say)
    engines = [engine for engine in options.engines if engine == "allreduce" or profile.servers]
    return profile, [predict.ENGINES[engine](profile, cluster, options.servers)
                     for cluster in options.clusters for engine in engines]


def _profile(options: PlanOptions, environ: Mapping[str, str], say: Say) -> Profile:
    path = options.profile
    if path is None or not path.exists():
        profile = measure(options, environ, say)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"job": options.job, **asdict(profile)}, indent=1) + "\n")
        return profile
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        job = told.pop("job")
        profile = profile_from(told)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"--profile {path} cannot be used ({error}). Expected a file that "
                          "hvdtrain plan has written; remove it to measure anew.") from error
    if job != options.job or options.batch_per_rank not in (None, profile.batch):
        raise ConfigError(f"--profile {path} is of {job} with {profile.batch} samples per rank. "
                          "Give another file, or remove it to measure anew.")
    return profile


def profile_from(told: Mapping[str, Any]) -> Profile:
    """A profile from its JSON values."""
    return Profile(**{**told, "transfers": tuple(Transfer(**one) for one in told["transfers"]),
                      "exchange": {name: ExchangeCost(**one)
                                   for name, one in told["exchange"].items()},
                      "servers": ServerCost(**told["servers"]) if told["servers"] else None})


def measure(options: PlanOptions, environ: Mapping[str, str], say: Say) -> Profile:
    """One rank with several batches; two ranks that exchange; a worker and a server."""
    env, clusters = {"TF_CPP_MIN_LOG_LEVEL": "2", **environ}, options.clusters
    host_cores = len(os.sched_getaffinity(0))
    cores = options.cores or max(1, host_cores // max(one.ranks_per_host for one in clusters))
    if cores > host_cores:
        raise ConfigError(f"--cores is {cores}, but this host has {host_cores}. Measure on a host "
                          "that has as many as a rank will have.")
    # Ranks of a host take memory bandwidth from each other, so that as many are measured at once.
    # Each would need a GPU of its own.
    copies = 1 if any(Path("/dev").glob("nvidia[0-9]*")) else min(
        max(one.ranks_per_host for one in clusters), host_cores // cores)
    say(f"measuring {options.job} on one rank with {cores} of {host_cores} cores"
        f"{f', {copies} of them at once' if copies > 1 else ''}")
    with ThreadPoolExecutor(copies) as pool:
        told, *_ = pool.map(lambda place: _answer(
            [sys.executable, "-m", "hvdtrain.bench.job_profile", json.dumps(
                {"job": options.job, "cores": cores, "first_core": place * cores,
                 "seconds": options.seconds, "batch": options.batch_per_rank,
                 "one_host": all(one.hosts == 1 for one in clusters)})], env),
            range(copies))
    exchange, latency_s = {}, 0.0
    for name in sorted({_collective(one) for one in clusters if one.size > 1}
                       if "allreduce" in options.engines else ()):
        say(f"measuring {name} between two ranks of this host")
        found = _answer([*_PROGRAM, "launch", "-np", "2", "--starter", "native", "--",
                         sys.executable, "-m", "hvdtrain.bench.exchange_probe", name], env)
        latency_s = found.pop("latency_s")
        exchange[name] = ExchangeCost(**found)
    servers = None
    if options.has_servers:
        say("measuring a worker and a parameter server on this host")
        try:
            servers = _servers(options, env)
        except LaunchError as error:  # the engine ps does not take every job
            if "allreduce" not in options.engines:
                raise
            say(f"engines with parameter servers are left out. {error}")
    return profile_of(told, rank_cores=cores, cores=host_cores, latency_s=latency_s,
                      exchange=exchange, servers=servers)


def _collective(cluster: Cluster) -> str:
    return "shared-memory" if cluster.hosts == 1 else "horovod-gloo"


def profile_of(told: Mapping[str, Any], *, rank_cores: int, cores: int, latency_s: float,
               exchange: Mapping[str, ExchangeCost], servers: ServerCost | None) -> Profile:
    """The profile from what `job_profile.py` has told of a rank with so many cores of a host."""
    runs = {int(batch): run for batch, run in told["runs"].items()}
    own = runs[told["batch"]]
    fixed_s, sample_s = line_through({batch: run["compute_s"] for batch, run in runs.items()})
    update_s, gap_s, stall_s = (statistics.median(run[name] for run in runs.values())
                                for name in ("update_s", "gap_s", "stall_s"))
    if own["read_s"] > own["compute_s"]:
        stall_s = 0.0  # the step waits for the data, which `read_s` tells
    # As the line through all batches says, which differs a little from what was measured.
    stretch = (fixed_s + sample_s * told["batch"]) / own["compute_s"]
    transfers = (Transfer(**one) for one in own["transfers"])
    return Profile(
        samples=own["samples"], batch=told["batch"], batch_global=told["batch_global"],
        fixed_s=fixed_s, sample_s=sample_s, update_s=update_s, loop_s=gap_s + stall_s,
        read_s=own["read_s"] / told["batch"], cores=cores,
        cores_used=min(own["cores_used"], rank_cores), parameter_bytes=own["parameter_bytes"],
        latency_s=latency_s, exchange=exchange, servers=servers, transfers=tuple(
            replace(one, ready_s=stretch * one.ready_s) for one in transfers))


def line_through(points: Mapping[float, float]) -> tuple[float, float]:
    """Least squares: the value at 0, not below 0, and the slope, not below 0 either."""
    xs, ys = list(points), list(points.values())
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((one - x) ** 2 for one in xs)
    slope = sum((a - x) * (b - y) for a, b in points.items()) / spread if spread else 0.0
    slope = min(max(0.0, slope), y / x)
    return y - slope * x, slope


def _servers(options: PlanOptions, env: Mapping[str, str]) -> ServerCost:
    """A chief, a worker and a server for some steps."""
    # The output folder is on the disk that all processes share.
    with tempfile.TemporaryDirectory(prefix=".hvdtrain-plan-") as name:
        folder = Path(name)
        settings = ["--batch-per-rank", str(options.batch_per_rank)] \
            if options.batch_per_rank else []
        _finished([*_PROGRAM, "launch", "-np", "3", "--starter", "native", "fit",
                   "hvdtrain.bench.short_job", "--engine", "ps", "--ps-mode", "sync", "--ps", "1",
                   "--output", str(folder / "train"), "--no-tensorboard", *settings],
                  {**env, USAGE_VARIABLE: str(folder / "usage"), SHORT_JOB_VARIABLE: json.dumps(
                      {"job": options.job, "folder": name, "seconds": options.seconds,
                       "steps": 4 * _WARM_STEPS})})
        ends = json.loads((folder / "steps-0.json").read_text())
        begin, end = ends[0][min(_WARM_STEPS, len(ends[0])) - 1], ends[-1][-1]
        steps = sum(moment > begin for epoch in ends for moment in epoch)
        usage = {path.stem.rstrip("0123456789"): read_series(read_lines(path))
                 for path in (folder / "usage").glob("*.jsonl")}

        def cpu_s(*names: str) -> float:
            series = next(usage[name] for name in names if name in usage)
            spent_s = series.at("cpu_s", end) - series.at("cpu_s", begin)
            return float(spent_s / steps)
        return ServerCost(step_s=step_s(ends), worker_cpu_s=cpu_s("worker"),
                          server_cpu_s=cpu_s("server", "ps"), chief_cpu_s=cpu_s("chief"))


def step_s(ends: Sequence[Sequence[float]]) -> float:
    """The mean time of a step from the ends of the steps of each epoch, without the first ones."""
    kept = [ends[0][_WARM_STEPS - 1:], *ends[1:]]
    spans = [b - a for epoch in kept for a, b in zip(epoch, epoch[1:], strict=False)]
    return statistics.fmean(spans)


def _finished(command: Sequence[str], env: Mapping[str, str]) -> FinishedProgram:
    done = run_program(command, env=env, limit_s=_LIMIT_S)
    if done.code:
        said = "\n".join(done.text.strip().splitlines()[-_LAST_LINES:])
        raise LaunchError(f"Measuring failed (exit code {done.code}). The command was: "
                          f"{' '.join(command)}. Its last lines:\n{said}")
    return done


def _answer(command: Sequence[str], env: Mapping[str, str]) -> Any:
    done = _finished(command, env)
    found = answer_in(done.out)
    if found is None:
        raise LaunchError(f"{' '.join(command)} told nothing. Its last line: {done.last_line}")
    return found


def predicted_s(engine: str, point: Point, profile: Profile) -> float | None:
    """A step of an engine of `hvdtrain compare` on virtual hosts, where it can be predicted."""
    name = {"allreduce-gloo": "allreduce"}.get(engine, engine)
    served = name.startswith("ps")
    if (name not in predict.ENGINES or point.rate is None
            or (served and (point.servers_on != "apart" or profile.servers is None))):
        return None
    cluster = Cluster(hosts=point.workers, ranks_per_host=1, one_machine=True,
                      bits_per_s=bits_per_s(point.rate))
    return predict.ENGINES[name](profile, cluster, point.servers).step_s


def table_of(predictions: Sequence[Prediction]) -> ReportTable:
    """One row for each engine on each cluster."""
    return ReportTable(
        "Predicted", ("on", "ranks", "engine", "batch per rank", "ms per step", "samples/s",
                      "efficiency", "s per epoch", "bound", "its ms"),
        tuple((one.cluster.text, f"{one.cluster.size:,}", one.engine, number(one.batch),
               number(_MS * one.step_s), number(one.cluster.size * one.batch / one.step_s),
               f"{100 * one.efficiency:.0f} %", number(one.epoch_s), one.bound,
               number(_MS * one.bound_s)) for one in predictions))


def measured_lines(profile: Profile) -> Iterator[str]:
    """What was measured, for a reader."""
    batch = profile.batch
    buckets = ", ".join(
        f"{bytes_text(one.size)} after {number(_MS * one.ready_s)} ms" for one in profile.transfers)
    yield (f"one rank, {batch} samples per batch: {number(_MS * profile.single_s(batch))} ms per "
           f"step; forward and backward {number(_MS * profile.fixed_s)} + {batch} x "
           f"{number(_MS * profile.sample_s)} ms, update {number(_MS * profile.update_s)} ms, "
           f"between steps {number(_MS * profile.loop_s)} ms; reading "
           f"{number(_MS * profile.read_s * batch)} ms; {profile.cores_used:.1f} of "
           f"{profile.cores} cores used")
    yield f"gradients: {buckets or 'none are exchanged'}"
    for name, cost in profile.exchange.items():
        yield (f"{name}: {number(_MS * cost.fixed_s)} ms and {number(1e9 * _MS * cost.byte_s)} ms "
               "per GB")
    if (serving := profile.servers) is not None:
        yield (f"parameter server: {number(_MS * serving.step_s)} ms per step of one worker; "
               f"processor {number(_MS * serving.worker_cpu_s)} ms of the worker, "
               f"{number(_MS * serving.server_cpu_s)} ms of the server")


def as_json(profile: Profile, predictions: Sequence[Prediction]) -> str:
    """All of it as one document."""
    return json.dumps({"profile": asdict(profile), "predictions": [
        {**asdict(one), "cluster": one.cluster.text, "ranks": one.cluster.size}
        for one in predictions]}, indent=1)
