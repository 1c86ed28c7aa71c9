"""How much of a step's computing and of its transfer go on at the same time, on virtual hosts.

    python benchmarks/overlap.py [--hosts 2] [--network 1000 100 10000] [--rounds 3]
    python benchmarks/overlap.py --asleep --hosts 2 3 4          # root only, as above

One rank on each of some hosts (`tests/cluster/hosts.py`), whose links carry so many Mbit/s, trains
a perceptron with 4.5 million parameters, in buckets as `bucket_mb` makes them. Each launch measures
milliseconds (medians) of four functions in turn: the step without reductions (`compute`), its
forward pass, its reductions alone (`transfer`), and the step with them. Launches as they are take
turns with launches `--before`: one thread that starts TensorFlow's operations, buckets of 32 MiB.

Each rank computes with one thread on one core, which Horovod's thread shares. With more ranks than
cores (or to see the network apart from the cores) `--asleep`: in place of computing the passes
sleep, 20 ms forward and 39 ms backward, as with an accelerator.

Printed: the step against the larger of the two, which is 1 where one hides the other wholly; and
the least that it can be. No gradient exists before the forward pass has ended, so the network is
idle until then: (forward + transfer) / larger. And the core works for both: the processor's time
of computing and of the transfer / larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import numpy as np
from on_hosts import virtual_hosts

FEATURES, WIDTH, DEPTH, BATCH = 256, 1024, 5, 96
FORWARD_S, BACKWARD_S = 0.020, 0.039
TURNS = 3


def one_thread(tf):
    """Let TensorFlow start operations with one thread, as before."""
    original = tf.config.threading.set_inter_op_parallelism_threads
    tf.config.threading.set_inter_op_parallelism_threads = lambda _: original(1)


def computing(tf, keras):
    """A model that computes, and functions: its forward pass, and its gradients."""
    model = keras.Sequential([keras.Input((FEATURES,)), *(
        keras.layers.Dense(WIDTH, "relu") for _ in range(DEPTH)), keras.layers.Dense(10)])
    x, y = tf.random.normal([BATCH, FEATURES]), tf.random.uniform([BATCH], 0, 10, tf.int32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients():
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        return tape.gradient(value, model.trainable_variables)
    return model, lambda: loss(y, model(x, training=True)), gradients


def sleeping(tf, variables):
    """As `computing`, of passes that sleep."""
    def asleep(seconds):
        def wait():
            time.sleep(seconds)
            return np.float32(1e-3)
        return tf.numpy_function(wait, [], tf.float32)

    def gradients():
        before, found = asleep(FORWARD_S), []
        for number, variable in enumerate(reversed(variables)):
            if number % 2:  # a kernel; its bias was made just before
                with tf.control_dependencies([before]):
                    before = asleep(2 * BACKWARD_S / len(variables))
            found.append(before * variable)
        return found[::-1]
    return lambda: asleep(FORWARD_S), gradients


def functions(session, tf, keras, options):
    import hvdtrain
    from hvdtrain.optim.reducer import GradientReducer
    reduction = hvdtrain.ReducerOptions(bucket_bytes=(32 << 20) if options.before else None)
    model, forward, gradients = computing(tf, keras)
    if options.asleep:
        forward, gradients = sleeping(tf, model.trainable_variables)
    variables = model.trainable_variables
    plain, ours = keras.optimizers.SGD(0.01), hvdtrain.DistributedOptimizer(
        keras.optimizers.SGD(0.01), options=reduction)
    for optimizer in (plain, ours):
        optimizer.build(variables)
    reducer = GradientReducer(session.collective, "overlap", reduction)
    return {"compute": tf.function(lambda: plain.apply(gradients(), variables)),
            "forward": tf.function(forward),
            "transfer": tf.function(lambda: reducer([tf.convert_to_tensor(v) for v in variables],
                                                    variables, range(len(variables)))),
            "step": tf.function(lambda: ours.apply(gradients(), variables))}


def rank(options):
    """What one rank measures; the chief prints it."""
    place = int(os.environ["HOROVOD_RANK"])
    os.sched_setaffinity(0, {place % os.cpu_count()})
    import keras
    import tensorflow as tf

    import hvdtrain
    if options.before:
        one_thread(tf)
    session = hvdtrain.init(collective="horovod-gloo")
    keras.utils.set_random_seed(1)
    found, measured = {}, functions(session, tf, keras, options)
    for turn in range(TURNS + 1):  # the first one traces
        for name, function in measured.items():
            session.collective.barrier()
            times, cpu = [], time.process_time()
            for _ in range(options.steps):
                begin = time.perf_counter()
                function()
                times.append(1000 * (time.perf_counter() - begin))
            cpu = 1000 * (time.process_time() - cpu) / options.steps
            if turn:
                found.setdefault(name, []).append(statistics.median(times[1:]))
                found.setdefault(f"{name} cpu", []).append(cpu)
    if place == 0:
        sys.stdout.write("RESULT " + json.dumps(
            {name: statistics.median(values) for name, values in found.items()}) + "\n")


def measure(launch, options, *more):
    """The figures of one launch."""
    words = [*(["--asleep"] if options.asleep else []), "--steps", str(options.steps), *more]
    said = launch(["--", sys.executable, __file__, "--rank", *words], quiet=True)
    line = next(line for line in said if "RESULT " in line)
    return json.loads(line.partition("RESULT ")[2])


def show(where, before, after):
    larger = [max(one["compute"], one["transfer"]) for one in after]
    figures = {name: statistics.median(one[name] for one in after) for name in after[0]}
    now = [one["step"] / most for one, most in zip(after, larger, strict=True)]
    ago = [one["step"] / max(one["compute"], one["transfer"]) for one in before]
    speed = [a["step"] / b["step"] for a, b in zip(after, before, strict=True)]
    most = statistics.median(larger)
    print(f"{where}: compute {figures['compute']:.0f} ms (forward {figures['forward']:.0f}), "
          f"transfer {figures['transfer']:.0f}, step {figures['step']:.0f}, before "
          f"{statistics.median(one['step'] for one in before):.0f}", flush=True)
    least = max(most, figures["forward"] + figures["transfer"])
    work = figures["compute cpu"] + figures["transfer cpu"]
    for what, ratios in (("step / larger", now), ("before: step / larger", ago),
                         ("step / step before", speed)):
        print(f"  {what}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
              f"{max(ratios):.2f}), {len(ratios)} rounds")
    print(f"  least: {least / most:.2f} by the network, {work / most:.2f} by the core's "
          f"{work:.0f} ms of work", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--network", type=float, nargs="+", default=[1000], metavar="MBIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each function in each turn")
    parser.add_argument("--asleep", action="store_true")
    parser.add_argument("--before", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    for hosts in options.hosts:
        for mbit in options.network:
            before, after = [], []
            with virtual_hosts(hosts, mbit) as launch:
                for _ in range(options.rounds):
                    before.append(measure(launch, options, "--before"))
                    after.append(measure(launch, options))
            show(f"{hosts} hosts, {mbit:g} Mbit/s", before, after)


if __name__ == "__main__":
    main()
