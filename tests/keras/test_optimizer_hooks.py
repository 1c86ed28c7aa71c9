"""The seam: a hooked optimizer is the user's own object, and every way to lose the hook shows."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import DistributedOptimizer, is_distributed


def small_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def data(n=16):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("f4")
    return x, x[:, :1]


def test_it_returns_the_same_object_and_does_nothing_twice():
    optimizer = keras.optimizers.Adam(0.1)
    before = optimizer.get_config()
    hooked = DistributedOptimizer(optimizer)
    apply = hooked.apply
    assert hooked is optimizer
    assert type(hooked) is keras.optimizers.Adam
    assert hooked.get_config() == before
    assert DistributedOptimizer(hooked) is hooked
    assert hooked.apply is apply


@pytest.mark.parametrize("lose", [
    copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o)),
    lambda o: type(o).from_config(o.get_config()),
    lambda o: keras.optimizers.deserialize(keras.optimizers.serialize(o))],
    ids=["deepcopy", "copy", "pickle", "from_config", "deserialize"])
def test_a_copy_has_lost_the_hook_and_fit_hooks_it(lose):
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.1))
    lost = lose(optimizer)
    assert is_distributed(optimizer)
    assert not is_distributed(lost)
    model = small_model()
    model.compile(lost, "mse")
    hvdtrain.fit(model, *data())
    assert is_distributed(model.optimizer)
    assert is_distributed(optimizer)


def test_a_loaded_model_goes_on(tmp_path):
    model = small_model()
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    hvdtrain.fit(model, *data())
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    hvdtrain.fit(loaded, *data())
    assert int(loaded.optimizer.iterations.numpy()) == 2


def test_an_uncompiled_model_is_refused():
    with pytest.raises(OptimizerError, match="not compiled"):
        hvdtrain.fit(small_model(), *data())


def test_something_else_than_an_optimizer_is_refused():
    with pytest.raises(OptimizerError, match="Expected a Keras optimizer object. Received: 'adam'"):
        DistributedOptimizer("adam")


@keras.saving.register_keras_serializable(package="acme")
class Signed(keras.optimizers.Optimizer):
    """A user's own optimizer."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


def test_a_registered_custom_optimizer_saves_and_loads_as_itself(tmp_path):
    model = small_model()
    model.compile(DistributedOptimizer(Signed(learning_rate=0.1)), "mse")
    hvdtrain.fit(model, *data())
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is Signed


@pytest.mark.parametrize("version", ["3.6.0", "3.0.5", "3.16.0", "4.0"])
def test_a_keras_that_is_not_known_is_refused(version):
    with pytest.raises(OptimizerError, match=f"Keras {version} is installed; hvdtrain knows 3.7"):
        keras_seam.check_keras(version)


def test_a_method_with_another_signature_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(keras.optimizers.Optimizer, "_clip_gradients", lambda self, g, x: g)
    with pytest.raises(OptimizerError, match=r"_clip_gradients\(grads\) was expected, found"):
        keras_seam.check_keras()


def test_a_loss_scale_optimizer_that_applies_elsewhere_is_refused_by_name(monkeypatch):
    """`calling_loss_scale` looks for this method on the stack."""
    monkeypatch.delattr(keras.optimizers.LossScaleOptimizer, "_stateful_handle_finite_grads")
    with pytest.raises(OptimizerError, match=r"LossScaleOptimizer\._stateful_handle_finite_grads"):
        keras_seam.check_keras()


def test_the_self_test_finds_a_keras_that_clips_elsewhere(monkeypatch):
    original = keras.optimizers.Optimizer._backend_apply_gradients

    def elsewhere(self, grads, trainable_variables):
        self._clip_gradients(grads)
        return original(self, grads, trainable_variables)
    monkeypatch.setattr(keras.optimizers.Optimizer, "_backend_apply_gradients", elsewhere)
    with pytest.raises(OptimizerError, match="does not apply gradients as expected"):
        keras_seam.self_test()


def test_the_self_test_passes_here():
    keras_seam.check_keras()
    keras_seam.self_test()


def test_a_step_that_xla_compiles_is_refused_with_what_to_do():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    v = keras.Variable([1.0])
    optimizer.build([v])

    @tf.function(jit_compile=True)
    def step(g):
        optimizer.apply([g], [v])
    with pytest.raises(OptimizerError, match="jit_compile=False"):
        step(tf.constant([1.0]))


def test_fit_switches_off_jit_compile_while_it_trains():
    model = small_model()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    seen = []
    hvdtrain.fit(
        model, *data(),
        callbacks=[keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(model.jit_compile))])
    assert (seen, model.jit_compile) == ([False], True)


def test_a_loss_scale_optimizer_around_a_distributed_one_is_refused():
    inner = DistributedOptimizer(keras.optimizers.SGD(0.1))
    outer = keras.optimizers.LossScaleOptimizer(inner)
    v = keras.Variable([1.0])
    outer.build([v])
    with pytest.raises(OptimizerError, match="not distributed"):
        outer.apply([tf.constant([1.0])], [v])


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("hooked", [False, True])
def test_no_phantom_step_at_the_end_of_a_data_set_of_unknown_size(hooked):
    x, y = data(12)

    def batches():
        for k in range(3):
            yield x[4 * k:4 * k + 4], y[4 * k:4 * k + 4]
    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model = small_model()
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(DistributedOptimizer(optimizer) if hooked else optimizer, "mse")
    model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    # Plain Keras counts a step that never was, once per epoch; the hook waits for data.
    assert int(optimizer.iterations.numpy()) == (6 if hooked else 8)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"),
                    reason="this Keras has no MultiOptimizer")
def test_optimizers_that_a_multi_optimizer_makes_when_it_is_built_are_hooked_too():
    made = []

    def choose(variable):
        made.append(keras.optimizers.SGD(0.1))
        return made[-1]
    optimizer = DistributedOptimizer(keras.optimizers.MultiOptimizer(choose))
    assert is_distributed(optimizer)
    optimizer.build([keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")])
    assert len(made) == 2
    assert all(is_distributed(leaf) for leaf in made)


def test_gradients_of_repeated_rows_are_merged_on_one_rank_too():
    table, dense = keras.Variable(np.ones((4, 2), "f4")), keras.Variable(np.ones((4, 2), "f4"))
    optimizers = [DistributedOptimizer(keras.optimizers.Adagrad(0.1)),
                  keras.optimizers.Adagrad(0.1)]
    for optimizer, variable in zip(optimizers, (table, dense), strict=True):
        optimizer.build([variable])
    slices = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([1, 1, 3]), tf.constant([4, 2]))
    optimizers[0].apply([slices], [table])
    optimizers[1].apply([tf.convert_to_tensor(slices)], [dense])
    np.testing.assert_allclose(table.numpy(), dense.numpy(), atol=1e-7)
