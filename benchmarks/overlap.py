"""Do gradients travel while the backward pass goes on? Read from Horovod's own timeline.

    python benchmarks/overlap.py [--ranks 2] [--bucket-mb 1]
    python benchmarks/overlap.py --network 1000 [--rounds 5]

Trains a deep perceptron with `--timeline` and looks at each step: the gradients of a bucket are
announced (NEGOTIATE) on the chief when it is complete, and reduced between the begin and the end
of their ALLREDUCE. What is reduced before the last gradient of the step was announced has
travelled while the backward pass went on. Also tells how often each gradient was reduced.

With `--network MBIT` (root only) each rank is on a virtual host (`tests/cluster/hosts.py`) whose
link carries so many Mbit/s, and training in buckets takes turns with training in one bucket, which
can only travel when the backward pass has ended.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from on_hosts import ROOT, virtual_hosts

JOB = """
[model]
name = "mlp"
features = 256
hidden = 1024
depth = 8

[data]
name = "synthetic"
samples = 1280
features = 256

[optimizer]
name = "SGD"

[compile]
loss = "sparse_categorical_crossentropy"

[train]
batch_per_rank = 64
epochs = 3
check_weights = false
"""
STEPS, SKIPPED_STEPS = 30, 5
BUCKET = re.compile(r"hvdtrain\.opt.*\.b\d+(_\d+of\d+)?$")


def timeline(launch, bucket_mb, folder):
    """The events of a run, in order of time."""
    job, path = folder / "deep.toml", folder / "timeline.json"
    job.write_text(JOB)
    launch(["fit", str(job), "--output", str(folder / "out"), "--no-tensorboard",
            "--checkpoint-every-epochs", "0", "--overwrite", "--bucket-mb", str(bucket_mb),
            "--timeline", str(path)])
    text = path.read_text().rstrip().rstrip(",")
    return json.loads(text if text.endswith("]") else text + "]")


def buckets(events):
    """For each tensor of a bucket its announcements and its reductions, in microseconds."""
    names = {e["pid"]: e["args"]["name"] for e in events
             if e.get("name") == "process_name" and "name" in e.get("args", {})}
    announced, reduced, begun = defaultdict(list), defaultdict(list), defaultdict(list)
    for event in events:
        name = names.get(event.get("pid"), "")
        if not BUCKET.search(name):
            continue
        if event["ph"] == "B":
            begun[name].append((event["name"], event["ts"]))
            if event["name"].startswith("NEGOTIATE"):
                announced[name].append(event["ts"])
        elif event["ph"] == "E" and begun[name]:
            what, since = begun[name].pop()
            if what == "ALLREDUCE":
                reduced[name].append((since, event["ts"]))
    return announced, reduced


def figures(events):
    """Of a run: how often gradients were reduced, the share of the time of reductions that lies
    before the last announcement, how many had been reduced by then, and ms per step."""
    announced, reduced = buckets(events)
    steps = min(map(len, announced.values()))
    shares, ahead, lasts = [], [], []
    for step in range(SKIPPED_STEPS, steps):
        last = max(times[step] for times in announced.values())
        spans = [times[step] for times in reduced.values() if len(times) > step]
        total = sum(end - begin for begin, end in spans)
        before = sum(max(0, min(end, last) - begin) for begin, end in spans)
        shares.append(before / total)
        ahead.append(sum(end <= last for _, end in spans))
        lasts.append(last)
    return {"gradients": len(reduced),
            "reductions": sorted({len(times) for times in reduced.values()}),
            "share": statistics.median(shares), "ahead": statistics.median(ahead),
            "ms": statistics.median(b - a for a, b in zip(lasts, lasts[1:], strict=False)) / 1e3}


def show(ranks, found):
    print(f"{ranks} ranks: each of {found['gradients']} gradients was reduced "
          f"{' to '.join(map(str, found['reductions']))} times in {STEPS} updates")
    print(f"{found['share']:.0%} of the time of reductions lies before the last gradient of a step "
          f"was announced; {found['ahead']:g} had been reduced by then (medians of the steps)")


def compare(options, folder):
    """In buckets against in one bucket, on virtual hosts."""
    sides = {"buckets": options.bucket_mb, "one bucket": 1000}
    found = {side: [] for side in sides}
    with virtual_hosts(options.ranks, options.network) as launch:
        for _ in range(options.rounds):
            for side, size in sides.items():
                found[side].append(figures(timeline(
                    lambda words: launch(words, quiet=True), size, folder)))
    for side, runs in found.items():
        print(f"{side}: {statistics.median(one['ms'] for one in runs):.0f} ms per step, "
              f"{statistics.median(one['share'] for one in runs):.0%} of the time of reductions "
              f"before the last announcement, {runs[0]['gradients']} gradients or buckets, "
              f"reduced {runs[0]['reductions']} times in {STEPS} updates")
    ratios = [a["ms"] / b["ms"] for a, b in zip(*found.values(), strict=True)]
    print(f"buckets / one bucket: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
          f"{max(ratios):.2f}), {options.rounds} rounds, {options.network:g} Mbit/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--network", type=float, metavar="MBIT")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # Virtual hosts have a /tmp and a /dev/shm of their own.
    where = ROOT if options.network else None
    with tempfile.TemporaryDirectory(prefix=".overlap-", dir=where) as name:
        folder = Path(name)
        if options.network:
            compare(options, folder)
        else:
            show(options.ranks, figures(timeline(lambda words: subprocess.run(
                [sys.executable, "-m", "hvdtrain", "launch", "-np", str(options.ranks), *words],
                cwd=ROOT, check=True, stdout=subprocess.DEVNULL), options.bucket_mb, folder)))


if __name__ == "__main__":
    main()
