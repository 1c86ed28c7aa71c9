"""Loops with a `GradientTape` that `hvdtrain run` serves, against the same loop in plain Keras.

The loops stand in this file, which is the script that is scanned.
"""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

TWO = pytest.mark.ranks(2)
THREE = pytest.mark.ranks(3)


def both(function):
    return pytest.mark.parametrize("ranks", [
        pytest.param(2, marks=TWO), pytest.param(3, marks=THREE)])(function)


@contextmanager
def served(session, **config):
    from hvdtrain.config import TrainConfig
    from hvdtrain.script.loops import Loops
    from hvdtrain.script.scan import Scan
    path = Path(__file__)
    loops = Loops(session=session, scan=Scan.of(path, path.parent), config=TrainConfig(**config))
    undo = loops.install()
    try:
        yield loops
    finally:
        undo()


class Training:
    """A script's training, with a model and all that belongs to it."""

    def __init__(self, keras, tf, *, graph=True, layers=()):
        keras.utils.set_random_seed(3)
        self.keras, self.tf = keras, tf
        self.model = keras.Sequential([
            keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), *layers,
            keras.layers.Dense(3)])
        self.optimizer = keras.optimizers.Adam(0.02, global_clipnorm=0.5)
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.loss = keras.metrics.Mean()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.auc = keras.metrics.SparseTopKCategoricalAccuracy(k=2)
        self.step = tf.function(self.one_step) if graph else self.one_step
        self.figures = []

    def one_step(self, x, y):
        with self.tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = self.loss_of(y, logits)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        gradients, _ = self.tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(
            zip(gradients, self.model.trainable_variables, strict=True))
        self.loss.update_state(loss, sample_weight=self.tf.cast(self.tf.shape(x)[0], "float32"))
        self.accuracy.update_state(y, logits)
        return loss

    def train(self, data, validation, epochs=2):
        for _ in range(epochs):
            for metric in (self.loss, self.accuracy, self.auc):
                metric.reset_state()
            for x, y in data:
                self.step(x, y)
            for x, y in validation:
                self.auc.update_state(y, self.model(x))
            self.figures.append([float(metric.result()) for metric in (
                self.loss, self.accuracy, self.auc)])

    def train_by_iterator(self, data, steps):
        taken = iter(data)
        for _ in range(steps):
            x, y = next(taken)
            self.step(x, y)


def numbers(n=50):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 6)).astype("f4")
    return x, (np.abs(x[:, 0] * 3).astype("i4") % 3)


def batches(tf, size, n=50):
    return tf.data.Dataset.from_tensor_slices(numbers(n)).shuffle(n, seed=4).batch(size)


def assert_equal(ours, plain, session, tolerance=2e-6):
    for mine, theirs in zip(ours.model.weights, plain.model.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)
    np.testing.assert_allclose(ours.figures, plain.figures, rtol=1e-5, atol=1e-6)
    assert_same_everywhere(session, ours.model.weights)


@both
@pytest.mark.parametrize(("graph", "size"), [(True, 16), (False, 16), (True, 49), (True, 12)])
def test_a_loop_gives_what_it_gives_on_one_process(graph, size, ranks, rank_session, keras, tf):
    """Of 50 samples the last batch has 2 or 1: then some ranks have none of it."""
    plain = Training(keras, tf, graph=graph)
    plain.train(batches(tf, size), batches(tf, 20, 30))
    with served(rank_session):
        ours = Training(keras, tf, graph=graph)
        ours.train(batches(tf, size), batches(tf, 20, 30))
    assert_equal(ours, plain, rank_session)


@TWO
def test_an_iterator_and_enumerate(rank_session, keras, tf):
    plain = Training(keras, tf)
    plain.train_by_iterator(batches(tf, 16), 3)
    with served(rank_session):
        ours = Training(keras, tf)
        ours.train_by_iterator(batches(tf, 16), 3)
    assert_equal(ours, plain, rank_session)


