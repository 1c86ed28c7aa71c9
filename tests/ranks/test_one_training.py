"""What `fit` gives on real ranks, against plain Keras in one process: faults that were found.

A model that is trained again, settings of a script, callbacks, evaluation, models of several parts.
"""

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

TWO = pytest.mark.ranks(2)
THREE = pytest.mark.ranks(3)


def numbers(n=48, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype("f4")
    return x, (np.abs(x[:, :1] * 3).astype("i4") % 3)[:, 0]


def classifier(keras, optimizer, **compiled):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer, **{"loss": "sparse_categorical_crossentropy", **compiled})
    return model


def settings(**given):
    import hvdtrain
    return hvdtrain.TrainConfig(**{"batch_per_rank": 4, "shuffle": False, "lr_scaling": "none",
                                   "remainder": "join", **given})


def assert_close(ours, plain, atol=1e-6):
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=atol)


@TWO
def test_the_rate_is_scaled_once_however_often_a_model_is_trained(rank_session, keras, tmp_path):
    import hvdtrain
    x, y = numbers()
    ours = classifier(keras, keras.optimizers.SGD(0.1))
    plain = classifier(keras, keras.optimizers.SGD(0.2))
    for _ in range(3):
        result = hvdtrain.fit(ours, x, y, config=settings(lr_scaling="linear"))
        plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert result.history["learning_rate"] == pytest.approx([0.2])
        assert float(ours.optimizer.learning_rate) == pytest.approx(0.1)
    assert_close(ours, plain)
    ours.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    result = hvdtrain.fit(loaded, x, y, config=settings(lr_scaling="linear"))
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert result.history["learning_rate"] == pytest.approx([0.2])
    assert_close(loaded, plain)


@TWO
def test_callbacks_set_the_rate_of_one_process_and_files_hold_it(rank_session, keras, tmp_path):
    import hvdtrain
    model = classifier(keras, keras.optimizers.SGD(0.4))
    seen = []
    halving = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: seen.append(rate) or rate / 2)
    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))
    result = hvdtrain.fit(
        model, *numbers(), callbacks=[halving, saved],
        config=settings(lr_scaling="linear", epochs=2))
    assert seen == pytest.approx([0.4, 0.2])
    assert result.history["learning_rate"] == pytest.approx([0.4, 0.2])
    if rank_session.world.is_chief:
        loaded = keras.models.load_model(tmp_path / "m.keras")
        assert float(loaded.optimizer.learning_rate) == pytest.approx(0.1)


REDUCTIONS = [
    {"compression": "bf16"}, {"compression": "fp16"},
    {"compression": "lowrank", "approximation_rank": 2}, {"predivide": 2.0}, {"zero": True},
    {"bucket_mb": 0.0001}, {"sparse": "dense"}]


@TWO
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "distributed"])
@pytest.mark.parametrize("given", REDUCTIONS, ids=lambda given: "-".join(given))
def test_settings_of_a_script_reach_the_reduction(given, plain, rank_session, keras, monkeypatch):
    """Whether the script has distributed its optimizer or not; and they end with the run."""
    import hvdtrain
    from hvdtrain.optim.distributed import state_of
    from hvdtrain.optim.options import ReducerOptions
    from hvdtrain.optim.zero import divided
    optimizer = keras.optimizers.Adam(0.01)
    model = classifier(keras, optimizer if plain else hvdtrain.DistributedOptimizer(optimizer))
    hvdtrain.fit(model, *numbers(8), config=settings(**given), dry_run=True)
    if "zero" in given:
        assert divided(model.optimizer) is not None
        return
    used = ReducerOptions.of(settings(**given))
    assert state_of(model.optimizer).reducer._options == used != ReducerOptions()
    hvdtrain.fit(model, *numbers(8), config=settings(), dry_run=True)
    assert state_of(model.optimizer).reducer._options == ReducerOptions()


