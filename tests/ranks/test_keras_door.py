"""`model.fit`, `evaluate` and `predict` of a distributed model against those of plain Keras.

Every kind of data and every argument that Keras takes, on two and three ranks: weights, history,
figures and predictions are those of one process with the same batch.
"""

import time

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

TWO = pytest.mark.ranks(2)
THREE = pytest.mark.ranks(3)


def both(function):
    """The same test on two and on three ranks."""
    return pytest.mark.parametrize("ranks", [
        pytest.param(2, marks=TWO), pytest.param(3, marks=THREE)])(function)


def numbers(n=50, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype("f4")
    return x, (np.abs(x[:, :1] * 3).astype("i4") % 3)[:, 0]


def classifier(keras, optimizer=None, **compiled):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer or keras.optimizers.Adam(0.02), **{
        "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compiled})
    return model


def two_and_two(keras, named):
    """Two inputs and two outputs, by name or in order.

    Keras' figure of one output's loss is a mean over batches, ours over samples: the batches of
    these tests have the same size.
    """
    keras.utils.set_random_seed(3)
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    both = keras.layers.Concatenate()([a, b])
    p, q = keras.layers.Dense(1, name="p")(both), keras.layers.Dense(1, name="q")(both)
    model = (keras.Model({"a": a, "b": b}, {"p": p, "q": q}) if named
             else keras.Model([a, b], [p, q]))
    losses = {"p": "mse", "q": "mae"} if named else ["mse", "mae"]
    model.compile(keras.optimizers.SGD(0.1), losses, loss_weights=(
        {"p": 1.0, "q": 0.3} if named else [1.0, 0.3]))
    return model


def rows(tf, n=50):
    return tf.data.Dataset.from_tensor_slices(numbers(n))


def batches_of(keras, x, y, batch=16, **options):
    class Batches(keras.utils.PyDataset):
        epochs = 0

        def __len__(self):
            return -(-len(x) // batch)

        def __getitem__(self, number):
            part = slice(number * batch, (number + 1) * batch)
            return x[part] + 0.1 * self.epochs, y[part]

        def on_epoch_end(self):
            self.epochs += 1
    return Batches(**options)


def weights_of_samples(y):
    return 0.5 + (y % 3).astype("f4")


def _arrays(keras, tf):
    x, y = numbers()
    return {"x": x, "y": y, "batch_size": 16, "epochs": 3}


def _validation(keras, tf):
    x, y = numbers()
    return {"x": x, "y": y, "batch_size": 15, "epochs": 4, "validation_split": 0.3,
            "validation_freq": 2, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}


def _frames(keras, tf):
    pandas = pytest.importorskip("pandas")
    x, y = numbers()
    return {"x": pandas.DataFrame(x), "y": pandas.Series(y), "epochs": 2,
            "sample_weight": pandas.Series(weights_of_samples(y)),
            "validation_data": (x[:17], y[:17], weights_of_samples(y[:17])),
            "validation_batch_size": 5}


def _steps(keras, tf):
    x, y = numbers()
    return {"x": tf.constant(x), "y": tf.constant(y), "steps_per_epoch": 3, "epochs": 4,
            "batch_size": 16, "initial_epoch": 1, "shuffle": "batch", "validation_steps": 2,
            "validation_data": rows(tf, 30).batch(7)}


def _pipeline(keras, tf):
    return {"x": rows(tf).shuffle(50, seed=1).map(lambda x, y: (2 * x, y)).batch(16).prefetch(1),
            "epochs": 3, "shuffle": False, "validation_data": rows(tf, 17).batch(5)}


def _endless(keras, tf):
    return {"x": rows(tf).shuffle(9).repeat().batch(13), "steps_per_epoch": 3, "epochs": 2,
            "shuffle": False, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}


def _filtered(keras, tf):
    kept = rows(tf).filter(lambda x, y: y < 2)
    return {"x": kept.batch(8).map(lambda x, y: (x, y, tf.ones_like(y, tf.float32) * 2)),
            "epochs": 2, "shuffle": False}


def _dataset(keras, tf):
    return {"x": batches_of(keras, *numbers()), "epochs": 3,
            "validation_data": batches_of(keras, *numbers(20, seed=1), batch=6)}


def _generator(keras, tf):
    x, y = numbers()

    def made():
        for _ in range(2):
            for begin in range(0, 48, 16):
                yield x[begin:begin + 16], y[begin:begin + 16]
    return {"x": made(), "steps_per_epoch": 3, "epochs": 2, "shuffle": False}


CASES = [_arrays, _validation, _frames, _steps, _pipeline, _endless, _filtered, _dataset,
         _generator]


def assert_like_plain(ours, plain, history, expected, atol=1e-6):
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=atol)
    assert history.epoch == expected.epoch
    assert {*history.history} == {*expected.history, "learning_rate"}
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, atol=2 * atol, err_msg=name)


@both
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of both
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_fit_is_that_of_keras(case, ranks, rank_session, keras, tf):
    import hvdtrain
    # At the end of data of unknown length Keras counts a step more, which Adam looks at.
    made = keras.optimizers.SGD if case is _filtered else keras.optimizers.Adam
    plain, ours = (classifier(keras, made(0.02)) for _ in range(2))
    hvdtrain.distribute(ours)
    found = []
    for model in (plain, ours):
        keras.utils.set_random_seed(7)
        with hvdtrain.alone():
            found.append(model.fit(**case(keras, tf), verbose=0))
    assert_like_plain(ours, plain, found[1], found[0])
    assert_same_everywhere(rank_session, ours.weights)


@TWO
@pytest.mark.parametrize("case", ["twice", "epoch by epoch", "other data", "compiled again",
                                  "set again"])
def test_a_step_is_traced_as_often_as_by_keras(case, rank_session, keras, tf):
    """With equal results; what a compile or a setting changes is in the step."""
    import hvdtrain
    x, y = numbers(48)
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            if not tf.executing_eagerly():
                traces.append(self.name)
            return x

    def trained(ours):
        model = classifier(keras)
        model = keras.Sequential([keras.Input((6,)), *model.layers, Counted()])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        config = hvdtrain.TrainConfig(shuffle=False)
        found = []
        for number in range(3):
            if case == "compiled again" and number:
                model.layers[0].trainable = number == 2
                model.compile(keras.optimizers.SGD(0.1 / number), "sparse_categorical_crossentropy")
            if case == "set again" and number == 2:
                config = hvdtrain.TrainConfig(shuffle=False, compression="fp16")
            if ours:
                hvdtrain.distribute(model, config=config)
            data = (x, y) if case != "other data" or number != 1 else (
                tf.data.Dataset.from_tensor_slices((x, y.astype("i8"))).batch(16),)
            begin = len(traces)
            for _ in range(3) if case == "epoch by epoch" else [0]:
                model.fit(*data, batch_size=16, shuffle=False, verbose=0)
            found.append(len(traces) - begin)
        return found, model
    with hvdtrain.alone():
        expected, plain = trained(ours=False)
    found, model = trained(ours=True)
    if case == "set again":  # another step, which Keras does not know
        assert found[1] <= expected[1] < found[2]
    else:
        assert [ours <= theirs for ours, theirs in zip(found, expected, strict=True)] == [True] * 3
    if case == "twice":
        assert found[1:] == [0, 0]
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3 if case == "set again" else 1e-6)


