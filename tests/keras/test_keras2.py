"""Idioms of Keras 2, against what Keras 2 did; and what is refused, with the line to write."""

import ast
import importlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.script import keras2

X = np.random.default_rng(0).normal(size=(12, 4)).astype("f4")
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def _served():
    undo = keras2.install()
    yield
    undo()


def small(**settings):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(**{"optimizer": "sgd", "loss": "sparse_categorical_crossentropy",
                     "metrics": ["acc"]} | settings)
    return model


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        rows = slice(4 * number, 4 * number + 4)
        return X[rows], Y[rows]


def endless():
    while True:
        yield X[:4], Y[:4]


# Optimizers

@pytest.mark.parametrize("kind", [
    "SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"])
def test_lr_is_the_learning_rate_of_every_optimizer(kind):
    optimizer = getattr(keras.optimizers, kind)(lr=0.25)
    assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == 0.5
    legacy = getattr(tf.keras.optimizers.legacy, kind)(learning_rate=1)  # an integer
    assert type(legacy) is type(optimizer)
    assert float(legacy.lr) == 1.0


@pytest.mark.parametrize("accumulation", [None, 2])
def test_decay_divides_the_rate_by_one_plus_decay_times_the_updates_before(accumulation):
    variable = keras.Variable(np.zeros(1, "f4"))
    optimizer = keras.optimizers.SGD(lr=0.5, decay=0.25, gradient_accumulation_steps=accumulation)
    reached, expected = [], 0.0
    step = tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]))
    optimizer.build([variable])
    for update in range(5):
        for _ in range(accumulation or 1):
            step()
        expected -= 0.5 / (1 + 0.25 * update)
        reached.append(float(variable[0]) - expected)
    np.testing.assert_allclose(reached, 0, atol=1e-6)
    assert float(optimizer.lr) == 0.5  # the rate that callbacks read and set
    assert optimizer.decay == 0.25
    np.testing.assert_allclose(float(optimizer._decayed_lr(tf.float32)), 0.5 / (1 + 0.25 * 5))


@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_decay_is_saved_with_the_model_and_goes_on(name, tmp_path):
    model = small(optimizer=keras.optimizers.Adam(0.1, decay=0.5))
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / name)
    loaded = keras.models.load_model(tmp_path / name)
    assert loaded.optimizer.decay == 0.5
    for each in (model, loaded):
        each.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert keras.optimizers.SGD().decay == 0.0
    assert "decay" not in keras.optimizers.SGD().get_config()


def test_a_decay_below_zero_is_refused():
    with pytest.raises(ConfigError, match=r"decay must be 0 or more.*Received: -0\.1"):
        keras.optimizers.SGD(0.1, decay=-0.1)


def test_the_variables_of_an_optimizer_are_a_list_that_can_be_called():
    for optimizer in (keras.optimizers.Adam(0.1), keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.1))):
        optimizer.build([keras.Variable(np.zeros(2, "f4"))])
        assert [v is w for v, w in zip(optimizer.variables, optimizer.variables(), strict=True)]
        assert len(optimizer.weights) == len(optimizer.variables)
        values = [np.ones_like(value) for value in optimizer.get_weights()]
        optimizer.set_weights(values)
        assert all((value == 1).all() for value in optimizer.get_weights())


@pytest.mark.parametrize("taped", [False, True])
def test_minimize_makes_one_update(taped):
    variable, optimizer = keras.Variable([3.0]), keras.optimizers.SGD(0.1)
    if taped:
        with tf.GradientTape() as tape:
            loss = variable.value ** 2
        optimizer.minimize(loss, [variable], tape=tape)
    else:
        optimizer.minimize(lambda: variable.value ** 2, [variable])
    np.testing.assert_allclose(variable, [3.0 - 0.1 * 6.0])
    with pytest.raises(ConfigError, match=r"minimize\(loss, variables, tape=tape\)"):
        optimizer.minimize(tf.constant(1.0), [variable])


