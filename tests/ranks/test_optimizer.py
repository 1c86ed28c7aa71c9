"""DistributedOptimizer on real ranks: equal to one process, whatever the training looks like."""

import contextlib
import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

TWO = pytest.mark.ranks(2)


@pytest.fixture
def keras():
    return pytest.importorskip("keras")


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


def assert_same_everywhere(session, variables):
    from hvdtrain.optim import state
    everyone = session.collective.gather_objects(state.digests(variables).values)
    assert all(d == everyone[0] for d in everyone)


QUICK = ["Adam, global_clipnorm", "SGD, accumulation 4, global_clipnorm",
         "LossScaleOptimizer(Adam)", "LossScaleOptimizer(SGD, accumulation 4)",
         "MultiOptimizer(SGD, Adam)", "Adam, CosineDecay with warmup"]


@pytest.mark.parametrize("name", [
    *[pytest.param(n, marks=pytest.mark.ranks(2)) for n in QUICK],
    pytest.param("Adam", marks=pytest.mark.ranks(4), id="Adam-4-ranks"),
    pytest.param("SGD, accumulation 4", marks=pytest.mark.ranks(4), id="accumulation-4-ranks"),
    pytest.param("Adam", marks=pytest.mark.ranks(2, collective="mpi4py"), id="Adam-mpi4py"),
    pytest.param("LossScaleOptimizer(SGD, accumulation 4)",
                 marks=pytest.mark.ranks(2, collective="mpi4py"), id="scale-mpi4py"),
    pytest.param("Adam", marks=pytest.mark.ranks(2, collective="horovod-mpi"), id="Adam-mpi"),
])
def test_the_weights_are_those_of_one_process(name, rank_session, keras):
    import equality
    row = equality.compare(name, equality.configurations()[name], rank_session)
    assert row["difference"] < 1e-6
    assert row["moved"] > 1e-4
    assert row["bitwise_equal"]


def loop_data(tf, rank, step):
    rng = np.random.default_rng(100 * step)
    x = rng.normal(size=(8, 5)).astype("f4")
    y = rng.normal(size=(8, 1)).astype("f4")
    return (tf.constant(x[rank * 4:rank * 4 + 4]), tf.constant(y[rank * 4:rank * 4 + 4]),
            tf.constant(x), tf.constant(y))


@TWO
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("eager", [False, True])
def test_a_custom_loop_with_different_orders_and_missing_gradients(
        eager, rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank

    def make():
        rng = np.random.default_rng(3)
        return ([keras.Variable(rng.normal(size=s).astype("f4"), name=f"v{i}")
                 for i, s in enumerate([(5, 6), (6,), (6, 1), (1,), (2, 2)])],
                keras.optimizers.Adam(0.05, global_clipnorm=0.5))

    def step_of(variables, optimizer, reverse):
        def step(x, y):
            with tf.GradientTape() as tape:
                h = tf.tanh(x @ variables[0].value + variables[1].value)
                loss = tf.reduce_mean((h @ variables[2].value + variables[3].value - y) ** 2)
            grads = tape.gradient(loss, [v.value for v in variables])
            assert grads[4] is None
            pairs = list(zip(grads, variables, strict=True))
            optimizer.apply_gradients(pairs[::-1] if reverse else pairs)
        return step if eager else tf.function(step)

    mine, opt = make()
    hvdtrain.DistributedOptimizer(opt)
    opt.build(mine)
    alone, plain = make()
    plain.build(alone)
    # The order in which gradients are given differs between the ranks.
    distributed, reference = step_of(mine, opt, reverse=rank == 1), step_of(alone, plain, False)
    for step in range(6):
        x, y, all_x, all_y = loop_data(tf, rank, step)
        distributed(x, y)
        reference(all_x, all_y)
    for a, b in zip(mine, alone, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    assert_same_everywhere(rank_session, [*mine, *opt.variables])


@TWO
@pytest.mark.parametrize("sparse", ["gather", "dense"])
def test_embeddings_with_repeated_rows_train_as_the_dense_gradient_does(
        sparse, rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.optim import ReducerOptions
    rank = rank_session.world.rank
    ids = np.random.default_rng(0).integers(0, 12, size=(10, 8, 6))

    def train(wrap, rows, dense_reference):
        keras.utils.set_random_seed(1)
        table = keras.Variable(np.random.default_rng(2).normal(size=(12, 3)).astype("f4"))
        opt = keras.optimizers.Adam(0.05)
        if wrap:
            hvdtrain.DistributedOptimizer(opt, options=ReducerOptions(sparse=sparse))
        opt.build([table])
        for batch in ids:
            part = batch[rows]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table.value, part) ** 2)
            grad = tape.gradient(loss, table.value)
            assert isinstance(grad, tf.IndexedSlices)
            opt.apply([tf.convert_to_tensor(grad) if dense_reference else grad], [table])
        return table
    mine = train(True, slice(4 * rank, 4 * rank + 4), False)
    np.testing.assert_allclose(mine.numpy(), train(False, slice(0, 8), True).numpy(), atol=1e-6)
    assert_same_everywhere(rank_session, [mine])


@TWO
def test_an_overflow_on_one_rank_is_skipped_by_all(rank_session, keras, tf):
    import hvdtrain
    for steps in (None, 2):
        v = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        opt = hvdtrain.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))
        opt.build([v])
        bad = rank_session.world.rank == 1
        opt.apply([tf.constant([np.inf if bad else 1.0, 1.0])], [v])
        np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])
        assert float(opt.dynamic_scale.numpy()) == 2.0 ** 14
        assert_same_everywhere(rank_session, opt.variables)


