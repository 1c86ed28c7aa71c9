"""Horovod's callbacks, `load_model`, elastic state and the checks of `fit`, on two ranks."""

import logging

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

pytestmark = pytest.mark.ranks(2)
SIZE = 2


def data(rank, n=24, seed=0):
    rng = np.random.default_rng([seed, rank])
    x = rng.normal(size=(n, 3)).astype("f4")
    return x, (x.sum(1, keepdims=True) > 0).astype("f4")


def network(keras, rank=0, *, subclassed=False):
    """A model with other weights on each rank; with a built state of each kind."""
    keras.utils.set_random_seed(10 + rank)
    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.BatchNormalization(),
              keras.layers.Dropout(0.5), keras.layers.Dense(1, activation="sigmoid")]
    if not subclassed:
        return keras.Sequential([keras.Input((3,)), *layers])

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = layers

        def call(self, x, training=None):
            for layer in self.parts:
                x = layer(x, training=training) if "ormal" in layer.name or (
                    "dropout" in layer.name) else layer(x)
            return x
    return Own()


class Watch(dict):
    """What a callback notes: the learning rate and the weights before each step, and logs."""

    def callback(self, keras, names=("rate",)):
        watch = self

        class Note(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if "rate" in names:
                    watch.setdefault("rate", []).append(
                        float(self.model.optimizer.learning_rate.numpy()))
                if "weights" in names:
                    watch.setdefault("weights", []).append(self.model.get_weights())

            def on_epoch_end(self, epoch, logs=None):
                watch.setdefault("logs", []).append(dict(logs))
        return Note()


def fitted(model, x, y, *callbacks, **given):
    return model.fit(x, y, callbacks=list(callbacks), shuffle=False, **{
        "batch_size": 6, "verbose": 0, **given})


@pytest.mark.parametrize("kind", ["built", "subclassed", "own step", "eager"])
def test_all_is_broadcast_before_the_first_step(kind, hvk, keras, rank_session):
    rank = hvk.rank()
    model = network(keras, rank, subclassed=kind == "subclassed")
    if kind == "own step":
        class Own(type(model)):
            def train_step(self, data):
                return super().train_step(data)
        model = Own.from_config(model.get_config())
        for w in model.weights:
            w.assign(w + rank)
    optimizer = keras.optimizers.Adam(0.01 * (1 + rank))
    model.compile(hvk.DistributedOptimizer(optimizer), "mse", run_eagerly=kind == "eager")
    watch = Watch()
    callback = hvk.callbacks.BroadcastGlobalVariablesCallback(1)
    fitted(model, *data(rank), callback, watch.callback(keras, ("weights",)), epochs=1)
    assert callback.broadcast_done
    assert "train_step" not in vars(model)
    at_start = rank_session.collective.gather_objects(watch["weights"][0])
    if kind in ("built", "eager"):
        for a, b in zip(*at_start, strict=True):
            np.testing.assert_array_equal(a, b)
    assert_same_everywhere(rank_session, [*model.trainable_variables, *optimizer.variables])
    assert float(optimizer.learning_rate) == pytest.approx(0.02)
    seeds = rank_session.collective.gather_objects(
        [layer.seed_generator.state.numpy() for layer in model._flatten_layers()
         if "dropout" in layer.name])
    assert seeds[0][0].tolist() != seeds[1][0].tolist()  # each rank drops its own units
    moving = rank_session.collective.gather_objects(
        [v.numpy() for v in model.non_trainable_variables if "moving_mean" in v.path])
    assert moving[0][0].tolist() != moving[1][0].tolist()
    fitted(model, *data(rank))  # statistics of each rank are no mistake


def test_variables_that_are_not_broadcast(hvk, keras, rank_session):
    model = network(keras, hvk.rank())
    first, second = model.layers[0].kernel, model.layers[3].kernel
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    callback = hvk.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[first])
    callback.register_local_var(second)
    fitted(model, *data(hvk.rank()), callback)
    everyone = rank_session.collective.gather_objects(model.get_weights())
    for variable, a, b in zip(model.weights, *everyone, strict=True):
        differs = variable is first or variable is second or "moving" in variable.path
        assert np.array_equal(a, b) != differs, variable.path
    with pytest.raises(ValueError, match="must be variables"):
        hvk.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