@TWO
def test_batches_of_each_rank(rank_session, keras, tf):
    plain = Training(keras, tf)
    plain.train(batches(tf, 20), batches(tf, 20, 30))
    with served(rank_session, batch="per_rank"):
        ours = Training(keras, tf)
        ours.train(batches(tf, 10), batches(tf, 20, 30))
    assert_equal(ours, plain, rank_session)


@TWO
def test_what_ranks_have_for_themselves(rank_session, keras, tf):
    """Weights that differ are those of rank 0; dropout differs; statistics are averaged."""
    from hvdtrain.optim import state
    ours = Training(keras, tf, layers=[keras.layers.BatchNormalization(),
                                       keras.layers.Dropout(0.5)])
    first = np.array(ours.model.weights[0])
    if rank_session.world.rank == 1:
        ours.model.set_weights([w + 1 for w in ours.model.get_weights()])
    with served(rank_session):
        ours.train(batches(tf, 16), batches(tf, 20, 30), epochs=1)
    assert_same_everywhere(rank_session, ours.model.weights)
    assert np.abs(np.array(ours.model.weights[0]) - first).max() < 0.5
    seeds = state.seed_variables(ours.model.variables)
    everyone = rank_session.collective.gather_objects([np.array(v) for v in seeds])
    assert len(everyone[0]) == 1
    assert (everyone[0][0] != everyone[1][0]).any()


@TWO
def test_gradients_of_inputs_stay_and_those_without_a_loop_are_refused(rank_session, keras, tf):
    from hvdtrain.errors import ConfigError
    ours = Training(keras, tf, graph=False)
    x, y = numbers(4)
    with served(rank_session):
        variable = tf.Variable(float(rank_session.world.rank))
        with tf.GradientTape() as tape:
            square = variable * variable
        own = float(tape.gradient(square, variable))
        assert rank_session.collective.gather_objects(own) == [0.0, 2.0]
        with pytest.raises(ConfigError, match="gradients that are of this rank alone"):
            ours.one_step(x, y)
        taken = 0
        for batch in batches(tf, 16):
            taken += len(batch[0])
            ours.step(*batch)
            with tf.GradientTape() as tape:
                tape.watch(batch[0])
                square = tf.reduce_sum(batch[0] ** 2)
            np.testing.assert_allclose(tape.gradient(square, batch[0]), 2 * batch[0])
    assert sum(rank_session.collective.gather_objects(taken)) == 50


@TWO
def test_a_loop_that_is_left_is_ended_by_what_follows(rank_session, keras, tf):
    """Statistics become equal, and later steps are not averaged without a word."""
    from hvdtrain.errors import ConfigError
    with served(rank_session) as loops:
        ours = Training(keras, tf, graph=False, layers=[keras.layers.BatchNormalization()])
        for number, batch in enumerate(batches(tf, 16)):
            if number == 2:
                break
            ours.step(*batch)
        whole = sum(len(x) for x, _ in batches(tf, 16))
        assert whole == 50
        loops.settle()
        assert_same_everywhere(rank_session, ours.model.weights)
        x, y = numbers(4)
        with pytest.raises(ConfigError, match="gradients that are of this rank alone"):
            ours.one_step(x, y)


@TWO
def test_a_sequential_that_the_traced_step_builds(rank_session, keras, tf):
    with served(rank_session):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss
        for x, _ in batches(tf, 16):
            step(x, x[:, :3])
    assert_same_everywhere(rank_session, model.weights)


@TWO
def test_it_is_undone(rank_session, keras, tf):
    before = (tf.data.Dataset.__iter__, tf.GradientTape.gradient, keras.optimizers.SGD.apply,
              keras.metrics.Mean.result, keras.metrics.Metric.__init__)
    with served(rank_session):
        keras.metrics.Mean()
        assert keras.metrics.Mean.result is not before[3]
    assert before == (tf.data.Dataset.__iter__, tf.GradientTape.gradient,
                      keras.optimizers.SGD.apply, keras.metrics.Mean.result,
                      keras.metrics.Metric.__init__)
    plain = Training(keras, tf)
    plain.train(batches(tf, 16), batches(tf, 20, 30), epochs=1)
    assert_same_everywhere(rank_session, plain.model.weights)
