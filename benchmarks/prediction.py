"""Predicted against measured step times, on virtual hosts with slow links. Root only.

    python benchmarks/prediction.py --cases mlp_100mbit,mlp_1gbit,deep_1gbit [--hosts 2,3,4]
        [--rounds 3] [--profiles FOLDER]
    python benchmarks/prediction.py --cases deep_1gbit_bound --hosts 2
    python benchmarks/prediction.py --cases deep_one_host --hosts 2,3,4

For each case (a job of this folder, a speed of the links) one rank is measured here as
`hvdtrain plan` does it, and steps are predicted for so many hosts with one rank each; for `ps-sync`
the server has a host of its own, and the chief stands beside the first worker. Then the job is
trained so, over virtual hosts (`tests/cluster/hosts.py`). All of them share the cores of this
machine: the prediction knows it (`Cluster.one_machine`); in `deep_1gbit_bound` each rank is bound
to one core, for as many hosts as there are cores. In `deep_one_host` the ranks share this host.

With `--profiles` what was measured stays in files of this folder, for further calls: a call takes
half a minute for each round, case, engine and number of hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from on_hosts import ROOT, virtual_hosts

BOTH = ("allreduce", "ps-sync")
# The job, Mbit/s (0: ranks of one host), engines, and whether each rank is bound to one core.
CASES = {"mlp_100mbit": ("mlp_100mbit", 100, BOTH, False),
         "mlp_1gbit": ("mlp_1gbit", 1000, BOTH, False),
         "deep_one_host": ("deep_1gbit", 0, BOTH[:1], False),  # engine ps has no bucket_mb
         "deep_1gbit": ("deep_1gbit", 1000, BOTH[:1], False),
         "deep_1gbit_bound": ("deep_1gbit", 1000, BOTH[:1], True)}
FIT = {"allreduce": ["--engine", "allreduce"],
       "ps-sync": ["--engine", "ps", "--ps-mode", "sync", "--ps", "1"]}


def job_of(case):
    return str(ROOT / "benchmarks" / f"{CASES[case][0]}.toml")


@contextmanager
def ranks(count, mbit, servers):
    """A function that runs `hvdtrain launch` with so many ranks, and servers beside them."""
    if not mbit:
        yield lambda words: subprocess.run(
            [sys.executable, "-m", "hvdtrain", "launch", "-np", str(count), *words], cwd=ROOT,
            check=True, stdout=subprocess.DEVNULL)
        return
    slots = [f"host{letter}:1" for letter in "abcdefghi"[:count + servers]]
    if servers:
        slots[0] = "hosta:2"  # with the chief
    with virtual_hosts(count + servers, mbit) as launch:
        yield lambda words: launch(words, quiet=True, slots=",".join(slots))


def measured_s(case, engine, hosts, seconds):
    """The mean time of a step on so many virtual hosts, or ranks of one host."""
    from hvdtrain.bench.forecast import step_s
    from hvdtrain.job import SHORT_JOB_VARIABLE
    _, mbit, _, bound = CASES[case]
    with (tempfile.TemporaryDirectory(prefix=".prediction-", dir=ROOT) as folder,
          ranks(hosts, mbit, engine.startswith("ps")) as launch):
        told = {"job": job_of(case), "folder": folder, "seconds": seconds, "steps": 8,
                "pinned": bound}
        launch(["-x", f"{SHORT_JOB_VARIABLE}={json.dumps(told)}", "fit",
                "hvdtrain.bench.short_job", *FIT[engine], "--no-tensorboard", "--output",
                f"{folder}/train"])
        return step_s(json.loads((Path(folder) / "steps-0.json").read_text()))


def predictions(case, options, folder):
    """The profile of a case, and what it predicts, by engine and hosts."""
    from hvdtrain.bench import predict
    from hvdtrain.bench.forecast import forecast, measured_lines
    from hvdtrain.bench.options import PlanOptions
    from hvdtrain.bench.profile import Cluster
    _, mbit, engines, bound = CASES[case]
    texts = [f"{hosts}x1@{mbit}mbit" if mbit else f"1x{hosts}" for hosts in options.hosts]
    profile, _ = forecast(
        PlanOptions(job=job_of(case), on=tuple(texts), engines=engines,
                    cores=1 if bound else None, profile=folder / f"{case}.json"),
        os.environ, lambda text: None)
    for line in measured_lines(profile):
        print(f"  {line}")
    return {(engine, hosts): predict.ENGINES[engine](
        profile, replace(Cluster.parse(text), one_machine=True), 1)
        for engine in engines for hosts, text in zip(options.hosts, texts, strict=True)}


def run(options, folder):
    errors = []
    for case in options.cases:
        mbit = CASES[case][1]
        print(case, flush=True)
        expected = predictions(case, options, folder)
        found = {at: [] for at in expected}
        for _ in range(options.rounds):
            for (engine, hosts), runs in found.items():
                runs.append(measured_s(case, engine, hosts, options.seconds))
        for (engine, hosts), runs in found.items():
            predicted = expected[engine, hosts]
            ratios = sorted(predicted.step_s / one for one in runs)
            errors.append(statistics.median(ratios))
            where = f"{mbit} Mbit/s, {hosts} hosts" if mbit else f"one host, {hosts} ranks"
            print(f"{where}, {engine}: predicted "
                  f"{1e3 * predicted.step_s:.0f} ms per step (bound: {predicted.bound}), measured "
                  f"{1e3 * statistics.median(runs):.0f} ({1e3 * min(runs):.0f} to "
                  f"{1e3 * max(runs):.0f}), ratio {statistics.median(ratios):.2f} "
                  f"({ratios[0]:.2f} to {ratios[-1]:.2f}); parts in ms: " + ", ".join(
                      f"{part} {1e3 * spent:.0f}" for part, spent in predicted.parts_s.items()),
                  flush=True)
    print(f"ratios of predicted to measured from {min(errors):.2f} to {max(errors):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--hosts", default="2,3,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--profiles", type=Path)
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    options.hosts = list(map(int, options.hosts.split(",")))
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as name:
        run(options, options.profiles or Path(name))


if __name__ == "__main__":
    main()