@TWO
@pytest.mark.parametrize("called", [True, False])
def test_a_sequential_that_its_first_batch_builds_takes_others(called, rank_session, keras):
    import hvdtrain
    x, y = numbers()
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    if called:
        model(x[:1])
    model.compile("sgd", "sparse_categorical_crossentropy")
    hvdtrain.distribute(model)
    losses = [model.fit(x, y, batch_size=size, verbose=0).history["loss"][0] for size in (16, 12)]
    assert losses[1] < losses[0]
    assert model.predict(x, verbose=0).shape == (50, 3)


@TWO
@pytest.mark.parametrize("compiled", [{"steps_per_execution": 2}, {"run_eagerly": True}],
                         ids=lambda compiled: next(iter(compiled)))
def test_settings_of_compile(compiled, rank_session, keras, tf):
    import hvdtrain
    plain, ours = (classifier(keras, **compiled) for _ in range(2))
    hvdtrain.distribute(ours)
    for data in (numbers(), (rows(tf).batch(16),)):
        given = {"batch_size": 15, "epochs": 2, "shuffle": False, "verbose": 0}
        with hvdtrain.alone():
            expected = plain.fit(*data, **given, validation_data=rows(tf, 20).batch(6))
        history = ours.fit(*data, **given, validation_data=rows(tf, 20).batch(6))
        assert_like_plain(ours, plain, history, expected)
    np.testing.assert_allclose(ours.predict(numbers()[0], verbose=0),
                               plain.predict(numbers()[0], verbose=0), atol=1e-6)
    assert ours.steps_per_execution == plain.steps_per_execution
    assert ours.fit(*numbers(), epochs=0).history == {}


