"""Engine tf in one process with two CPU replicas: the same result as plain Keras.

Marked `ranks(1)`: the CPU must be split before TensorFlow runs its first operation.
"""

import pytest

from tests.engines.tf.cases import (
    ADAM,
    SGD,
    TWO,
    Case,
    distance,
    embedding,
    numbers,
    settings,
    train,
    with_state,
    words,
)

pytestmark = [pytest.mark.ranks(1), pytest.mark.usefixtures("fresh_keras")]


# Each strategy; both optimizers and both ways to call the step on one replica and on several.
@pytest.mark.parametrize(("strategy", "tf", "optimizer", "per_call", "replicas"), [
    ("default", {}, ADAM, 1, 1),
    ("one_device", {"device": "CPU:1"}, SGD, 5, 1),
    ("mirrored", TWO, ADAM, 5, 2),
    ("mirrored", TWO | {"cross_device": "hierarchical_copy"}, SGD, 1, 2),
    ("central_storage", TWO, ADAM, 5, 2),
], ids=lambda v: v[0] if isinstance(v, tuple) else None)
def test_it_trains_as_one_process_on_the_global_batch(tmp_path, strategy, tf, optimizer, per_call,
                                                      replicas):
    case = Case(optimizer[1], steps_per_execution=per_call)
    result = train(case, settings(strategy, tf, output=tmp_path))
    weights, own = case.weights, case.models[-1]
    assert own.distribute_strategy.num_replicas_in_sync == replicas
    plain, history = case.plain(replicas)
    assert int(own.optimizer.iterations.numpy()) == {1: 38, 2: 20}[replicas]
    assert distance(weights, plain.get_weights()) < 1e-6
    for name in ("loss", "accuracy"):
        assert result.history[name] == pytest.approx(history[name], abs=1e-6)
    expected = plain.evaluate(case.x[:37], case.y[:37], verbose=0, return_dict=True)
    for name, value in expected.items():
        assert result.history[f"val_{name}"][-1] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("strategy", "optimizer"), [
    ("central_storage", "ema"), ("mirrored", "scheduled, ema")])
def test_other_ways_to_update(strategy, optimizer):
    def make(keras):
        if optimizer == "ema":
            return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
        return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, use_ema=True,
                                    ema_momentum=0.9)
    case = Case(make, validation=0)
    train(case, settings(strategy, TWO))
    assert distance(case.weights, case.plain(2)[0].get_weights()) < 1e-6


def test_rows_of_an_embedding_that_occur_twice_are_one_gradient():
    """Plain Keras takes each for a gradient of its own, so that a dense table is the measure."""
    def dense(keras):
        return [keras.Input((6,), dtype="int32"),
                keras.layers.Lambda(lambda ids: keras.ops.one_hot(ids, 20)),
                keras.layers.Dense(4, use_bias=False, kernel_initializer=keras.initializers.
                                   RandomUniform(-0.05, 0.05, seed=3)),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(3, kernel_initializer=keras.initializers.
                                   GlorotUniform(seed=4))]

    def sparse(keras):
        layers = embedding(keras)
        layers[1] = keras.layers.Embedding(
            20, 4, embeddings_initializer=keras.initializers.RandomUniform(-0.05, 0.05, seed=3))
        layers[3] = keras.layers.Dense(
            3, kernel_initializer=keras.initializers.GlorotUniform(seed=4))
        return layers

    def adam(keras):
        return keras.optimizers.Adam(0.01)
    case = Case(adam, sparse, words(), validation=0)
    train(case, settings("mirrored", TWO))
    measure = Case(adam, dense, words(), validation=0).plain(2)[0]
    assert distance(case.weights, measure.get_weights()) < 1e-6


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_metrics_that_assign_sums_and_a_loss_that_is_one_number(strategy):
    """Keras adds to a confusion matrix by `assign`, which central storage would count twice.

    The loss of predictions without a second axis is one number per batch.
    """
    def binary(keras):
        return [keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid"),
                keras.layers.Reshape(())]

    def metrics(keras):
        return [keras.metrics.AUC(num_thresholds=20, name="auc"),
                keras.metrics.Precision(name="precision")]
    x, y = numbers()
    case = Case(lambda keras: keras.optimizers.SGD(0.1), binary, (x, (y == 1).astype("float32")),
                metrics=metrics, loss="binary_crossentropy")
    result = train(case, settings(strategy, TWO))
    weights = case.weights
    plain, history = case.plain(2)
    assert distance(weights, plain.get_weights()) < 1e-6
    expected = plain.evaluate(case.x[:37], case.y[:37], verbose=0, return_dict=True)
    for name in ("loss", "auc", "precision"):
        assert result.history[name] == pytest.approx(history[name], abs=2e-6)
        assert result.history[f"val_{name}"][-1] == pytest.approx(expected[name], abs=2e-6)


def test_the_rate_is_scaled_and_warmed_up(tmp_path):
    import keras
    case = Case(lambda keras: keras.optimizers.SGD(0.05), validation=0)
    result = train(case, settings("mirrored", TWO, lr_scaling="linear", warmup_epochs=1.0,
                                  output=tmp_path))
    weights = case.weights

    class Warmup(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            done = keras.ops.minimum(1.0, keras.ops.cast(step, "float32") / 10)
            return 0.05 * (1 + done)
    case._optimizer = lambda keras: keras.optimizers.SGD(Warmup())
    assert distance(weights, case.plain(2)[0].get_weights()) < 1e-6
    assert result.history["learning_rate"] == pytest.approx([0.1, 0.1])
    saved = keras.models.load_model(result.model_path)
    assert type(saved.optimizer) is keras.optimizers.SGD
    assert float(saved.optimizer.learning_rate) == pytest.approx(0.05)


def test_statistics_are_the_mean_of_the_replicas(tmp_path):
    """Both strategies give the same model, though one averages at every step."""
    import keras
    figures = []
    for strategy in ("mirrored", "central_storage"):
        case = Case(lambda keras: keras.optimizers.Adam(0.01), with_state)
        result = train(case, settings(strategy, TWO, output=tmp_path / strategy))
        saved = keras.models.load_model(result.model_path)
        expected = saved.evaluate(case.x[:37], case.y[:37], verbose=0)
        assert [result.history["val_loss"][-1], result.history["val_accuracy"][-1]] == (
            pytest.approx(expected, abs=1e-6))
        figures.append(case.weights)
    assert distance(*figures) < 1e-6


def test_averaged_weights_are_validated_and_callbacks_told_of_it():
    import keras
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            seen.append(batch)

        def on_test_end(self, logs=None):
            seen.append(logs["loss"])
    case = Case(lambda keras: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9),
                data=numbers(144), validation=32,
                callbacks=[keras.callbacks.SwapEMAWeights(), Watch()])
    result = train(case, settings("mirrored", TWO, shuffle=False))
    plain = case.make()
    history = plain.fit(case.x, case.y, batch_size=16, epochs=2, shuffle=False,
                        verbose=0, validation_data=(case.x[:32], case.y[:32]),
                        callbacks=[keras.callbacks.SwapEMAWeights()]).history
    assert result.history["val_loss"] == pytest.approx(history["val_loss"], abs=1e-6)
    assert seen == [0, 1, seen[2], 0, 1, seen[5]]
    assert [seen[2], seen[5]] == pytest.approx(history["val_loss"], abs=1e-6)