def test_figures_are_those_of_all_samples(hvk, keras, rank_session):
    """With other numbers of samples on each rank, and a validation on one of them."""
    import hvdtrain
    rank = hvk.rank()

    class Largest(keras.metrics.Metric):
        def __init__(self, **options):
            super().__init__(**options)
            self.value = self.add_weight(shape=(), initializer=lambda *_, **__: 3.0)

        def update_state(self, y, p, sample_weight=None):
            self.value.assign(self.value + 1.0 + rank)

        def reset_state(self):
            self.value.assign(3.0)

        def result(self):
            return self.value.value

    def compiled(*metrics):
        keras.utils.set_random_seed(4)
        model = keras.Sequential([
            keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.0)),
                      "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(), *metrics])
        return model
    sizes = [24, 40]
    sets = [data(r, sizes[r]) for r in range(SIZE)]
    validation = [data(r, sizes[r] // 3, seed=1) for r in range(SIZE)]
    for with_validation in ((0, 1), (0,), ()):
        model, watch = compiled(), Watch()
        # As many steps on each rank, of batches of other sizes.
        model.fit(*sets[rank], batch_size=sizes[rank] // 4, verbose=0, callbacks=[
            hvk.callbacks.MetricAverageCallback(), watch.callback(keras, ())],
            validation_data=validation[rank] if rank in with_validation else None)
        (logs,) = watch["logs"]
        assert vars(model).get("_get_metrics_result_or_logs") is None
        for prefix, parts in (("", sets), ("val_", [validation[r] for r in with_validation])):
            if not parts:
                assert not any(name.startswith("val_") for name in logs)
                continue
            with hvdtrain.alone():
                expected = model.evaluate(*map(np.concatenate, zip(*parts, strict=True)),
                                          verbose=0, return_dict=True)
            for name, value in expected.items():
                assert logs[prefix + name] == pytest.approx(value, abs=2e-6), prefix + name
    watch = Watch()
    fitted(compiled(Largest(name="largest")), *data(rank),
           hvk.callbacks.MetricAverageCallback(), watch.callback(keras, ()))
    assert watch["logs"][0]["largest"] == 3.0 + 4 * 1.5  # the mean of the ranks' values


def test_other_numbers_are_means_over_ranks(hvk, keras):
    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mine"] = 1.0 + hvk.rank()
            if hvk.rank() == 1:
                logs["only"] = 5
    model, watch = network(keras), Watch()
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    fitted(model, *data(hvk.rank()), Own(), hvk.callbacks.MetricAverageCallback(),
           watch.callback(keras, ()))
    assert watch["logs"][0]["mine"] == 1.5
    assert watch["logs"][0]["only"] == 5


def test_warm_up(hvk, keras, capsys):
    """lr / size to lr, as the formula in Horovod's documentation."""
    model, watch = network(keras), Watch()
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5)), "mse")
    history = fitted(model, *data(hvk.rank()), hvk.callbacks.LearningRateWarmupCallback(
        0.4, warmup_epochs=2, verbose=1), watch.callback(keras), epochs=3)
    expected = [0.4 / SIZE * ((SIZE - 1) / 2 * epoch + 1) for epoch in np.arange(1, 9) / 4]
    np.testing.assert_allclose(watch["rate"], [*expected, *[0.4] * 4], rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [expected[3], 0.4, 0.4], rtol=1e-6)
    printed = "Epoch 2: finished gradual learning rate warmup to 0.4." in capsys.readouterr().out
    assert printed == (hvk.rank() == 0)
    with pytest.raises(ValueError, match="steps_per_epoch="):
        fitted(model, _endless(*data(hvk.rank())), None,
               hvk.callbacks.LearningRateWarmupCallback(0.4), batch_size=None)
    scheduled = network(keras)
    scheduled.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))), "mse")
    with pytest.raises(ValueError, match="is a schedule"):
        fitted(scheduled, *data(hvk.rank()), hvk.callbacks.LearningRateWarmupCallback(0.4))


def _endless(x, y):
    import tensorflow as tf
    return tf.data.Dataset.from_generator(lambda: iter([(x, y)]), output_signature=(
        tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))))