@TWO
def test_a_callback_may_end_a_training_whose_loss_is_not_finite(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import NotFiniteError
    x, y = numbers()
    x[5] = np.nan
    ends = [keras.callbacks.TerminateOnNaN()]
    model = hvdtrain.distribute(classifier(keras))
    history = model.fit(x, y, epochs=9, verbose=0, callbacks=ends)
    assert len(history.epoch) == 1
    with pytest.raises(NotFiniteError):
        hvdtrain.distribute(classifier(keras)).fit(x, y, epochs=9, verbose=0)


@both
@pytest.mark.parametrize("named", [True, False], ids=["dictionaries", "lists"])
def test_several_inputs_and_outputs(named, ranks, rank_session, keras, tf):
    import hvdtrain
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(22, 3)).astype("f4") for _ in range(2))
    x, y = ({"a": a, "b": b}, {"p": a[:, :1], "q": b[:, :1]}) if named else (
        [a, b], [a[:, :1], b[:, :1]])
    weight = ({"p": np.ones(22), "q": np.arange(22) / 9.0} if named else
              [np.ones(22), np.arange(22) / 9.0])
    plain, ours = (two_and_two(keras, named) for _ in range(2))
    hvdtrain.distribute(ours)
    with hvdtrain.alone():
        expected = plain.fit(x, y, sample_weight=weight, batch_size=11, epochs=2, shuffle=False,
                             verbose=0, validation_data=(x, y))
    history = ours.fit(x, y, sample_weight=weight, batch_size=11, epochs=2, shuffle=False,
                       verbose=0, validation_data=(x, y))
    assert_like_plain(ours, plain, history, expected)
    for one, other in zip(tf.nest.flatten(ours.predict(x, batch_size=4, verbose=0)),
                          tf.nest.flatten(plain.predict(x, verbose=0)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    np.testing.assert_allclose(ours.evaluate(x, y, batch_size=4, verbose=0),
                               plain.evaluate(x, y, verbose=0), atol=1e-6)


@THREE
def test_texts_and_tensors_that_are_not_dense(rank_session, keras, tf):
    import hvdtrain
    texts = np.asarray(["one two", "two three four", "four", "one four two", "five"] * 4)
    y = np.arange(20, dtype="f4")[:, None] / 10
    keras.utils.set_random_seed(3)

    def made():
        keras.utils.set_random_seed(3)
        words = keras.layers.TextVectorization(output_sequence_length=3)
        words.adapt(texts)
        model = keras.Sequential([keras.Input((), dtype="string"), words,
                                  keras.layers.Embedding(9, 4), keras.layers.Flatten(),
                                  keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model
    plain, ours = made(), hvdtrain.distribute(made())
    for data in ((tf.constant(texts), y),
                 (tf.data.Dataset.from_tensor_slices((texts, y)).batch(7),)):
        with hvdtrain.alone():
            expected = plain.fit(*data, batch_size=7, shuffle=False, verbose=0)
        history = ours.fit(*data, batch_size=7, shuffle=False, verbose=0)
        assert_like_plain(ours, plain, history, expected)
    sparse = tf.sparse.from_dense(np.eye(12, 6, dtype="f4"))
    plain, ours = classifier(keras), hvdtrain.distribute(classifier(keras))
    labels = np.arange(12) % 3
    with hvdtrain.alone():
        expected = plain.fit(sparse, labels, batch_size=5, shuffle=False, verbose=0)
    assert_like_plain(
        ours, plain, ours.fit(sparse, labels, batch_size=5, shuffle=False, verbose=0), expected)


@both
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_evaluate_and_predict_are_those_of_keras(ranks, rank_session, keras, tf):
    import hvdtrain
    plain, ours = classifier(keras), hvdtrain.distribute(classifier(keras))
    x, y = numbers(23)
    kinds = [((x, y), {"batch_size": 1}), ((x, y), {"batch_size": 4, "steps": 3}),
             ((x, y), {"sample_weight": weights_of_samples(y)}),
             ((rows(tf, 23).batch(5),), {}), ((rows(tf, 23).repeat().batch(5),), {"steps": 4}),
             (None, {})]
    for data, given in kinds:
        def again(data=data):
            return data or (batches_of(keras, x, y, 4),)  # its samples change with the epochs
        expected = plain.evaluate(*again(), **given, verbose=0, return_dict=True)
        found = ours.evaluate(*again(), **given, verbose=0, return_dict=True)
        assert found == pytest.approx(expected, abs=1e-6)
        given = {k: v for k, v in given.items() if k != "sample_weight"}
        np.testing.assert_allclose(ours.predict(again()[0], **given, verbose=0),
                                   plain.predict(again()[0], **given, verbose=0), atol=1e-6)
    assert ours.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0),
                                                           abs=1e-6)


@TWO
def test_what_the_batch_means_is_said_once(rank_session, keras, tf, capsys):
    """`global`: that of the script; `per_rank`: that of each, and the rate is scaled."""
    import hvdtrain
    from hvdtrain.errors import ConfigError, DataError
    x, y = numbers(40)
    for data, given in (((x, y), {"batch_size": 8}),
                        ((rows(tf, 40).batch(8),), {})):
        plain = classifier(keras, keras.optimizers.SGD(0.2))
        config = hvdtrain.TrainConfig(batch="per_rank")
        ours = hvdtrain.distribute(classifier(keras, keras.optimizers.SGD(0.1)), config=config)
        with hvdtrain.alone():
            plain.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=2)
        history = ours.fit(*data, **given, shuffle=False, verbose=0, epochs=2)
        for a, b in zip(ours.weights, plain.weights, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
        assert history.history["learning_rate"] == pytest.approx([0.2, 0.2])
    if rank_session.world.is_chief:
        assert "16 global = 8 per rank x 2" in capsys.readouterr().out
    model = classifier(keras)
    for config, error, message in (
            ({"batch_per_rank": 4}, ConfigError, "two ways: batch_size=8, batch_per_rank=4"),
            ({"batch_global": 8}, ConfigError, "two ways: batch_size=8, batch_global=8")):
        with pytest.raises(error, match=message):
            hvdtrain.fit(model, x, y, batch_size=8, config=hvdtrain.TrainConfig(**config))
    with pytest.raises(ConfigError, match=r"cannot change the batches that a tf\.data\.Dataset"):
        hvdtrain.fit(model, rows(tf).batch(8), shuffle=False,
                     config=hvdtrain.TrainConfig(batch_per_rank=4))
    with pytest.raises(DataError, match="batch of 1 samples is divided over 2 ranks"):
        hvdtrain.fit(model, x, y, batch_size=1)


@THREE
def test_a_global_batch_that_does_not_divide(rank_session, keras):
    """Of samples that hvdtrain reads, as a job trains on them; rate and figures stay as well."""
    import hvdtrain
    x, y = numbers(53)
    plain, ours = (classifier(keras, keras.optimizers.SGD(0.1)) for _ in range(2))
    with hvdtrain.alone():
        expected = plain.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0,
                             validation_data=(x[:20], y[:20]))
    history = hvdtrain.fit(
        ours, hvdtrain.ArraySource((x, y)), verbose=0,
        validation_data=hvdtrain.ArraySource((x[:20], y[:20])),
        config=hvdtrain.TrainConfig(batch_global=16, epochs=2, shuffle=False))
    assert_like_plain(ours, plain, history, expected)
    assert history.history["learning_rate"] == pytest.approx([0.1, 0.1])


@TWO
def test_the_order_of_a_script_without_a_seed_is_drawn_anew_in_each_epoch(rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.data.keras_adapters import adapter_of
    from hvdtrain.data.plans import Part
    from hvdtrain.train.own_loop import agree_on_seeds, drawn_seed
    tf.random.set_seed(rank_session.world.rank)
    agree_on_seeds(rank_session.collective)
    assert drawn_seed() is not None
    part = Part(rank=rank_session.world.rank, size=2)
    adapter = adapter_of(np.arange(20), part=part, batch_size=4, shuffle=True, seed=drawn_seed())
    epochs = []
    for _ in range(2):
        adapter.on_epoch_begin()
        mine = [int(i) for batch in adapter.get_tf_dataset() for i in batch]
        everyone = rank_session.collective.gather_objects(mine)
        assert sorted(everyone[0] + everyone[1]) == list(range(20))
        epochs.append(everyone)
        adapter.on_steps_done()
    assert epochs[0] != epochs[1]
    keras.utils.set_random_seed(1)
    assert drawn_seed() is None
    assert hvdtrain.fit(classifier(keras), *numbers(), verbose=0).history["loss"]


@TWO
def test_a_distributed_model_saves_once_and_whole(rank_session, keras, tf, tmp_path):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    folder = rank_session.collective.gather_objects(str(tmp_path))[0]
    model = hvdtrain.distribute(classifier(keras))
    model.fit(*numbers(), verbose=0)
    written = []
    original = keras.Model.save
    for name, write in (("m.keras", model.save), ("w.weights.h5", model.save_weights),
                        ("exported", model.export),
                        ("f.keras", lambda path: keras.saving.save_model(model, path))):
        write(f"{folder}/{name}")
        written.append(name)
    assert keras.models.load_model(f"{folder}/f.keras")
    loaded = keras.models.load_model(f"{folder}/m.keras")  # there on every rank
    assert_same_everywhere(rank_session, loaded.weights)
    assert type(loaded).save is original
    assert "fit" not in vars(loaded)
    plain = classifier(keras)
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(f"{folder}/w.weights.h5")
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert tf.saved_model.contains_saved_model(f"{folder}/exported")
    with pytest.raises(ConfigError, match="is there already"):
        model.save(f"{folder}/m.keras", overwrite=False)
    with pytest.raises(Exception, match="nowhere"):  # on every rank, not on the chief alone
        model.save(f"{folder}/nowhere/m.keras")


@TWO
def test_what_a_distributed_model_saves_in_a_training(rank_session, keras, tmp_path):
    """The files of a run, of a callback of the chief, and of one that every rank runs."""
    import hvdtrain
    folder = rank_session.collective.gather_objects(str(tmp_path))[0]
    best = keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", save_freq=2)
    hooks = {name: getattr(best, name) for name in ("on_epoch_end", "on_train_batch_end")}

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.save(f"{folder}/{epoch}.keras")
            assert keras.models.load_model(f"{folder}/{epoch}.keras")
    model = hvdtrain.distribute(classifier(keras), config=hvdtrain.TrainConfig(
        output=f"{folder}/run", tensorboard=False))
    model.fit(*numbers(), epochs=2, verbose=0, callbacks=[best, Save()])
    for name in ("run/model.keras", "run/checkpoints/epoch-00002.keras", "best.keras", "1.keras"):
        loaded = keras.models.load_model(f"{folder}/{name}")
        assert_same_everywhere(rank_session, loaded.weights)
    assert {name: getattr(best, name) for name in hooks} == hooks
    model.save(f"{folder}/after.keras")


@TWO
def test_a_second_training_goes_on_with_the_shuffles_of_a_pipeline(rank_session, keras, tf):
    import hvdtrain
    found = []
    for distributed in (False, True):
        keras.utils.set_random_seed(5)
        data = rows(tf).map(lambda x, y: (2 * x, y)).shuffle(50).batch(16)
        model = classifier(keras)
        if distributed:
            hvdtrain.distribute(model)
        histories = [model.fit(data, epochs=epochs, shuffle=False, verbose=0).history["loss"]
                     for epochs in (1, 2)]
        found.append(np.concatenate(histories))
    np.testing.assert_allclose(*found, atol=2e-6)


@TWO
def test_what_is_put_on_a_model_is_taken_away(rank_session, keras):
    import hvdtrain
    model = classifier(keras)
    before = set(vars(model)), set(vars(model.optimizer))

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt
    hvdtrain.distribute(model)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*numbers(), verbose=0, callbacks=[Stop()])
    during = set(vars(model)) - before[0]
    model.fit(*numbers(), verbose=0)
    assert set(vars(model)) - before[0] == during
    hvdtrain.distribute(model)  # once more: what was asked of the optimizer stays
    assert hvdtrain.is_distributed(model.optimizer)
    hvdtrain.undistribute(model)
    left = set(vars(model)) - before[0]
    assert not {"fit", "evaluate", "predict", "save", "save_weights", "export", "train_step",
                "_get_metrics_result_or_logs"} & left
    assert not [name for name in left if name.startswith("_hvdtrain")]
    assert not hvdtrain.is_distributed(model.optimizer)
    model.fit(*numbers(), verbose=0)  # plain Keras, on this rank alone


@TWO
def test_mistakes_of_scripts_are_told_on_all_ranks(rank_session, keras, tf, tmp_path):
    import hvdtrain
    from hvdtrain.errors import ConfigError, DataError, OptimizerError
    x, y = numbers()
    rank = rank_session.world.rank
    model = hvdtrain.distribute(classifier(keras))
    uncompiled = hvdtrain.distribute(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    with pytest.raises(OptimizerError, match=r"Call model\.compile\(optimizer, loss\)"):
        uncompiled.fit(x, y)
    with pytest.raises(OptimizerError, match=r"Expected a Keras optimizer.*'adam'"):
        hvdtrain.DistributedOptimizer("adam")
    with pytest.raises(ConfigError, match=r"no argument 'validation'.*write validation_data="):
        model.fit(x, y, validation=(x, y))
    with pytest.raises(ConfigError, match=r"TrainConfig\(lr_scaling='sqrt'\)"):
        model.fit(x, y, lr_scaling="sqrt")
    with pytest.raises(DataError, match="training data of rank 1 differ"):
        model.fit(x + rank, y, verbose=0)
    with pytest.raises(DataError, match="training data of rank 1 differ"):
        model.fit(batches_of(keras, x, y + rank), verbose=0)
    with pytest.raises(DataError, match="rank 1 reads another order"):
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=rank).batch(8),
                  shuffle=False)
    with pytest.raises(DataError, match=r"those of rank 0 \(41 samples, and 40\)"):
        model.fit(x[:40 + rank], y[:40 + rank], verbose=0)
    with pytest.raises(ConfigError, match="rank 0 calls fit with arrays, rank 1 calls evaluate"):
        (model.fit if rank == 0 else model.evaluate)(x, y, verbose=0)
    with pytest.raises(DataError, match=r"tuple of 2 arrays.*Write fit\(model, x, y\)"):
        model.fit((x, y))
    with pytest.raises(DataError, match=r"single samples of the model's input.*\.batch\("):
        model.fit(rows(tf), shuffle=False)
    if rank == 1:
        with pytest.raises(ConfigError, match="rank 0 does something else, such as saving the"):
            model.evaluate(x, y)
    else:
        model.save(tmp_path / "m.keras")
    with pytest.raises(ConfigError, match=r"callbacks is .*(none|Callback)"):
        model.fit(x, y, callbacks=[keras.callbacks.Callback()] if rank == 0 else None)
    with pytest.raises(ConfigError, match="callbacks must be .* Received: 'x'"):
        model.fit(x, y, callbacks=["x"])
    with pytest.raises(ConfigError, match="batch of the evaluation data is 8 on rank 0 and 9 on"):
        model.evaluate(x, y, batch_size=8 + rank, verbose=0)
    with pytest.raises(DataError, match="evaluation data of rank 1 differ"):
        model.evaluate(x + rank, y, verbose=0)
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        model.fit(x, y, batch_size=-3)
    with pytest.raises(ConfigError, match="train_on_batch would train each rank alone"):
        model.train_on_batch(x, y)
    with pytest.raises(ConfigError, match="distribute takes a keras.Model. Received: list"):
        hvdtrain.distribute([model])
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3 + rank)])
    other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(hvdtrain.HvdtrainError, match="rank 1"):
        hvdtrain.distribute(other).fit(x, y, verbose=0)
    assert model.fit(x, y, verbose=0).history["loss"]


