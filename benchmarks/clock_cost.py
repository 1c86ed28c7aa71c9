"""What telling where the time goes costs: training with and without the clock in its steps.

    python benchmarks/clock_cost.py
    hvdtrain launch -np 2 -- python benchmarks/clock_cost.py
    python benchmarks/clock_cost.py --alone      # only what it adds to a graph

The two take turns in one process, `--rounds` times, on the jobs of `overhead.py`: `mlp` has steps
of about a millisecond, where the share is largest. Prints the time of a step with the clock
against that without it, as median and range over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

from overhead import hvdtrain_fit, make_data


def alone(rounds):
    """The microseconds that the clock adds to a graph of 0.3 ms: in turn, medians."""
    import tensorflow as tf

    from hvdtrain.collectives.single import SingleCollective
    from hvdtrain.runtime.progress import Progress
    from hvdtrain.train.timing import StepClock
    clock = StepClock(SingleCollective(), Progress())
    weights, x = tf.Variable(tf.random.normal([64, 64])), tf.random.normal([32, 64])

    def step(x):
        for _ in range(6):
            x = tf.tanh(x @ weights)
        return x

    def clocked(x):
        x = step(clock._noted(x))
        clock.gradients_ready([x])
        clock.reduced([x])
        return x
    functions = [tf.function(step), tf.function(clocked)]
    times = []
    for _ in range(rounds):
        took = []
        for function in functions:
            function(x)
            begin = time.perf_counter()
            for _ in range(1000):
                function(x)
            took.append(1000 * (time.perf_counter() - begin))
        times.append(took)
    without, with_clock = (statistics.median(each) for each in zip(*times, strict=True))
    added = [b - a for a, b in times]
    print(f"{without:.0f} microseconds without, {with_clock:.0f} with the clock; added: "
          f"{statistics.median(added):.0f} ({min(added):.0f} to {max(added):.0f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    if options.alone:
        alone(options.rounds)
        return
    import hvdtrain
    from hvdtrain.train.timing import StepClock
    session = hvdtrain.init()
    data = make_data(options.job, options.steps, session.world.size)
    args = (options.job, data, options.steps, options.epochs, session)
    installed = StepClock.installed
    ratios, speeds = [], []
    for number in range(options.rounds):
        rates = {}
        for clock in (True, False) if number % 2 else (False, True):
            StepClock.installed = installed if clock else (
                lambda self, model: contextlib.nullcontext())
            rates[clock] = hvdtrain_fit(*args)
        ratios.append(rates[False] / rates[True])
        speeds.append(1000 / rates[False])
    if session.world.is_chief:
        print(f"{session.world.size} ranks, {session.choice.name}, {options.job}: "
              f"{statistics.median(speeds):.2f} ms per step without; with the clock "
              f"{statistics.median(ratios):.3f} times as long ({min(ratios):.3f} to "
              f"{max(ratios):.3f})")


if __name__ == "__main__":
    main()
