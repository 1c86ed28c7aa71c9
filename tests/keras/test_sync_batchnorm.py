"""Synchronized batch normalization in one process: what it hooks, refuses and leaves plain."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.optim import keras_model
from hvdtrain.optim.sync_batchnorm import is_synchronized


def small():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    return keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(3),
                             keras.layers.BatchNormalization()])


def norms(model):
    return keras_model.batch_normalizations(model)


def test_a_saved_model_and_a_copy_are_plain(tmp_path):
    model = small()
    assert hvdtrain.sync_batchnorm(model) == 2
    assert all(map(is_synchronized, norms(model)))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for other in (loaded, copy.deepcopy(model), keras.models.clone_model(model)):
        assert len(norms(other)) == 2
        assert not any(map(is_synchronized, norms(other)))
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("f4")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_second_call_changes_nothing():
    model = small()
    hvdtrain.sync_batchnorm(model)
    first = [vars(layer)[keras_model.MOMENTS] for layer in norms(model)]
    hvdtrain.sync_batchnorm(model)
    assert [vars(layer)[keras_model.MOMENTS] for layer in norms(model)] == first


def test_one_rank_normalizes_as_plain_keras_does():
    x = np.random.default_rng(0).normal(5, 2, size=(64, 4)).astype("f4")
    results = []
    for sync in (False, True):
        keras.utils.set_random_seed(1)
        model = small()
        if sync:
            hvdtrain.sync_batchnorm(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x[:, :3], batch_size=16, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_float16", "float64", "mixed_bfloat16"])
def test_other_dtypes(dtype):
    outputs = []
    for sync in (False, True):
        layer = keras.layers.BatchNormalization(dtype=dtype)
        layer.build((None, 3))
        if sync:
            hvdtrain.sync_batchnorm(keras.Sequential([layer]))
        x = np.random.default_rng(0).normal(300, 40, size=(32, 3))
        outputs.append(np.asarray(layer(tf.constant(x), training=True), np.float64))
        outputs.append(layer.moving_variance.numpy())
    np.testing.assert_allclose(outputs[2], outputs[0], atol=1e-2 if "mixed" in dtype else 1e-5)
    np.testing.assert_allclose(outputs[3], outputs[1], rtol=1e-5)


def test_renormalization_uses_the_same_moments():
    if "renorm" not in keras.layers.BatchNormalization().get_config():
        pytest.skip("this Keras has no batch renormalization")
    x = np.random.default_rng(0).normal(2, 3, size=(16, 3)).astype("f4")
    results = []
    for sync in (False, True):
        layer = keras.layers.BatchNormalization(renorm=True)
        layer.build((None, 3))
        if sync:
            hvdtrain.sync_batchnorm(keras.Sequential([layer]))
        layer(x, training=True)
        results.append(layer.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_layer_with_moments_of_its_own_is_refused_by_name():
    class Own(keras.layers.BatchNormalization):
        def _moments(self, inputs, mask):
            return super()._moments(inputs * 2, mask)
    with pytest.raises(OptimizerError, match=r"`mine` \(Own\) computes its moments in its own"):
        hvdtrain.sync_batchnorm(keras.Sequential([keras.Input((2,)), Own(name="mine")]))


def test_xla_is_refused_while_the_step_is_traced():
    model = small()
    hvdtrain.sync_batchnorm(model)
    step = tf.function(lambda x: model(x, training=True), jit_compile=True)
    with pytest.raises(OptimizerError, match=r"`batch_normalization.*jit_compile=False"):
        step(tf.ones([4, 4]))


def test_another_engine_is_refused():
    with pytest.raises(ConfigError, match="sync_batch_norm=True belongs to engine 'allreduce'"):
        hvdtrain.TrainConfig(engine="tf", sync_batch_norm=True)