@TWO
def test_arrays_of_a_data_set_are_left_as_they_are(rank_session, keras):
    """TensorFlow takes them without a copy where their address is a multiple of 64."""
    import hvdtrain

    def aligned(array):
        space = np.empty(array.nbytes + 64, "u1")
        start = -space.ctypes.data % 64
        made = space[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
        made[...] = array
        return made
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(240, 4)).astype("f4"), rng.normal(size=(240, 1)).astype("f4")
    weights = [aligned(rng.uniform(0.5, 1.5, 240).astype("f4")) for _ in range(2)]
    before = [w.copy() for w in weights]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 7

        def __getitem__(self, number):
            part = slice(32 * number, 32 * number + 32)
            return x[part], (y[part], y[part]), tuple(w[part] for w in weights)
    given = keras.Input((4,))
    model = keras.Model(given, [keras.layers.Dense(1)(given), keras.layers.Dense(1)(given)])
    hvdtrain.distribute(model)
    model.compile("adam", ["mse", "mse"], loss_weights=[1.0, 0.2])
    for _ in range(2):
        model.fit(Batches(), verbose=0)
        model.evaluate(Batches(), verbose=0)
    for now, then in zip(weights, before, strict=True):
        np.testing.assert_array_equal(now, then)


@TWO
def test_a_shuffle_is_not_iterated_before_the_training(rank_session, keras, tf):
    """Each iteration draws another order; shapes that are not known are read past the shuffle."""
    import hvdtrain

    def made():
        keras.utils.set_random_seed(4)
        series = keras.utils.timeseries_dataset_from_array(
            np.arange(80, dtype="f4").reshape(40, 2) / 80, np.arange(40) / 40.0, 5,
            batch_size=9, shuffle=True, seed=2)
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.GRU(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.2), "mse")
        return model, series
    plain, series = made()
    with hvdtrain.alone():
        expected = plain.fit(series, epochs=3, shuffle=False, verbose=0)
    ours, series = made()
    history = hvdtrain.distribute(ours).fit(series, epochs=3, shuffle=False, verbose=0)
    assert_like_plain(ours, plain, history, expected)