@pytest.mark.parametrize(("arguments", "expected"), [
    ({"multiplier": lambda epoch: 1 / (1 + epoch)}, [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3]),
    ({"multiplier": lambda epoch: 1 + epoch, "staircase": False},
     [1, 1.5, 2, 2.5, 3, 3.5]),
    ({"multiplier": lambda epoch: 1 + epoch, "staircase": False, "steps_per_epoch": 4},
     [1, 1.25, 2, 2.25, 3, 3.25]),
    ({"multiplier": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
    ({"multiplier": 0.5, "start_epoch": 1}, [7, 7, 1, 1, 0.5, 0.5]),
    ({"multiplier": 3.0, "end_epoch": 2}, [1, 1, 3, 3, 3, 3]),
])
def test_schedules(arguments, expected, hvk, keras):
    model, watch = network(keras), Watch()
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.7)), "mse")
    fitted(model, *data(hvk.rank(), 12), hvk.callbacks.LearningRateScheduleCallback(
        0.1, **arguments), watch.callback(keras), epochs=3)
    np.testing.assert_allclose(watch["rate"], 0.1 * np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_corrected_when_the_rate_changes(correction, nesterov, hvk, keras, tf):
    rates = [0.1, 0.2, 0.2, 0.05]

    class Once(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(1,), initializer="zeros")

        def call(self, x):
            return x * self.w
    model = Once()
    model(tf.ones([1, 1]))
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=nesterov)), loss=lambda y, p: -p)  # the gradient is -1
    fitted(model, np.ones((1, 1), "f4"), np.ones((1, 1), "f4"),
           hvk.callbacks.LearningRateScheduleCallback(
               1.0, lambda epoch: rates[int(epoch)], momentum_correction=correction),
           epochs=4)
    velocity, weight, before = 0.0, 0.0, 0.1
    for rate in rates:
        velocity *= rate / before if correction else 1.0
        velocity = 0.9 * velocity + rate
        weight += 0.9 * velocity + rate if nesterov else velocity
        before = rate
    assert float(model.w.numpy()[0]) == pytest.approx(weight, rel=1e-5)


def test_the_best_model_is_written_once(hvk, keras, rank_session, tmp_path):
    folder = rank_session.collective.gather_objects(str(tmp_path))[0]
    model = network(keras)
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    best = hvk.callbacks.BestModelCheckpoint(monitor="loss", mode="min")
    with pytest.raises(ValueError, match="callback.filepath"):
        fitted(model, *data(hvk.rank()), best)
    best.filepath = f"{folder}/best-{hvk.rank()}.keras"
    weights = hvk.callbacks.BestModelCheckpoint(
        monitor="loss", save_weights_only=True, filepath=f"{folder}/w-{hvk.rank()}.weights.h5")
    fitted(model, *data(hvk.rank()), best, weights)
    rank_session.collective.barrier()
    from pathlib import Path
    assert sorted(p.name for p in Path(folder).iterdir()) == ["best-0.keras", "w-0.weights.h5"]


def test_a_loaded_model_goes_on(hvk, hvd, keras, rank_session, tmp_path):
    class MySgd(keras.optimizers.SGD):
        pass

    class MyDense(keras.layers.Dense):
        pass
    path = rank_session.collective.gather_objects(str(tmp_path / "model.keras"))[0]
    model = keras.Sequential([keras.Input((3,)), MyDense(1)])
    model.compile(hvk.DistributedOptimizer(MySgd(0.1, momentum=0.9)), "mse")
    fitted(model, *data(hvk.rank()))
    if hvk.rank() == 0:
        model.save(path)
    rank_session.collective.barrier()
    import hvdtrain
    loaded = hvk.load_model(path, custom_optimizers=[MySgd], custom_objects={"MyDense": MyDense},
                            compression=hvd.Compression.fp16)
    assert hvdtrain.is_distributed(loaded.optimizer)
    from hvdtrain.optim.distributed import state_of
    assert state_of(loaded.optimizer).options.compression == "fp16"
    for a, b in zip([*loaded.weights, *loaded.optimizer.variables],
                    [*model.weights, *model.optimizer.variables], strict=True):
        np.testing.assert_array_equal(a, b)
    fitted(loaded, *data(hvk.rank()), epochs=1)
    fitted(model, *data(hvk.rank()), epochs=1)
    for a, b in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    assert_same_everywhere(rank_session, loaded.weights)
    rank_session.collective.barrier()
    if hvk.rank() == 0:
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(path)
    rank_session.collective.barrier()
    assert getattr(hvk.load_model(path), "optimizer", None) is None


def test_a_script_that_forgot_something_is_told_what_to_write(hvk, keras, rank_session):
    from hvdtrain.errors import ConfigError
    x, y = data(hvk.rank())
    model = network(keras, hvk.rank())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ConfigError, match=r"not distributed.*hvd\.DistributedOptimizer"):
        model.fit(x, y, verbose=0)
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ConfigError, match=r"other weights.*BroadcastGlobalVariablesCallback\(0\)"):
        model.fit(x, y, verbose=0)

    class Own(keras.Model):
        def train_step(self, data):
            return {}
    own = Own()
    own.compile()
    with pytest.raises(ConfigError, match=r"reduces no gradients.*hvd\.DistributedGradientTape"):
        own.fit(x, y, verbose=0)


