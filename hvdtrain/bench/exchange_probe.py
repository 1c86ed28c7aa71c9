"""Program of two ranks: what one collective costs within a host; rank 0 prints it.

Started by `forecast.py` through `hvdtrain launch`; the argument is the name of the collective.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.process import print_answer
from hvdtrain.runtime import guard
from hvdtrain.world.detect import detect_world

SMALL, LARGE = 1 << 10, 4 << 20  # of float32: 4 KiB and 16 MiB
_SECONDS = 1.5
_LEAST, _MOST = 10, 200
_MESSAGES = 300


def times_of(action: Callable[[], object], agree: Callable[[float], float]) -> float:
    """The median of some repetitions, of which all ranks do as many."""
    action()
    began = time.perf_counter()
    action()
    took = agree(time.perf_counter() - began)
    spent = []
    for _ in range(max(_LEAST, min(_MOST, int(_SECONDS / took)))):
        began = time.perf_counter()
        action()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def measure(session: Any) -> dict[str, float]:
    """`ExchangeCost` of `profile.py`, with the latency. All ranks."""
    import numpy as np
    import tensorflow as tf
    collective = session.collective

    def agree(seconds: float) -> float:
        return float(max(collective.gather_objects(seconds)))

    def reducing(count: int) -> Callable[[], object]:
        tensor = tf.ones([count])

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def reduced(value: Any) -> Any:  # as in a step, from a graph
            return collective.reduce([value], name=f"hvdtrain.probe{count}", op="average")[0]
        return lambda: reduced(tensor)[:1].numpy()

    small_s, large_s = (times_of(reducing(count), agree) for count in (SMALL, LARGE))
    source, target = np.ones(LARGE, np.float32), np.empty(LARGE, np.float32)

    def copy() -> None:  # into the collective's memory, divided by the ranks, and out of it
        np.copyto(target, source)
        np.multiply(target, 0.5, out=target)
        np.copyto(source, target)

    byte_s = max(0.0, large_s - small_s) / (4 * (LARGE - SMALL))
    copy_s = times_of(copy, agree) / (4 * LARGE)
    return {"fixed_s": small_s, "byte_s": byte_s, "copy_s": min(copy_s, byte_s),
            "latency_s": latency_s()}


def latency_s() -> float:
    """Half of a round trip of a small message over TCP on the loopback."""
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            while message := connection.recv(64):
                connection.sendall(message)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            spent = []
            for _ in range(_MESSAGES):
                began = time.perf_counter()
                connection.sendall(b"12345678")
                connection.recv(64)
                spent.append(time.perf_counter() - began)
    return statistics.median(spent) / 2


def main() -> None:
    """Connect to the other rank, measure, and print the result on rank 0."""
    with guard.install(detect_world(os.environ), os.environ):
        from hvdtrain.session import init, shutdown
        session = init(collective=sys.argv[1])
        told = measure(session)
        if session.world.is_chief:
            print_answer(told)
        shutdown()


if __name__ == "__main__":
    main()
