"""The same values over every collective, on two real ranks."""

import os
import subprocess
import sys

import numpy as np
import pytest

from hvdtrain.collective_names import COLLECTIVES

ALL = [pytest.param(name, marks=pytest.mark.ranks(2, collective=name), id=name)
       for name in COLLECTIVES if name != "single"]


@pytest.mark.parametrize("collective", ALL)
def test_the_collective_is_the_one_asked_for(collective, rank_session):
    assert rank_session.collective.name == collective
    assert rank_session.collective.size == 2
    assert rank_session.collective.gather_objects(rank_session.world.rank) == [0, 1]


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_reduce_gives_the_values_and_keeps_the_dtype(collective, dtype, rank_session, tf):
    rank = rank_session.world.rank
    tensors = [tf.constant([rank + 1, 3 * rank], dtype), tf.fill([2, 2], tf.constant(rank, dtype)),
               tf.zeros([0, 3], dtype)]
    for op, first in (("sum", [3, 3]), ("min", [1, 0]), ("max", [2, 3])):
        out = rank_session.collective.reduce(tensors, name=f"t.{dtype}.{op}", op=op)
        np.testing.assert_array_equal(out[0], first)
        assert [t.dtype.name for t in out] == [dtype] * 3
        assert [t.shape.as_list() for t in out] == [[2], [2, 2], [0, 3]]
    if dtype.startswith("float"):
        out = rank_session.collective.reduce(tensors, name=f"t.{dtype}.avg", op="average")
        np.testing.assert_array_equal(out[0], [1.5, 1.5])


@pytest.mark.parametrize("collective", ALL)
def test_one_tensor_alone_is_reduced_too(collective, rank_session, tf):
    out = rank_session.collective.reduce([tf.constant([1.0, 2.0])], name="t.one", op="sum")
    np.testing.assert_array_equal(out[0], [2.0, 4.0])


@pytest.mark.parametrize("collective", ALL)
def test_allgather_takes_uneven_first_axes(collective, rank_session, tf):
    rank = rank_session.world.rank
    part = tf.fill([2 * rank, 3], float(rank))
    out = rank_session.collective.allgather(part, name="t.gather")
    np.testing.assert_array_equal(out, np.ones((2, 3)))


@pytest.mark.parametrize("collective", ALL)
def test_broadcast_carries_every_dtype_bit_for_bit(collective, rank_session, tf):
    rng = np.random.default_rng(rank_session.world.rank)
    for dtype in ("float32", "uint32", "bool", "int8", "float64"):
        mine = (rng.random((5, 3)) * 100).astype(dtype)
        root = (np.random.default_rng(1).random((5, 3)) * 100)
        out = rank_session.collective.broadcast_array(mine, root=1)
        assert out.dtype == mine.dtype
        if dtype == "float32":
            np.testing.assert_array_equal(out, root.astype(dtype))
    half = tf.cast(tf.constant([1.0 + rank_session.world.rank]), tf.bfloat16).numpy()
    assert float(rank_session.collective.broadcast_array(half, root=1)[0]) == 2.0
    empty = rank_session.collective.broadcast_array(np.empty((0, 2), "f4"))
    assert empty.shape == (0, 2)


@pytest.mark.parametrize("collective", ALL)
def test_a_collective_of_constants_is_not_folded(collective, rank_session, tf):
    """TensorFlow folds stock Horovod operations with constant inputs: they run only once."""
    rank, rounds = rank_session.world.rank, 3
    counter = tf.Variable(0.0)

    @tf.function
    def constant_input(x):
        # The static batch size is a constant in this graph.
        size = tf.cast(tf.shape(x)[0], tf.float32)
        counter.assign_add(1.0)
        return rank_session.collective.reduce([size], name="t.fold", op="sum")[0]

    @tf.function
    def answering(x):
        return rank_session.collective.reduce([x], name="t.fold", op="sum")[0]

    # Rank 1 sends another value each time; rank 0 must see it each time.
    got = [float(constant_input(tf.zeros([4, 1]))) if rank == 0
           else float(answering(tf.constant(float(k)))) for k in range(rounds)]
    assert got == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("collective", ALL)
def test_host_objects_of_any_size_are_gathered(collective, rank_session):
    mine = {"rank": rank_session.world.rank, "data": "x" * (1000 * rank_session.world.rank)}
    out = rank_session.collective.gather_objects(mine)
    assert [len(o["data"]) for o in out] == [0, 1000]
    rank_session.collective.barrier()


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("dtype", ["uint16", "float32", "int64"])
def test_alltoall_gives_each_rank_its_part_of_every_tensor(collective, dtype, rank_session, tf):
    rank = rank_session.world.rank

    @tf.function
    def constant_input():  # must not be folded either
        return rank_session.collective.alltoall(
            tf.constant([[rank, 1], [rank, 2], [rank, 3], [rank, 4]], dtype), name="t.parts")
    for _ in range(2):
        out = constant_input()
        assert (out.dtype.name, out.shape.as_list()) == (dtype, [4, 2])
        np.testing.assert_array_equal(
            out, [[0, 2 * rank + 1], [0, 2 * rank + 2], [1, 2 * rank + 1], [1, 2 * rank + 2]])
    eager = rank_session.collective.alltoall(tf.constant([rank, rank], dtype), name="t.eager")
    np.testing.assert_array_equal(eager, [0, 1])