def test_what_unscales_gradients_twice_is_refused():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ConfigError, match=r"write loss = optimizer\.scale_loss\(loss\)"):
        optimizer.get_scaled_loss(1.0)
    with pytest.raises(ConfigError, match="divides the gradients by the loss scale itself"):
        optimizer.get_unscaled_gradients([])


# The backend

@pytest.mark.parametrize("package", ["keras.backend", "tensorflow.keras.backend"])
def test_set_value_and_get_value_of_the_learning_rate(package):
    backend = importlib.import_module(package)
    model = small(optimizer=keras.optimizers.SGD(lr=0.5))
    assert backend.get_value(model.optimizer.lr) == 0.5
    backend.set_value(model.optimizer.lr, backend.get_value(model.optimizer.lr) * 0.5)
    assert float(model.optimizer.learning_rate) == 0.25
    variable = tf.Variable([1, 2])
    backend.set_value(variable, [3.0, 4.0])
    assert variable.numpy().tolist() == [3, 4]
    assert float(backend.mean(tf.constant([1.0, 3.0]))) == 2.0
    rate = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)).lr
    with pytest.raises(ConfigError, match=r"K\.set_value takes a variable.*made with a schedule"):
        backend.set_value(rate, 0.1)
    with pytest.raises(ConfigError, match=r"optimizer\.momentum = 0\.9"):
        backend.set_value(0.8, 0.1)


@pytest.mark.parametrize(("call", "do"), [
    (lambda K: K.get_session(), r"K\.get_value\(variable\)"),
    (lambda K: K.set_learning_phase(1), r"model\(x, training=True\)"),
    (lambda K: K.learning_phase(), r"model\(x, training=True\)"),
    (lambda K: K.function([], []), r"keras\.Model\(inputs, outputs\), and call its predict")])
def test_what_has_no_place_in_keras_3_is_refused_with_the_line_to_write(call, do):
    for backend in (tf.keras.backend, keras.backend):
        with pytest.raises(ConfigError, match=do):
            call(backend)


@pytest.mark.parametrize("of", [lambda: tf, lambda: tf.compat.v1])
def test_the_device_pinning_of_horovod_scripts_has_no_effect(of):
    config = of().ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = "7"  # there is no such device
    session = of().Session(config=config)
    tf.compat.v1.keras.backend.set_session(session)
    with session, pytest.raises(ConfigError, match="TensorFlow 2 has no graph"):
        session.run([])
    of().set_random_seed(1)
    tf.compat.v1.disable_eager_execution()
    assert tf.executing_eagerly()
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as real:
        assert real.run(tf.constant(3)) == 3
    assert isinstance(real, tf.compat.v1.Session)


# Models

def test_arguments_of_compile_without_an_effect():
    model = small(experimental_run_tf_function=False, sample_weight_mode=None,
                  target_tensors=None, experimental_steps_per_execution=2)
    assert model.steps_per_execution == 2
    with pytest.raises(ConfigError, match=r"compile\(target_tensors=\.\.\.\).*Leave it out"):
        small(target_tensors=[1])


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_workers_are_those_of_the_sequence(method):
    data = Batches()
    getattr(small(), method)(data, workers=2, use_multiprocessing=False, max_queue_size=5,
                             verbose=0)
    assert (data.workers, data.use_multiprocessing, data.max_queue_size) == (2, False, 5)
    getattr(small(), method)(X, workers=4, verbose=0, **{} if method == "predict" else {"y": Y})