@TWO
def test_mixed_float16_wraps_and_all_ranks_agree(rank_session, keras, tf):
    import hvdtrain
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(
        8, dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")])
    # auto_scale_loss wraps the optimizer when the model's own policy is mixed_float16
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8),
                                  keras.layers.Dense(1, dtype="float32")])
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        assert type(model.optimizer).__name__ == "LossScaleOptimizer"
        x = np.random.default_rng(0).normal(size=(32, 4)).astype("f4")
        with contextlib.redirect_stdout(io.StringIO()):
            hvdtrain.fit(model, (x, x[:, :1]), config=hvdtrain.TrainConfig(batch_per_rank=4))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_same_everywhere(rank_session, [*model.trainable_variables,
                                          *model.optimizer.variables])


@TWO
def test_a_step_of_two_optimizers_and_a_custom_train_step(rank_session, keras, tf):
    import hvdtrain

    class TwoHeads(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = keras.layers.Dense(3), keras.layers.Dense(3)
            self.second = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1))

        def call(self, x):
            return self.a(x) + self.b(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            for opt, layer in ((self.optimizer, self.a), (self.second, self.b)):
                opt.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
            self._loss_tracker.update_state(loss)
            return self.compute_metrics(x, y, y, None)

    keras.utils.set_random_seed(5)
    model = TwoHeads()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model(np.zeros((1, 3), "f4"))
    model.optimizer.build(model.a.trainable_weights)
    model.second.build(model.b.trainable_weights)
    x = np.random.default_rng(rank_session.world.rank).normal(size=(16, 3)).astype("f4")
    model.fit(x, x, batch_size=4, verbose=0)
    assert_same_everywhere(rank_session, model.trainable_variables)


@TWO
def test_models_that_differ_between_ranks_are_refused_by_name(rank_session, keras):
    from hvdtrain.errors import TrainingError
    from hvdtrain.optim import state
    extra = [keras.Variable(1.0)] * rank_session.world.rank
    with pytest.raises(TrainingError, match="rank 0 has 1 variables, rank 1 has 2"):
        state.broadcast(rank_session.collective, [keras.Variable([1.0]), *extra])


@TWO
def test_broadcast_and_seeds(rank_session, keras, tf):
    from hvdtrain.optim import state
    rank = rank_session.world.rank
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile(keras.optimizers.Adam(0.1 * (rank + 1)), "mse")
    model.optimizer.build(model.trainable_variables)
    variables = state.training_state(model)
    assert state.seed_variables(variables)
    state.broadcast(rank_session.collective, variables)
    state.check_equal(rank_session.collective, variables, when="after the broadcast")
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)
    state.fold_rank_into_seeds(variables, rank)
    ones = tf.ones([64, 2])
    masks = rank_session.collective.gather_objects(
        np.asarray(model.layers[-1](ones, training=True)).tolist())
    assert masks[0] != masks[1]


@TWO
def test_a_rank_whose_weights_differ_is_named(rank_session, keras):
    from hvdtrain.errors import TrainingError
    from hvdtrain.optim import state
    v = keras.Variable([1.0, 2.0], name="weights")
    if rank_session.world.rank == 1:
        v.assign([1.0, np.nextafter(np.float32(2), np.float32(3))])
    with pytest.raises(TrainingError, match=r"after step 1: rank 1 of 2 differ.*`weights"):
        state.check_equal(rank_session.collective, [v], when="after step 1")


def fit_quietly(*args, **kwargs):
    import hvdtrain
    with contextlib.redirect_stdout(io.StringIO()):
        return hvdtrain.fit(*args, **kwargs)


