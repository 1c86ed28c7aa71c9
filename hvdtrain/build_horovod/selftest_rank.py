"""One rank of the self-test, started by path in the target environment; checks values.

Not imported by the package. Rank 0 prints one line `SELF-TEST OK ...`; a wrong value ends it.
"""

from __future__ import annotations

import os
from typing import Any


def check(what: str, found: Any, expected: list[float]) -> None:
    """Exit with the difference if a result is wrong."""
    values = [round(float(value), 4) for value in found.numpy().ravel().tolist()]
    if values != expected:
        raise SystemExit(f"self-test: {what} gave {values}, but must give {expected}")


def check_fused(tf: Any, hvd: Any, rank: int) -> None:
    """Twenty tensors of different sizes in one group inside a `tf.function`, three times."""
    variables = [tf.Variable(tf.fill([size], float(rank))) for size in range(1, 21)]

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        gradients = [variable * (index + 1.0) for index, variable in enumerate(variables)]
        return hvd.grouped_allreduce(gradients, op=hvd.Average)

    for _ in range(3):
        for index, result in enumerate(step()):
            check(f"grouped average {index}", result, [(index + 1) / 2] * (index + 1))


def main() -> None:
    """Run all checks on this rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if hvd.size() != 2:
        raise SystemExit(f"self-test: the world has {hvd.size()} ranks, but must have 2")
    rank, where, gpus = hvd.rank(), "/CPU:0", tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:  # one for each rank
        where = "/GPU:0"
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    with tf.device(where):
        mine = tf.constant([float(rank + 1)] * 3)
        check("sum", hvd.allreduce(mine, op=hvd.Sum, name="sum"), [3.0] * 3)
        check("average", hvd.allreduce(mine, op=hvd.Average, name="avg"), [1.5] * 3)
        half = tf.cast(mine, tf.float16)
        check("fp16 sum", hvd.allreduce(half, op=hvd.Sum, name="half"), [3.0] * 3)
        check("broadcast", hvd.broadcast(mine, root_rank=1, name="bc"), [2.0] * 3)
        part = tf.fill([rank + 1, 1], rank)
        check("uneven allgather", hvd.allgather(part, name="gather"), [0.0, 1.0, 1.0])
        check_fused(tf, hvd, rank)
    if rank == 0:
        print(f"SELF-TEST OK TensorFlow {tf.__version__} on {where}", flush=True)  # noqa: T201
    hvd.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