@pytest.mark.parametrize(("steps", "taken"), [(2.5, 3), (2.0, 2), (np.float64(7 / 3), 3)])
def test_steps_that_are_floats_are_rounded_up_as_keras_2_did(steps, taken):
    model = small()
    model.fit(endless(), steps_per_epoch=steps, validation_data=endless(), validation_steps=steps,
              shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == taken
    assert model.predict(endless(), steps=steps, verbose=0).shape == (4 * taken, 3)


@pytest.mark.parametrize("steps", [2, 5])
def test_each_epoch_begins_with_the_first_batch_of_a_sequence(steps):
    seen = []

    class Seen(Batches):
        def __getitem__(self, number):
            seen.append(number)
            return super().__getitem__(number)

    model = small()
    model.fit(Seen(), steps_per_epoch=steps, workers=1, epochs=3, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3 * steps
    assert seen[-3 * steps:] == [0, 1, 2, 0, 1][:steps] * 3
    seen.clear()
    model.fit(Seen(), steps_per_epoch=steps, workers=1, epochs=3, verbose=0,
              validation_data=Batches(), validation_steps=2)
    assert int(model.optimizer.iterations) == 6 * steps
    assert set(seen) == {0, 1, 2}


@pytest.mark.filterwarnings("ignore:Your `PyDataset` class should call")
def test_the_methods_for_generators_and_for_classes():
    class AsInKeras2(Batches):
        def __init__(self):
            pass

    model = small()
    history = model.fit_generator(
        AsInKeras2(), 2, 2, 0, validation_data=Batches(), max_queue_size=4, workers=1)
    assert int(model.optimizer.iterations) == 4
    assert set(history.history) == {"loss", "acc", "val_loss", "val_acc"}
    expected = model.evaluate(X, Y, batch_size=4, verbose=0)
    np.testing.assert_allclose(model.evaluate_generator(Batches(), workers=1), expected, rtol=1e-6)
    np.testing.assert_allclose(model.predict_generator(Batches(), steps=3),
                               model.predict(X, verbose=0), rtol=1e-6)
    np.testing.assert_array_equal(model.predict_classes(X), model.predict_proba(X).argmax(-1))
    single = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    np.testing.assert_array_equal(single.predict_classes(X), single.predict(X, verbose=0) > 0.5)
    with pytest.raises(ConfigError, match="takes 2 arguments by position"):
        model.predict_generator(Batches(), 1, None)


def test_metrics_names_are_those_of_what_evaluate_returns():
    model = small(metrics=["sparse_top_k_categorical_accuracy", "acc"])
    figures = model.evaluate(X, Y, verbose=0)
    assert model.metrics_names == ["loss", "sparse_top_k_categorical_accuracy", "acc"]
    assert dict(zip(model.metrics_names, figures, strict=True)) == model.evaluate(
        X, Y, verbose=0, return_dict=True)
    assert small(metrics=None).metrics_names == ["loss"]


def test_the_same_model_for_several_gpus():
    model = small()
    assert tf.keras.utils.multi_gpu_model(model, gpus=4) is model
    assert keras.utils.multi_gpu_model(model, 2) is model


def test_states_are_reset():
    layer = keras.layers.LSTM(2, stateful=True)
    model = keras.Sequential([keras.Input((3, 1), batch_size=2), layer])
    model.predict(np.ones((2, 3, 1)), verbose=0)
    assert np.abs(layer.states[0]).max() > 0
    model.reset_states()
    assert np.abs(layer.states[0]).max() == 0
    mean = tf.keras.metrics.Mean()
    mean.update_state(3.0)
    mean.reset_states()
    assert float(mean.result()) == 0.0


def test_add_weight_takes_its_name_first():
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight("factor", (shape[-1],), initializer="ones")
            self.offset = self.add_weight("offset", shape[-1:], "float32", "zeros", None, False)

    class Total(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="total")
            self.total = self.add_weight("total", initializer="zeros")

    layer = Scale()
    layer.build((None, 3))
    assert [(w.name, w.shape, w.trainable) for w in layer.weights] == [
        ("factor", (3,), True), ("offset", (3,), False)]
    assert Total().total.shape == ()


def test_losses_and_layers_of_keras_2():
    for package in (keras, tf.keras):
        np.testing.assert_allclose(package.losses.mean_squared_error([[0.0, 2.0]], [[1.0, 1.0]]), 1)
        assert package.layers.CuDNNLSTM is keras.layers.LSTM
    loss = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.AUTO)
    assert loss.reduction == "sum_over_batch_size"
    assert keras.layers.BatchNormalization(fused=True, momentum=0.5).momentum == 0.5


# Files

@pytest.mark.parametrize("name", ["weights.h5", "weights.hdf5", "weights", "cp-0001.ckpt"])
def test_weights_in_a_file_of_any_name(name, tmp_path):
    model, other = small(), small()
    model.save_weights(str(tmp_path / name), save_format="h5")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    other.load_weights(str(tmp_path / name))
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ConfigError, match="is there already"):
        model.save_weights(tmp_path / name, overwrite=False)


