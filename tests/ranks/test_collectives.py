"""The same values over every collective, on two real ranks."""

import numpy as np
import pytest

ALL = [pytest.param(name, marks=pytest.mark.ranks(2, collective=name), id=name)
       for name in ("horovod-gloo", "horovod-mpi", "mpi4py")]


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


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