@TWO
def test_metrics_are_those_of_all_samples(rank_session, keras):
    import hvdtrain
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("f4")
    y = (x.sum(1) > 0).astype("f4")[:, None]
    v = x[:11] + 1  # uneven over the ranks

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")]
        return model, metrics
    model, metrics = make()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                  "binary_crossentropy", metrics=metrics)
    seen = []
    result = fit_quietly(model, (x, y), validation=(v, y[:11]),
                         config=hvdtrain.TrainConfig(batch_per_rank=5, epochs=2, shuffle=False,
                                                     lr_scaling="none"),
                         callbacks=[keras.callbacks.LambdaCallback(
                             on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))])
    alone, metrics = make()
    alone.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    history = alone.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0,
                        validation_data=(v, y[:11])).history
    for name, values in history.items():
        np.testing.assert_allclose(result.history[name], values, atol=1e-6, err_msg=name)
    assert seen[-1]["val_auc"] == result.history["val_auc"][-1]


@TWO
def test_a_rank_with_no_validation_sample(rank_session, keras):
    import hvdtrain
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f4")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    result = fit_quietly(model, (x, x[:, :1]), validation=(x[:1], x[:1, :1]),
                         config=hvdtrain.TrainConfig(batch_per_rank=2))
    expected = float((model.predict(x[:1], verbose=0)[0, 0] - x[0, 0]) ** 2)
    assert result.history["val_loss"][0] == pytest.approx(expected, rel=1e-5)


@TWO
def test_a_loss_that_is_not_finite_names_step_and_rank(rank_session, keras, tmp_path):
    import hvdtrain
    from hvdtrain.errors import TrainingError
    folder = Path(rank_session.collective.gather_objects(str(tmp_path))[0])
    x = np.ones((32, 2), "f4")
    y = np.ones((32, 1), "f4")
    config = hvdtrain.TrainConfig(batch_per_rank=2, shuffle=False, output=folder,
                                  tensorboard=False, lr_scaling="none")

    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        return model
    fit_quietly(make(), (x, y), config=config)
    bad = x.copy()
    bad[5 * 4 + 2] = np.nan  # step 6 of 8, the first row of rank 1
    from hvdtrain.settings import replace
    with pytest.raises(TrainingError, match=r"since step 14, first on rank 1\."):
        fit_quietly(make(), (bad, y), config=replace(config, resume=True, epochs=2))
    if rank_session.world.is_chief:
        files = sorted(os.listdir(folder / "checkpoints"))
        assert files == ["epoch-00001.keras"]
        loaded = keras.models.load_model(folder / "checkpoints" / files[0])
        assert all(np.isfinite(v.numpy()).all() for v in loaded.trainable_variables)


@TWO
def test_a_callback_that_stops_one_rank_at_the_end_of_an_epoch_stops_all(rank_session, keras):
    import hvdtrain

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank_session.world.rank == 1 and epoch == 1:
                self.model.stop_training = True
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    result = fit_quietly(model, (np.ones((8, 2), "f4"), np.ones((8, 1), "f4")),
                         callbacks=[Stop()],
                         config=hvdtrain.TrainConfig(batch_per_rank=2, epochs=5))
    assert len(result.history["loss"]) == 2
    assert_same_everywhere(rank_session, model.trainable_variables)


@TWO
def test_settings_that_differ_between_ranks_are_named(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    config = hvdtrain.TrainConfig(seed=rank_session.world.rank)
    with pytest.raises(ConfigError, match="seed is 0 on rank 0 and 1 on rank 1"):
        fit_quietly(model, (np.ones((8, 2), "f4"), np.ones((8, 1), "f4")), config=config)


@TWO
def test_ranks_with_other_data_of_the_same_length_are_named(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.full((8, 2), 1.0 + rank_session.world.rank, "f4")
    with pytest.raises(ConfigError, match="checksum of three training samples is"):
        fit_quietly(model, (x, x[:, :1]))


@TWO
def test_a_rank_that_made_one_optimizer_more_is_named(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    if rank_session.world.rank == 1:
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with pytest.raises(ConfigError, match="order of distributed optimizers is .* on rank 1"):
        fit_quietly(model, (np.ones((8, 2), "f4"), np.ones((8, 1), "f4")))
    if rank_session.world.rank == 0:
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01))


@TWO
def test_an_error_on_the_chief_reaches_every_rank(rank_session):
    from hvdtrain.errors import CheckpointError
    from hvdtrain.train.chief import on_chief

    def fails():
        raise CheckpointError("disk full")
    with pytest.raises(CheckpointError, match="disk full"):
        on_chief(rank_session.collective, fails)
    assert on_chief(rank_session.collective, lambda: 7) == 7