@TWO
def test_compressed_gradients_of_a_script_train_another_model(rank_session, keras):
    import hvdtrain
    made = []
    for compression in ("none", "bf16", "none"):
        model = classifier(keras, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        hvdtrain.fit(model, *numbers(), config=settings(compression=compression))
        made.append(np.concatenate([w.ravel() for w in model.get_weights()]))
        assert_same_everywhere(rank_session, model.weights)
    np.testing.assert_array_equal(made[0], made[2])
    assert 0 < np.abs(made[0] - made[1]).max() < 1e-2


@TWO
def test_what_a_script_cannot_be_given_is_refused(rank_session, keras, tmp_path):
    import hvdtrain
    from hvdtrain.errors import ConfigError, OptimizerError
    model = classifier(keras, hvdtrain.DistributedOptimizer(
        keras.optimizers.SGD(0.1), options=hvdtrain.ReducerOptions(compression="fp16")))
    for given, message in (
            ({"engine": "ps"}, "trains with engine 'allreduce'"),
            ({"engine": "tf"}, "trains with engine 'allreduce'"),
            ({"collective": "mpi4py"}, "the script collective='mpi4py'. Leave one"),
            ({"timeline": tmp_path / "t.json"}, r"hvdtrain.init\(timeline="),
            ({"compression": "bf16"}, "compression='bf16', and the options given to")):
        with pytest.raises(ConfigError, match=message):
            hvdtrain.fit(model, *numbers(), config=hvdtrain.TrainConfig(**given))
    with pytest.raises(OptimizerError, match="distributed already"):
        hvdtrain.DistributedOptimizer(model.optimizer, options=hvdtrain.ReducerOptions())


@TWO
def test_the_seed_of_a_script_draws_order_and_dropout(rank_session, keras):
    import hvdtrain
    made = []
    for seed in (5, 5, 6):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5),
                                  keras.layers.Dense(3, activation="softmax")])
        keras.utils.set_random_seed(len(made))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        hvdtrain.fit(model, *numbers(), config=settings(seed=seed))
        made.append(model.get_weights()[0])
    np.testing.assert_array_equal(made[0], made[1])
    assert np.abs(made[0] - made[2]).max() > 0


class _Recorder:
    """The calls that Keras makes of a callback."""

    HOOKS = ("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
             "on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end",
             "on_epoch_end", "on_train_end")

    @classmethod
    def made(cls, keras, calls):
        class Recorder(keras.callbacks.Callback):
            pass
        for hook in cls.HOOKS:
            def record(self, *args, hook=hook, **logs):
                found = dict((args[-1] if args and isinstance(args[-1], dict) else None)
                             or logs.get("logs") or {})
                calls.append((hook, *[a for a in args if isinstance(a, int)],
                              {} if "batch" in hook else found))
            setattr(Recorder, hook, record)
        return Recorder()


@TWO
def test_callbacks_are_called_as_keras_calls_them(rank_session, keras):
    import hvdtrain
    x, y = numbers(24)
    held = numbers(16, seed=1)
    ours, theirs = [], []
    model = classifier(keras, keras.optimizers.Adam(0.01), metrics=["accuracy"])
    plain = classifier(keras, keras.optimizers.Adam(0.01), metrics=["accuracy"])
    hvdtrain.fit(
        model, x, y, validation_data=held, config=settings(epochs=2),
        callbacks=[_Recorder.made(keras, ours)])
    plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=held,
              callbacks=[_Recorder.made(keras, theirs)])
    assert [call[:-1] for call in ours] == [call[:-1] for call in theirs]
    for (hook, *_, mine), (*_, expected) in zip(ours, theirs, strict=True):
        mine.pop("learning_rate", None)
        assert list(mine) == list(expected), hook
        for name, value in expected.items():
            assert mine[name] == pytest.approx(value, abs=1e-6), (hook, name)


@TWO
@pytest.mark.parametrize("at_the_end_of_an_epoch", [False, True])
def test_averaged_weights_are_validated(at_the_end_of_an_epoch, rank_session, keras):
    import hvdtrain
    x, y = numbers(24)
    histories = []
    for train in (hvdtrain.fit, None):
        model = classifier(keras, keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9))
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=at_the_end_of_an_epoch)
        if train is None:
            found = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0,
                              validation_data=(x, y), callbacks=[swap]).history
        else:
            found = train(model, x, y, validation_data=(x, y), config=settings(epochs=3),
                          callbacks=[swap]).history
        histories.append(found["val_loss"])
    np.testing.assert_allclose(*histories, atol=1e-6)


