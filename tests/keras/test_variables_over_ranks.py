"""What is sent, averaged and kept for all ranks, seen from one: the others say the same."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.errors import RanksDifferError
from hvdtrain.optim import ReducerOptions, state


class Echo(SingleCollective):
    """Two ranks; the other one has and says what this one does, but for `says`."""

    size = 2

    def __init__(self, rank=0, says=lambda value: value):
        self.rank, self.says = rank, says
        self.broadcasts = []

    def broadcast_array(self, array, *, root=0):
        self.broadcasts.append(array.nbytes)
        return array if self.rank == root else np.ones_like(array)

    def gather_objects(self, value):
        return [value, self.says(value)]


@pytest.mark.parametrize("rank", [0, 1])
def test_variables_are_broadcast_in_pieces(rank, monkeypatch):
    monkeypatch.setattr(state, "PIECE_BYTES", 64)
    collective = Echo(rank)
    values = [np.zeros((4, 3), "u1"), np.zeros(150, "u1"), np.zeros((), "u1"), np.zeros(63, "u1"),
              np.zeros((0, 2), "u1")]
    variables = [tf.Variable(value) for value in values]
    sent = state.broadcast_variables(variables, collective=collective)
    assert sent == sum(value.nbytes for value in values)
    assert collective.broadcasts == [12, 64, 64, 22, 64]
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, rank, "u1"))


def test_bits_of_every_dtype_are_sent():
    variables = [keras.Variable(np.array([1, 2]), dtype=dtype)
                 for dtype in ("bfloat16", "float16", "float64", "int8", "bool")]
    received = list(state.send_arrays(
        Echo(rank=0), [((2,), keras.backend.standardize_dtype(v.dtype)) for v in variables],
        lambda i: variables[i].numpy(), root=0, keep=False))
    assert received == []
    received = list(state.send_arrays(
        Echo(rank=1), [((2,), keras.backend.standardize_dtype(v.dtype)) for v in variables],
        None, root=0, keep=True))
    assert [a.dtype.name for a in received] == ["bfloat16", "float16", "float64", "int8", "bool"]


def tape_gradient(collective, options):
    v = tf.Variable([1.0, 2.0], name="v")
    with hvdtrain.DistributedGradientTape(collective=collective, options=options) as tape:
        loss = tf.reduce_sum(v * v)
    return tape.gradient(loss, v), tape._reducer


def test_options_with_a_function_have_one_reducer_and_each_its_own_function():
    collective, reducers = Echo(), set()
    for local in (True, False, True):
        seen = []
        gradient, reducer = tape_gradient(collective, ReducerOptions(
            local_variables=lambda v, local=local, seen=seen: seen.append(v.name) or local))
        np.testing.assert_allclose(gradient, [2.0, 4.0])
        assert seen == ["v:0"]
        reducers.add(reducer)
    _, other = tape_gradient(collective, ReducerOptions(op="sum"))
    assert len(reducers) == 1
    assert other not in reducers


def test_what_a_tape_keeps_lives_as_long_as_the_collective():
    collective = Echo()
    gone = weakref.ref(tape_gradient(collective, ReducerOptions())[1])
    assert gone() is tape_gradient(collective, ReducerOptions())[1]
    del collective
    gc.collect()
    assert gone() is None


def model_with_a_local_layer():
    model = keras.Sequential([
        keras.Input((3,)), keras.layers.BatchNormalization(name="shared"),
        keras.layers.Dense(2, name="mine"), keras.layers.BatchNormalization(name="own")])
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), options=ReducerOptions(
        local_variables=lambda v: v.path.endswith(("own/gamma", "own/beta", "mine/kernel"))))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    return model


def test_statistics_beside_local_weights_are_local():
    model = model_with_a_local_layer()
    assert ["/".join(v.path.split("/")[-2:]) for v in state.local_variables(model)] == [
        "mine/kernel", "own/gamma", "own/beta", "own/moving_mean", "own/moving_variance"]
    seen = []

    def says(value):
        seen.append(value)
        return value
    assert state.average_statistics(Echo(says=says), model) == 0
    assert [len(part) for part in seen[0]] == [2, 2]


def test_statistics_of_other_shapes_are_refused():
    with pytest.raises(RanksDifferError, match=r"variable 0: \(\(3,\), 'float32'\) on rank 0"):
        state.average_statistics(
            Echo(says=lambda value: ([((4,), "float32"), value[0][1]], value[1])),
            model_with_a_local_layer())