@pytest.mark.parametrize("collective", ALL)
def test_bits_of_sixteen_are_gathered_in_a_graph(collective, rank_session, tf):
    @tf.function
    def gather(value):
        return rank_session.collective.allgather(
            tf.bitcast(tf.cast(tf.fill([2], value), tf.bfloat16), tf.uint16), name="t.bits")
    for value in (-1.5, 0.25):
        out = gather(tf.constant(value + rank_session.world.rank))
        np.testing.assert_array_equal(tf.cast(tf.bitcast(out, tf.bfloat16), tf.float32),
                                      [value, value, value + 1, value + 1])


@pytest.mark.parametrize("collective", [
    each for each in ALL if each.id in ("mpi4py", "shared-memory")])
def test_a_subset_of_ranks(collective, rank_session, tf):
    rank = rank_session.world.rank
    part = rank_session.collective.subset([1])
    assert (part is None) == (rank == 0)
    if part is not None:
        assert (part.rank, part.size) == (0, 1)
        assert part.gather_objects("alone") == ["alone"]
        part.close()
    both = rank_session.collective.subset([1, 0])
    assert (both.rank, both.size) == (rank, 2)
    out = both.reduce([tf.constant([float(rank)])], name="t.both", op="sum")[0]
    np.testing.assert_array_equal(out, [1.0])
    both.close()


@pytest.mark.ranks(2)
def test_a_subset_without_dynamic_process_sets_says_what_to_set(rank_session):
    from hvdtrain.errors import CollectiveError
    assert rank_session.collective.subset([0, 1]) is rank_session.collective
    with pytest.raises(CollectiveError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        rank_session.collective.subset([1])


ON_SUBSETS = """
import sys
import keras, numpy as np, tensorflow as tf
import hvdtrain
session = hvdtrain.init(collective=sys.argv[1])
rank = session.world.rank
pair = session.collective.subset([2, 0])
one = session.collective.subset([1])
mine = pair or one
assert (pair is None) == (rank == 1) and (one is None) == (rank != 1)
assert (mine.rank, mine.size) == {0: (0, 2), 1: (0, 1), 2: (1, 2)}[rank]
assert mine.gather_objects(rank) == ([1] if rank == 1 else [0, 2])
array = mine.broadcast_array(np.array([rank]), root=mine.size - 1)
assert array[0] == (1 if rank == 1 else 2), array
v = keras.Variable([0.0])
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1.0), collective=mine)
optimizer.build([v])
tf.function(lambda g: optimizer.apply([g], [v]))(tf.constant([-float(rank)]))
assert float(v.numpy()[0]) == 1.0, v  # the mean of 0 and 2, and of 1 alone
assert session.collective.gather_objects(rank) == [0, 1, 2]
print("done", flush=True)
"""


@pytest.mark.parametrize("collective", ["horovod-gloo", "shared-memory"])
def test_subsets_reduce_apart_from_each_other(tmp_path, collective):
    program = tmp_path / "on_subsets.py"
    program.write_text(ON_SUBSETS)
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "3", "--timeout", "200", "--",
         sys.executable, str(program), collective], text=True, capture_output=True, check=False,
        env={**os.environ, "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout


@pytest.mark.parametrize("collective", [
    *ALL, *(pytest.param(name, marks=pytest.mark.ranks(3, collective=name), id=f"{name}-3-ranks")
            for name in ("horovod-gloo", "shared-memory"))])
@pytest.mark.parametrize("rows", [1, 40_000])
def test_reduce_scatter_gives_each_rank_its_part_of_the_reduced_tensor(
        collective, rows, rank_session, tf):
    collective, size = rank_session.collective, rank_session.world.size
    rank = rank_session.world.rank
    own = [np.random.default_rng([r, rows]).integers(-99, 99, (rows * size, 3))
           for r in range(size)]
    total = np.sum(own, axis=0)[rank * rows:(rank + 1) * rows]

    @tf.function
    def in_a_graph(x):
        # A constant too: it must not be folded.
        return collective.reduce_scatter(
            [x, tf.ones([size])], name=f"t.scatter.graph.{rows}", op="sum")

    for dtype in ("float32", "float64", "float16"):
        mine = tf.constant(own[rank], dtype)
        (summed,) = collective.reduce_scatter([mine], name=f"t.scatter.{dtype}", op="sum")
        assert summed.dtype == dtype
        np.testing.assert_array_equal(summed, total)
        (mean,) = collective.reduce_scatter([mine], name=f"t.scatter.mean.{dtype}", op="average")
        np.testing.assert_allclose(mean, total / size, rtol=2e-3 if dtype == "float16" else 1e-6)
    for factor in (1.0, 3.0):
        summed, ones = in_a_graph(factor * tf.constant(own[rank], tf.float32))
        np.testing.assert_array_equal(summed, factor * total)
        np.testing.assert_array_equal(ones, [size])