def test_the_same_data_on_all_ranks_is_a_warning(hvk, keras, rank_session):
    """Each rank trains on all of it, in its own order, as with Horovod."""
    told = []

    class Keep(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
    handler, logger = Keep(), logging.getLogger("hvdtrain")
    logger.addHandler(handler)
    try:
        x, y = data(0)
        model = network(keras)
        model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        for _ in range(2):
            model.fit(x, y, verbose=0)
    finally:
        logger.removeHandler(handler)
    assert sum("same data on all 2 ranks" in line for line in told) == (hvk.rank() == 0)
    assert_same_everywhere(rank_session, model.trainable_variables)


def test_mixed_precision_and_xla_of_an_unchanged_script(hvk, keras, rank_session):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")])
        model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse",
                      jit_compile=True)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = data(hvk.rank())
    if hvk.rank() == 1:
        x = x * 1e38  # this rank's gradients are not finite: all ranks skip the step
    before = [w.numpy() for w in model.weights]
    model.fit(x, y, batch_size=24, verbose=0,
              callbacks=[hvk.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert model.jit_compile is True  # as it was compiled, for evaluate and predict
    assert_same_everywhere(rank_session, model.weights)
    assert float(model.optimizer.dynamic_scale) == 2.0 ** 14
    del before
    x, y = data(hvk.rank(), seed=3)
    model.fit(x, y, verbose=0)
    assert_same_everywhere(rank_session, model.weights)


def test_elastic_state(hvk, hvd, keras, rank_session, tf):
    rank = hvk.rank()
    model = network(keras, rank)
    model.compile(hvk.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    with pytest.raises(ValueError, match="must be built"):
        hvk.elastic.KerasState(network(keras, subclassed=True))
    state = hvk.elastic.KerasState(model, epoch=rank, batch=10 * rank, note=["a"])
    resets = []
    state.register_reset_callbacks([lambda: resets.append("called")])
    called = []

    @hvk.elastic.run
    def train(state, more, *, keyword):
        called.append((more, keyword))
        assert (state.epoch, state.batch) == (0, 0)  # those of rank 0
        assert_same_everywhere(rank_session, [*model.trainable_variables,
                                              *model.optimizer.variables])
        fitted(model, *data(rank), hvk.elastic.UpdateEpochStateCallback(state),
               hvk.elastic.UpdateBatchStateCallback(state),
               hvk.elastic.CommitStateCallback(state, batches_per_commit=3), epochs=2)
        return "result"
    assert train(state, 1, keyword=2) == "result"
    assert called == [(1, 2)]
    assert (state.epoch, state.batch) == (2, 0)
    committed = [np.array(v) for v in [*model.variables, *model.optimizer.variables]]
    for v in [*model.variables, *model.optimizer.variables]:
        v.assign(v + tf.cast(1, v.dtype))
    state.epoch, state.note = 9, ["b"]
    state.restore()
    assert (state.epoch, state.note) == (2, ["a"])
    for v, value in zip([*model.variables, *model.optimizer.variables], committed, strict=True):
        np.testing.assert_array_equal(v, value, err_msg=v.path)
    state.on_reset()
    assert resets == ["called"]

    class Failed(RuntimeError):
        pass

    @hvd.elastic.run
    def fails(state):
        raise Failed
    with pytest.raises(Failed):  # never swallowed
        fails(state)


def test_elastic_state_of_variables_and_commits(hvd, hvk, tf, keras):
    rank = hvd.rank()
    variables = [tf.Variable(float(rank)), keras.Variable([rank, 2])]
    state = hvd.elastic.TensorFlowState(variables, step=rank)
    state.sync()
    assert (float(variables[0]), variables[1].numpy().tolist(), state.step) == (0.0, [0, 2], 0)
    variables[0].assign(5.0)
    state.step = 5
    state.restore()
    assert (float(variables[0]), state.step) == (0.0, 0)
    commits = []

    class Counted(hvd.elastic.ObjectState):
        def commit(self):
            commits.append(self.batch)
            super().commit()
    counted = Counted(batch=0)
    model = network(keras)
    model.compile(hvk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    fitted(model, *data(rank, 30), hvk.elastic.UpdateBatchStateCallback(counted),
           hvk.elastic.CommitStateCallback(counted, batches_per_commit=2))
    assert commits == [1, 3, 0]  # after two and four steps, and at the end of the epoch
    with pytest.raises(ValueError, match="variables="):
        hvd.elastic.TensorFlowState()

    own = keras.optimizers.Adam()
    model = network(keras, rank)
    apart = hvd.elastic.TensorFlowKerasState(model, own)
    own.learning_rate = 0.5 + rank
    apart.sync()
    assert float(own.learning_rate) == 0.5