@TWO
def test_figures_that_a_callback_adds_are_made_equal(rank_session, keras):
    """Otherwise the rate would be halved on one rank alone."""
    import hvdtrain
    rank = rank_session.world.rank

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["own"] = float(epoch if rank else -epoch)
            if rank:
                logs["late"] = 7.0
    model = classifier(keras, keras.optimizers.SGD(0.1))
    halve = keras.callbacks.ReduceLROnPlateau(monitor="own", mode="min", patience=1, factor=0.5)
    result = hvdtrain.fit(model, *numbers(), config=settings(epochs=3), callbacks=[Own(), halve])
    assert result.history["own"] == [0.0, 0.0, 0.0]
    assert result.history["late"] == [7.0, 7.0, 7.0]
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)


@TWO
def test_a_rank_that_decides_otherwise_is_found_in_the_same_epoch(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import TrainingError
    model = classifier(keras, keras.optimizers.SGD(0.1))

    class Odd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank_session.world.rank:
                self.model.optimizer.learning_rate = 0.01
    with pytest.raises(TrainingError, match=r"callbacks of epoch 1: rank 1 of 2.*learning_rate"):
        hvdtrain.fit(model, *numbers(), config=settings(epochs=1), callbacks=[Odd()])


@THREE
def test_losses_of_single_outputs_are_means_over_samples(rank_session, keras):
    import hvdtrain
    inputs = keras.Input((1,))
    model = keras.Model(inputs, [keras.layers.Identity(name=n)(inputs) for n in "ab"])
    model.compile(keras.optimizers.SGD(0.0), {n: "mae" for n in "ab"})
    x = np.arange(7, dtype="f4")[:, None] ** 2
    zero = np.zeros_like(x)
    expected = float(x.mean())
    found = hvdtrain.evaluate(model, x, {"a": zero, "b": zero}, batch_size=4, return_dict=True)
    assert found["a_loss"] == pytest.approx(expected)
    assert found["loss"] == pytest.approx(2 * expected)


def clipping_by_hand(keras, tf, tape):
    class Clipping(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, activation="softmax")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tape() as t:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            grads = t.gradient(scaled, self.trainable_variables)
            grads, _ = tf.clip_by_global_norm([2.0 * g for g in grads], 0.01)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}
    keras.utils.set_random_seed(3)
    model = Clipping()
    model.compile(keras.optimizers.SGD(1.0), "sparse_categorical_crossentropy")
    return model