def test_the_latest_checkpoint_is_the_newest_file_of_weights_or_checkpoint(tmp_path):
    assert tf.train.latest_checkpoint(str(tmp_path / "none")) is None
    assert tf.train.latest_checkpoint(str(tmp_path)) is None
    model = small()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(
        str(tmp_path / "cp-{epoch:04d}.ckpt"), save_weights_only=True)])
    (tmp_path / "notes.txt").write_text("no weights")
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "cp-0002.ckpt")
    other = small()
    other.load_weights(tf.train.latest_checkpoint(str(tmp_path)))
    np.testing.assert_array_equal(other.weights[0], model.weights[0])
    made = tf.train.Checkpoint(model=model).save(str(tmp_path / "tf"))
    assert tf.train.latest_checkpoint(str(tmp_path)) == made


def test_shapes_of_layers():
    model = small()
    dense = model.layers[-1]
    assert (dense.input_shape, dense.output_shape) == ((None, 4), (None, 3))
    assert model.output_shape == (None, 3)
    with pytest.raises(AttributeError):
        _ = keras.layers.Dense(1).output_shape
    two = keras.layers.Add()
    two([keras.Input((2,)), keras.Input((2,))])
    assert two.input_shape == [(None, 2), (None, 2)]


def test_weights_files_are_those_of_keras_2(tmp_path):
    """The layout that Keras 2 wrote and reads: layers by name, each with its weights' names."""
    import h5py
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
    model.save_weights(tmp_path / "w.h5")
    with h5py.File(tmp_path / "w.h5") as file:
        assert [str(n) for n in file.attrs["layer_names"]] == ["dense"]
        kernel, bias = (str(n) for n in file["dense"].attrs["weight_names"])
        np.testing.assert_array_equal(file["dense"][kernel], model.weights[0])
        np.testing.assert_array_equal(file["dense"][bias], model.weights[1])
    by_name = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense"),
                                keras.layers.Dense(2, name="new")])
    by_name.load_weights(tmp_path / "w.h5", by_name=True)
    np.testing.assert_array_equal(by_name.weights[0], model.weights[0])


@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_from_an_hdf5_file_trains_on_from_its_optimizers_state(scaled, tmp_path):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = small(optimizer=keras.optimizers.LossScaleOptimizer(optimizer) if scaled
                  else optimizer)
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    model.save(tmp_path / "m.h5")
    loaded = keras.models.load_model(tmp_path / "m.h5")
    for each in (model, loaded):
        each.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert int(loaded.optimizer.iterations) == 9
    for ours, theirs in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "weights_only"), [
    ("x-{epoch}.h5", True), ("x-{epoch}", True), ("x-{epoch}.weights.h5", True),
    ("x-{epoch}.hdf5", False), ("x-{epoch}.h5", False)])
def test_checkpoints_every_so_many_epochs_under_any_name(name, weights_only, tmp_path):
    model = small()
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / name), save_weights_only=weights_only, period=2, save_best_only=False)
    model.fit(X, Y, epochs=5, verbose=0, callbacks=[checkpoint])
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {name.format(epoch=2), name.format(epoch=4)}
    model.load_weights(str(tmp_path / name.format(epoch=4)))
    with pytest.raises(ConfigError, match=r"Write model\.load_weights\(path\) before fit"):
        keras.callbacks.ModelCheckpoint("x.h5", load_weights_on_restart=True)