@TWO
def test_a_step_may_give_a_loss_that_no_metric_is_told(rank_session, keras, tf):
    import hvdtrain

    class Own(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data[0]) - 1.0))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables),
                                 self.trainable_variables)
            return {"loss": loss, "other": 2 * loss}

        def test_step(self, data):
            return {"loss": tf.reduce_mean(tf.square(self(data[0]) - 1.0))}

    def made():
        keras.utils.set_random_seed(3)
        model = Own([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1))
        return model
    plain, ours = made(), hvdtrain.distribute(made())
    x, y = numbers(40)
    given = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    with hvdtrain.alone():
        expected = plain.fit(x, y, **given, validation_data=(x[:16], y[:16]))
    assert_like_plain(ours, plain, ours.fit(x, y, **given, validation_data=(x[:16], y[:16])),
                      expected)


@TWO
def test_a_model_whose_step_calls_it_with_something_else(rank_session, keras, tf):
    import hvdtrain

    class Generator(keras.Model):
        """Its `call` takes what is not in the data."""

        def __init__(self):
            super().__init__()
            self.made = keras.layers.Dense(6)

        def call(self, latent):
            return self.made(keras.ops.reshape(latent, (-1, 4)))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                latent = tf.ones((tf.shape(data)[0], 4)) * data[:, :1]
                loss = tf.reduce_mean(tf.square(self(latent) - data))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables),
                                 self.trainable_variables)
            return {"loss": loss}

    def made():
        keras.utils.set_random_seed(3)
        model = Generator()
        model.compile(keras.optimizers.SGD(0.1))
        return model
    plain, ours = made(), made()
    x = numbers(24)[0]
    with hvdtrain.alone():
        expected = plain.fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    history = hvdtrain.distribute(ours).fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_like_plain(ours, plain, history, expected)


@TWO
def test_a_generator_goes_on_in_the_next_validation_where_all_ranks_have_ended(rank_session):
    """Each validation begins with the first two batches, which Keras has looked at."""
    import keras

    import hvdtrain

    def numbered():
        for number in range(1_000):
            time.sleep(0.002 * rank_session.world.rank)
            yield np.full((4, 2), number, "f4"), np.zeros((4, 1), "f4")

    model = hvdtrain.distribute(keras.Sequential([
        keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]))
    model.compile(keras.optimizers.SGD(0.0), "mae")
    history = model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=3, verbose=0,
                        validation_data=numbered(), validation_steps=3)
    found = [round(value * 3 / 2, 4) for value in history.history["val_loss"]]
    assert rank_session.collective.gather_objects(found) == [found] * 2
    assert found == [0 + 1 + 2, 0 + 1 + 3, 0 + 1 + 4]