@TWO
def test_gradients_that_are_clipped_by_hand_are_told_of(rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.errors import OptimizerError
    x, y = numbers(16)
    with pytest.raises(OptimizerError, match=r"changes the gradient of .*each rank would change"):
        hvdtrain.fit(clipping_by_hand(keras, tf, tf.GradientTape), x, y, config=settings())
    ours = clipping_by_hand(keras, tf, hvdtrain.DistributedGradientTape)
    hvdtrain.fit(ours, x, y, config=settings())
    plain = clipping_by_hand(keras, tf, tf.GradientTape)
    plain(x[:1])
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_close(ours, plain)


@TWO
def test_ranks_that_differ_go_on_where_weights_are_not_compared(rank_session, keras):
    import hvdtrain
    model = classifier(keras, keras.optimizers.SGD(0.1))

    class Odd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank_session.world.rank:
                self.model.optimizer.learning_rate = 0.01
    result = hvdtrain.fit(model, *numbers(), config=settings(epochs=2, check_weights=False),
                          callbacks=[Odd()])
    assert len(result.history["loss"]) == 2
    first, second = rank_session.collective.gather_objects(model.get_weights()[0])
    assert not np.array_equal(first, second)


@TWO
def test_evaluate_and_predict_refuse_models_that_differ(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import TrainingError
    model = classifier(keras, keras.optimizers.SGD(0.1))
    if rank_session.world.rank:
        model.weights[0].assign(model.weights[0] + 1)
    x, y = numbers()
    with pytest.raises(TrainingError, match="hold different models: rank 1 of 2"):
        hvdtrain.evaluate(model, x, y, return_dict=True)
    with pytest.raises(TrainingError, match="hold different models: rank 1 of 2"):
        hvdtrain.predict(model, x)
    hvdtrain.broadcast_variables(model.weights)
    assert len(hvdtrain.predict(model, x)) == len(x)


@TWO
def test_plain_fit_is_refused_unless_the_script_took_care(rank_session, keras, tf, monkeypatch):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    from hvdtrain.train import distribute
    monkeypatch.setattr(distribute, "_alone", [])
    x, y = numbers()
    rank, size = rank_session.world.rank, rank_session.world.size
    model = classifier(keras, keras.optimizers.SGD(0.1))
    with pytest.raises(ConfigError, match=r"not distributed.*hvdtrain\.distribute\(model"):
        model.fit(x, y, verbose=0)
    own = clipping_by_hand(keras, tf, tf.GradientTape)
    own(x[:1])
    with pytest.raises(ConfigError, match="train_step of Clipping reduces no gradients"):
        own.fit(x[rank::size], y[rank::size], batch_size=4, verbose=0)
    reduced = clipping_by_hand(keras, tf, hvdtrain.DistributedGradientTape)
    reduced(x[:1])
    reduced.fit(x[rank::size], y[rank::size], batch_size=4, verbose=0)
    assert_same_everywhere(rank_session, reduced.weights)
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                  "sparse_categorical_crossentropy")
    for data in ((x, y), (tf.data.Dataset.from_tensor_slices((x, y)).batch(4),)):
        with pytest.raises(ConfigError, match="same data on all 2 ranks"):
            model.fit(*data, verbose=0, shuffle=False)
    shards = tf.data.Dataset.from_tensor_slices((x, y)).shard(size, rank).batch(4)
    for data in ((x[rank::size], y[rank::size]), (shards,)):
        model.fit(*data, batch_size=4 if len(data) == 2 else None, verbose=0, shuffle=False)
    assert_same_everywhere(rank_session, model.weights)
    if rank:
        model.weights[0].assign(model.weights[0] + 1)
    with pytest.raises(ConfigError, match="other weights on each rank"):
        model.fit(x[rank::size], y[rank::size], verbose=0)
    with hvdtrain.alone():
        classifier(keras, keras.optimizers.SGD(0.1)).fit(x, y, verbose=0)


@TWO
def test_what_is_made_trainable_or_frozen_counts_from_the_next_compile(rank_session, keras):
    import hvdtrain
    x, y = numbers()
    ours, plain = (classifier(keras, keras.optimizers.SGD(0.1)) for _ in range(2))
    for train in (lambda: hvdtrain.fit(ours, x, y, config=settings()),
                  lambda: plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)):
        train()
        model = plain if train.__code__.co_names[0] == "plain" else ours
        model.layers[0].trainable = False
        train()
        assert not model.layers[0].trainable
    assert_close(ours, plain)