def test_a_figure_that_keras_3_does_not_know_is_minimized_and_an_accuracy_maximized(tmp_path):
    def dice(y_true, y_pred):
        return keras.ops.mean(y_pred)

    for monitor, up in (("val_dice", False), ("val_own_acc", True)):
        found = keras.callbacks.ModelCheckpoint(
            str(tmp_path / "m.keras"), monitor=monitor, save_best_only=True)
        small(metrics=[dice]).fit(
            X, Y, validation_data=(X, Y), verbose=0, callbacks=[
                keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: logs.update(
                    val_own_acc=1.0)), found])
        assert bool(found.monitor_op(2.0, 1.0)) is up


def test_arguments_of_tensorboard_without_an_effect(tmp_path):
    keras.callbacks.TensorBoard(str(tmp_path), batch_size=32, write_grads=True)


# Modules

@pytest.mark.parametrize(("module", "name", "is_"), [
    ("keras.layers.core", "Dense", "keras.layers.Dense"),
    ("keras.layers.normalization", "BatchNormalization", "keras.layers.BatchNormalization"),
    ("tensorflow.keras.layers.experimental.preprocessing", "Rescaling", "keras.layers.Rescaling"),
    ("keras.engine.topology", "Layer", "keras.Layer"),
    ("keras.engine", "Model", "keras.Model"),
    ("keras.utils.np_utils", "to_categorical", "keras.utils.to_categorical"),
    ("keras.backend.tensorflow_backend", "clear_session", "keras.backend.clear_session"),
    ("keras.objectives", "mean_squared_error", "keras.losses.mean_squared_error"),
    ("keras.preprocessing.text", "Tokenizer", "tf.keras.preprocessing.text.Tokenizer"),
    ("keras.preprocessing.image", "ImageDataGenerator",
     "tf.keras.preprocessing.image.ImageDataGenerator"),
    ("tensorflow.keras.experimental", "CosineDecay", "keras.optimizers.schedules.CosineDecay"),
    ("tensorflow.keras.mixed_precision.experimental", "Policy", "keras.mixed_precision.Policy"),
    ("tensorflow.keras.optimizers.legacy", "Adam", "keras.optimizers.Adam"),
    ("keras.optimizers.legacy", "SGD", "keras.optimizers.SGD"),
    ("tensorflow.keras.utils", "Sequence", "keras.utils.PyDataset")])
def test_modules_of_keras_2(module, name, is_):
    made = getattr(importlib.import_module(module), name)
    assert made is eval(is_, {"keras": keras, "tf": tf})
    found = tf if module.startswith("tensorflow") else keras
    for part in module.split(".")[1:]:
        found = getattr(found, part)
    assert getattr(found, name) is made


def test_the_copy_of_keras_2_within_tensorflow_is_refused():
    from tensorflow.python.keras.engine.training import Model
    with pytest.raises(ConfigError, match=r"Import from tensorflow\.keras in place of"):
        Model.fit(None)


# What is said, and what is left behind

