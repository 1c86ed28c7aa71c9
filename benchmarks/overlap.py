"""Do gradients travel while the backward pass goes on? Read from Horovod's own timeline.

    python benchmarks/overlap.py [--ranks 2] [--bucket-mb 1]

Trains a deep perceptron with `--timeline` and looks at each step: the gradients of a bucket are
announced (NEGOTIATE) on the chief when it is complete, and reduced between the begin and the end
of their ALLREDUCE. What is reduced before the last gradient of the step was announced has
travelled while the backward pass went on. Also tells how often each gradient was reduced.
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

ROOT = Path(__file__).resolve().parents[1]
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


def timeline(ranks, bucket_mb, folder):
    """The events of a run, in order of time."""
    job, path = folder / "deep.toml", folder / "timeline.json"
    job.write_text(JOB)
    subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "fit", str(job), "--output",
         str(folder / "out"), "--no-tensorboard", "--checkpoint-every-epochs", "0", "--bucket-mb",
         str(bucket_mb), "--timeline", str(path)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        events = timeline(options.ranks, options.bucket_mb, Path(name))
    announced, reduced = buckets(events)
    steps = min(map(len, announced.values()))
    shares, ahead = [], []
    for step in range(SKIPPED_STEPS, steps):
        last = max(times[step] for times in announced.values())
        spans = [times[step] for times in reduced.values() if len(times) > step]
        total = sum(end - begin for begin, end in spans)
        before = sum(max(0, min(end, last) - begin) for begin, end in spans)
        shares.append(before / total)
        ahead.append(sum(end <= last for _, end in spans))
    counts = sorted({len(times) for times in reduced.values()})
    print(f"{options.ranks} ranks: each of {len(reduced)} gradients was reduced "
          f"{' to '.join(map(str, counts))} times in {STEPS} updates")
    print(f"{statistics.median(shares):.0%} of the time of reductions lies before the last "
          f"gradient of a step was announced; {statistics.median(ahead):g} had been reduced by "
          f"then (medians of {len(shares)} steps)")


if __name__ == "__main__":
    main()