def gan(keras, tf, tape):
    class Gan(keras.Model):
        """No `call`, and two optimizers."""

        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential([keras.layers.Dense(6)])
            self.discriminator = keras.Sequential([
                keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
            self.d_metric = keras.metrics.Mean(name="d_loss")

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

        @property
        def metrics(self):
            return [self.d_metric]

        def train_step(self, x):
            with tape() as t:
                d_loss = tf.reduce_mean(tf.square(self.discriminator(x) - 1.0)) + tf.reduce_mean(
                    tf.square(self.discriminator(self.generator(x[:, :2]))))
            weights = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(zip(t.gradient(d_loss, weights), weights, strict=True))
            with tape() as t:
                g_loss = tf.reduce_mean(tf.square(
                    self.discriminator(self.generator(x[:, :2])) - 1.0))
            weights = self.generator.trainable_variables
            self.g_optimizer.apply_gradients(zip(t.gradient(g_loss, weights), weights, strict=True))
            self.d_metric.update_state(d_loss)
            return {"d_loss": self.d_metric.result()}
    keras.utils.set_random_seed(3)
    return Gan()


@TWO
def test_several_optimizers_are_distributed_scaled_saved_and_restored(rank_session, keras, tf,
                                                                      tmp_path):
    import hvdtrain
    x, _ = numbers(32)

    def made(rate):
        model = gan(keras, tf, tf.GradientTape)
        model.compile(keras.optimizers.Adam(rate), keras.optimizers.SGD(rate, momentum=0.9))
        return model
    folder = rank_session.collective.gather_objects(str(tmp_path))[0]

    def config(**given):
        return settings(lr_scaling="linear", output=folder, tensorboard=False, **given)
    plain = made(0.02)
    expected = plain.fit(x, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    ours = made(0.01)
    first = hvdtrain.fit(ours, x, config=config(epochs=2))
    assert_same_everywhere(rank_session, [*ours.weights, *ours.d_optimizer.variables,
                                          *ours.g_optimizer.variables])
    np.testing.assert_allclose(first.history["d_loss"], expected["d_loss"][:2], atol=1e-5)
    resumed = made(0.01)
    second = hvdtrain.fit(resumed, x, config=config(epochs=3, resume=True))
    assert second.epoch == [2]
    np.testing.assert_allclose(second.history["d_loss"], expected["d_loss"][2:], atol=1e-5)
    for a, b in zip(resumed.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5)


@TWO
def test_scales_of_float8_are_those_of_all_ranks(rank_session, keras):
    import hvdtrain
    x, _ = numbers(32)
    y = x[:, :3].copy()

    def made():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        for layer in model.layers:
            layer.quantize("float8")
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model
    ours, plain = made(), made()
    hvdtrain.fit(ours, x, y, config=settings(epochs=2))
    plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_everywhere(rank_session, ours.weights)
    for a, b in zip(ours.weights, plain.weights, strict=True):
        if "outputs_grad" not in a.path:  # of a mean over half as many samples
            # Numbers of 8 bits round to other ones; the maxima of one rank are 10 % smaller.
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0.01, atol=1e-3, err_msg=a.path)
    first = [next(v for v in m.layers[0].weights if "inputs_amax" in v.path) for m in (ours, plain)]
    np.testing.assert_array_equal(*(v.numpy() for v in first))


@TWO
def test_statistics_of_local_layers_stay_local(rank_session, keras):
    import hvdtrain
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.BatchNormalization(name="local"),
        keras.layers.BatchNormalization(name="shared"), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(
        keras.optimizers.SGD(0.01), options=hvdtrain.ReducerOptions(local_variables="local")),
        "mse")
    x, _ = numbers()
    hvdtrain.fit(model, x, x[:, :1], config=settings())
    means = [rank_session.collective.gather_objects(layer.moving_mean.numpy())
             for layer in model.layers[:2]]
    assert np.abs(means[0][0] - means[0][1]).max() > 1e-3
    np.testing.assert_array_equal(*means[1])


@TWO
def test_a_stateful_model_trains_and_validates_as_in_one_process(rank_session, keras, tmp_path):
    import hvdtrain
    from hvdtrain.errors import DataError
    rng = np.random.default_rng(0)
    x = rng.normal(size=(34, 5, 2)).astype("f4")
    y = x.sum(axis=(1, 2), keepdims=False)[:, None]
    folder = rank_session.collective.gather_objects(str(tmp_path))[0]

    def made(batch):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input(batch_shape=(batch, 5, 2)),
                                  keras.layers.LSTM(4, stateful=True), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model
    plain = made(8)
    expected = plain.fit(x[:32], y[:32], batch_size=8, epochs=3, shuffle=False, verbose=0,
                         validation_data=(x[:16], y[:16])).history

    def train(model, **given):
        return hvdtrain.fit(
            model, x[:32], y[:32], validation_data=(x[:16], y[:16]),
            config=settings(output=folder, tensorboard=False, **given)).history
    with pytest.raises(DataError, match="takes batches of 4 samples only.*last one has 2"):
        hvdtrain.fit(made(4), x, y, config=settings())
    found = train(made(4), epochs=2)
    resumed = made(4)
    more = train(resumed, epochs=3, resume=True)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(found[name] + more[name], expected[name], atol=1e-5)
    plain.reset_states() if hasattr(plain, "reset_states") else plain.layers[0].reset_states()
    resumed.layers[0].reset_states()
    np.testing.assert_allclose(hvdtrain.predict(resumed, x[:16], batch_size=8),
                               plain.predict(x[:16], batch_size=8, verbose=0), atol=1e-5)