@pytest.mark.parametrize(("code", "said"), [
    ("model.optimizer.lr", "`lr` is the optimizer's `learning_rate`"),
    ("args.lr", None),
    ("Adam(lr=0.1, decay=1e-6)", "`lr` is the optimizer's `learning_rate`; `decay`: the rate is "
     "learning_rate / (1 + decay * iterations)"),
    ("tf.keras.optimizers.Adam(0.1)", None),
    ("model.fit(x, y, workers=4)", "`workers` is that of the `Sequence`; other data are read as "
     "Keras 3 does"),
    ("model.fit(x, steps_per_epoch=len(x) / 32)", "`steps_per_epoch` is rounded up"),
    ("model.fit(x, steps_per_epoch=n / 32 // hvd.size())", None),
    ("model.fit(x, y, epochs=3)", None),
    ("model.fit_generator(g)", "fit_generator: `fit`"),
    ("model.save_weights('x.h5')", "an HDF5 file with the weights, in the format of Keras 2"),
    ("model.save_weights('x.weights.h5')", None),
    ("ModelCheckpoint('x-{epoch}.h5', save_weights_only=True, period=2)",
     "`period`: saved every so many epochs; an HDF5 file with the weights, in the format of "
     "Keras 2"),
    ("ModelCheckpoint('folder')", "refused: write a path with .keras, or model.export(path) for "
     "a SavedModel"),
    ("ModelCheckpoint('x.h5')", None),
    ("tf.keras.optimizers.legacy", "the optimizers of Keras 3; RMSprop and Adagrad add epsilon "
     "under the root"),
    ("from keras.layers.core import Dense", "keras.layers.core: `keras.layers`"),
    ("import keras.engine.topology", "keras.engine: `keras`"),
    ("from tensorflow.keras.layers.experimental import preprocessing",
     "keras.layers.experimental: `keras.layers`"),
    ("from tensorflow.keras import layers", None),
    ("from tensorflow.python.keras.models import Model",
     "refused: TensorFlow's private copy of Keras 2. Write tensorflow.keras"),
    ("tf.random.set_seed",
     "seeds no weights of Keras 3: write `keras.utils.set_random_seed`"),
    ("keras.utils.set_random_seed", None),
    ("K.set_session(tf.Session(config=config))",
     "set_session: no effect: each rank sees its own device only")])
def test_what_is_said_of_a_line(code, said):
    statement = ast.parse(code).body[0]
    assert keras2.remark(getattr(statement, "value", statement)) == said


def test_what_is_said_needs_no_tensorflow():
    program = ("import ast, sys\nfrom hvdtrain.script import keras2\n"
               "print(keras2.remark(ast.parse('a.fit_generator(b)').body[0].value))\n"
               "print({'tensorflow', 'keras', 'numpy'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True)
    assert done.stdout == "fit_generator: `fit`\nset()\n"


def _everything():
    """What the patches could leave behind: modules, and what Keras' modules and classes hold."""
    modules = {name: module for name, module in sys.modules.items()
               if name.split(".")[0] == "keras" or name.startswith("tensorflow.keras")
               or module in (tf, tf.compat.v1)}
    kinds = {kind for module in modules.values() for kind in vars(module).values()
             if isinstance(kind, type) and kind.__module__.startswith("keras.")}
    return {(id(holder), name): value for holder in [*modules.values(), *kinds]
            for name, value in vars(holder).items()
            if not name.startswith("_abc") and name != "__static_attributes__"} | modules


def test_undo_leaves_keras_as_it_was_and_installing_twice_is_once():
    keras2.install()()
    keras2.install()()  # Keras' modules are imported by now
    before = _everything()
    undo = keras2.install()
    during = _everything()
    assert keras2.install() is undo
    again = _everything()
    assert {key for key in again if again[key] is not during.get(key)} == set()
    undo()
    after = _everything()
    assert len(during) > len(before)
    assert {key for key in {*before, *after} if before.get(key) is not after.get(key)} == set()
    undo()
    with pytest.raises(ValueError, match="not recognized"):
        keras.optimizers.Adam(lr=0.1)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("keras.engine.topology")


def test_methods_that_stand_behind_are_called_and_come_back(monkeypatch):
    keras2.install()()
    seen = []
    monkeypatch.setattr(keras.Model, "fit", lambda self, x=None, steps_per_epoch=None, **kwargs:
                        seen.append((x, steps_per_epoch, kwargs)), raising=False)
    behind = keras.Model.fit
    undo = keras2.install()
    small().fit([1], workers=3, steps_per_epoch=1.5, epochs=2)
    assert seen == [([1], 2, {"epochs": 2})]
    undo()
    assert keras.Model.fit is behind
