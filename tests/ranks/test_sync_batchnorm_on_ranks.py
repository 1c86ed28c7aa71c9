"""Batch normalization on real ranks: that of one process with all samples."""

import contextlib
import functools
import io
from pathlib import Path

import numpy as np
import pytest

TWO = pytest.mark.ranks(2)
BATCH, STEPS = 6, 6


def images(size, mean=0.0):
    rng = np.random.default_rng(0)
    x = rng.normal(mean, 3.0, size=(STEPS * size * BATCH, 6, 6, 3)).astype("f4")
    return x, rng.normal(size=(len(x), 2)).astype("f4")


def make_model(keras):
    """With a normalization first, one inside another model, one called twice, one over axis 1."""
    layers = keras.layers
    keras.utils.set_random_seed(5)
    inner = keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(4, 3, use_bias=False),
                              layers.BatchNormalization(momentum=0.9)])
    inputs = keras.Input((6, 6, 3))
    h = inner(layers.BatchNormalization()(inputs))
    shared = layers.BatchNormalization(scale=False)
    h = layers.add([shared(h), shared(layers.Activation("tanh")(h))])
    h = layers.BatchNormalization(axis=1)(h)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(h)))


def weights_of(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


@functools.cache
def weights_of_one_process(size):
    import keras
    x, y = images(size)
    model = make_model(keras)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    model.fit(x, y, batch_size=size * BATCH, shuffle=False, verbose=0)
    return weights_of(model)


def train_on_ranks(keras, session, sync, **kwargs):
    import hvdtrain
    model = make_model(keras)
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.9)), "mse",
                  **kwargs)
    config = hvdtrain.TrainConfig(batch_per_rank=BATCH, shuffle=False, lr_scaling="none",
                                  sync_batch_norm=sync)
    with contextlib.redirect_stdout(io.StringIO()):
        hvdtrain.fit(model, *images(session.world.size), config=config)
    return model


@pytest.mark.parametrize(("collective", "options"), [
    pytest.param("horovod-mpi", {}, marks=pytest.mark.ranks(2, collective="horovod-mpi"), id="mpi"),
    pytest.param("mpi4py", {}, marks=pytest.mark.ranks(2, collective="mpi4py"), id="mpi4py"),
    pytest.param("horovod-gloo", {}, marks=pytest.mark.ranks(3), id="3-ranks"),
    pytest.param("horovod-gloo", {"steps_per_execution": 3}, marks=TWO, id="several steps"),
    pytest.param("horovod-gloo", {"run_eagerly": True}, marks=TWO, id="eager")])
def test_the_weights_are_those_of_one_process(collective, options, rank_session, keras):
    many = train_on_ranks(keras, rank_session, sync=True, **options)
    np.testing.assert_allclose(
        weights_of(many), weights_of_one_process(rank_session.world.size), atol=1e-5)
    everyone = rank_session.collective.gather_objects(weights_of(many).tobytes())
    assert len(set(everyone)) == 1


@TWO
def test_without_it_they_are_not_and_the_statistics_are_averaged(rank_session, keras):
    many = train_on_ranks(keras, rank_session, sync=False)
    assert np.abs(weights_of(many) - weights_of_one_process(2)).max() > 1e-3
    everyone = rank_session.collective.gather_objects(weights_of(many).tobytes())
    assert len(set(everyone)) == 1


def normalize(keras, tf, collective, batch, mask=None, mean_of=None):
    """One step of one layer: output, moving statistics, gradients to the batch and to gamma."""
    import hvdtrain
    layer = keras.layers.BatchNormalization()
    layer.build(batch.shape)
    if collective is not None:
        assert hvdtrain.sync_batchnorm(keras.Sequential([layer]), collective) == 1
    x = tf.constant(batch)
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = layer(x, training=True, mask=None if mask is None else tf.constant(mask))
        loss = tf.reduce_sum(out ** 2 * tf.range(1.0, 1.0 + batch.shape[-1]) + tf.sin(out))
    to_x, to_gamma = tape.gradient(loss, [x, layer.gamma.value])
    return (out.numpy(), layer.moving_mean.numpy(), layer.moving_variance.numpy(),
            to_x.numpy(), to_gamma.numpy())


@TWO
@pytest.mark.parametrize("case", ["uneven", "empty", "mask", "far from zero"])
def test_ranks_with_other_numbers_of_samples(case, rank_session, keras, tf):
    rank, collective = rank_session.world.rank, rank_session.collective
    rng = np.random.default_rng(2)
    offset = 50.0 if case == "far from zero" else 1.0
    x = rng.normal(offset, 2.0, size=(9, 7, 5)).astype("f4")
    mask = rng.random((9, 7)) > 0.4 if case == "mask" else None
    cut = 0 if case == "empty" else 4
    mine = slice(0, cut) if rank == 0 else slice(cut, None)
    one = normalize(keras, tf, None, x, mask)
    out, mean, variance, to_x, to_gamma = normalize(
        keras, tf, collective, x[mine], None if mask is None else mask[mine])
    scale = offset  # a float32 mean of 50 is known to 4e-6
    np.testing.assert_allclose(mean, one[1], atol=1e-6 * scale)
    np.testing.assert_allclose(variance, one[2], atol=1e-5)
    np.testing.assert_allclose(out, one[0][mine], atol=1e-5 * scale)
    np.testing.assert_allclose(to_x, one[3][mine], atol=1e-4 * scale)
    total = collective.reduce([tf.constant(to_gamma)], name="gamma", op="sum")[0]
    np.testing.assert_allclose(total, one[4], rtol=1e-4, atol=1e-3)


@TWO
def test_statistics_that_are_equal_stay_as_they_are(rank_session, keras):
    from hvdtrain.optim import state
    rank, third = rank_session.world.rank, np.float32(1 / 3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(),
                              keras.layers.Dense(2, trainable=False), keras.layers.Dropout(0.5)])
    norm, frozen = model.layers[:2]
    norm.moving_mean.assign([third, 0.0, 0.0])
    norm.moving_variance.assign([1.0, 2.0, 3.0 + 2 * rank])
    frozen.kernel.assign(np.full((3, 2), third))
    assert state.average_statistics(rank_session.collective, model) == 1
    np.testing.assert_array_equal(norm.moving_mean.numpy(), [third, 0.0, 0.0])
    np.testing.assert_array_equal(norm.moving_variance.numpy(), [1.0, 2.0, 4.0])
    np.testing.assert_array_equal(frozen.kernel.numpy(), np.full((3, 2), third))


@TWO
def test_a_run_that_is_stopped_in_an_epoch_ends_like_one_that_is_not(
        rank_session, keras, tmp_path, monkeypatch):
    import hvdtrain
    from hvdtrain.settings import replace
    from hvdtrain.train import coordinator
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)
    folder = Path(rank_session.collective.gather_objects(str(tmp_path))[0])
    data = images(2)

    def train(config, **kwargs):
        model = make_model(keras)
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        with contextlib.redirect_stdout(io.StringIO()):
            hvdtrain.fit(model, *data, config=config, **kwargs)
        return model
    config = hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=3, output=folder / "whole",
                                  tensorboard=False)
    whole = train(config)
    cut, steps = replace(config, output=folder / "cut"), []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: steps.append(batch))
    with pytest.raises(coordinator.StoppedError):
        train(cut, stop_asked=lambda: len(steps) > 9, callbacks=[count])
    resumed = train(replace(cut, resume=True))
    for a, b in zip(whole.trainable_variables, resumed.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    for a, b in zip(whole.non_trainable_weights, resumed.non_trainable_weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
