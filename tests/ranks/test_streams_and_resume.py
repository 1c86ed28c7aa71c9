"""Streams on real ranks, and runs that are cut off and go on: nothing twice, nothing left out."""

import random

import numpy as np
import pytest

TWO = pytest.mark.ranks(2)


def settings(**given):
    import hvdtrain
    return hvdtrain.TrainConfig(**{"batch_per_rank": 4, "shuffle": False, "lr_scaling": "none",
                                   "remainder": "join", **given})


def line(keras, optimizer=None, loss="mse"):
    """A linear model whose weight shows which samples it has seen."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


class Stop:
    """A callback that asks for a stop, and a function that says so."""

    def __init__(self, keras, epoch, step):
        stop, self.asked = self, False
        self._epoch = 0

        class Ask(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                stop._epoch = epoch

            def on_train_batch_begin(self, batch, logs=None):
                stop.asked = stop.asked or (stop._epoch, batch) >= (epoch, step)
        self.callback = Ask()


@pytest.fixture(autouse=True)
def agree_at_every_step(monkeypatch):
    from hvdtrain.train import coordinator
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)


@pytest.fixture
def folder(rank_session, tmp_path):
    """The chief's, for all ranks."""
    return rank_session.collective.gather_objects(str(tmp_path))[0]


def counted(tf, n):
    x = np.zeros((n, 4), "f4")
    x[:, 0] = np.arange(n)
    return tf.data.Dataset.from_tensor_slices((x, np.zeros((n, 1), "f4")))


@TWO
def test_a_shuffle_without_a_seed_gives_one_order(rank_session, keras, tf):
    from hvdtrain.train.own_loop import agree_on_seeds
    random.seed(rank_session.world.rank)
    np.random.seed(rank_session.world.rank)  # noqa: NPY002
    agree_on_seeds(rank_session.collective)
    drawn = (random.random(), np.random.random(), float(tf.random.uniform(())),  # noqa: NPY002
             list(tf.data.Dataset.range(40).shuffle(40).as_numpy_iterator()))
    everyone = rank_session.collective.gather_objects(drawn)
    assert everyone[0] == everyone[1]
    keras.utils.set_random_seed(11)
    agree_on_seeds(rank_session.collective)
    agreed = random.random()
    random.seed(11)
    assert agreed == random.random()


@TWO
def test_every_sample_of_a_shuffled_stream_is_read_once(rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.train.own_loop import agree_on_seeds
    tf.random.set_seed(rank_session.world.rank)
    agree_on_seeds(rank_session.collective)
    source = hvdtrain.StreamSource(counted(tf, 40).shuffle(40))
    source.count_everywhere(rank_session.collective)
    seen = [int(x[0]) for x, _ in source.samples(rank_session.world.rank, 2).as_numpy_iterator()]
    everyone = rank_session.collective.gather_objects(seen)
    assert sorted(everyone[0] + everyone[1]) == list(range(40))
    assert everyone[0] != list(range(0, 40, 2))
    batched = counted(tf, 40).shuffle(40).batch(8)
    assert hvdtrain.fit(line(keras), batched, config=settings(batch_per_rank=None)).history["loss"]


@TWO
@pytest.mark.parametrize("how", ["seeds", "no seed", "files", "labels"])
def test_streams_whose_order_differs_are_refused(how, rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.errors import DataError
    rank = rank_session.world.rank
    stream = counted(tf, 40)
    if how == "seeds":
        stream = stream.shuffle(40, seed=rank)
    elif how == "no seed":
        from tensorflow.python.eager import context
        context.context()._set_global_seed(None)
        stream = stream.shuffle(40)
    elif how == "files":
        stream = tf.data.Dataset.from_tensor_slices(
            (np.roll(np.eye(40, 4, dtype="f4"), rank, 0), np.zeros((40, 1), "f4")))
    else:
        stream = tf.data.Dataset.range(40).map(lambda i: (
            tf.zeros(4), tf.reshape((i + rank) % 40, [1])))
    with pytest.raises(DataError, match=r"same order on all of them, but .*hvdtrain\.init"):
        hvdtrain.fit(line(keras), hvdtrain.StreamSource(stream), config=settings())
    tf.random.set_seed(3)


@TWO
def test_a_stream_that_is_resumed_has_the_order_that_it_had(rank_session, keras, tf, folder):
    import hvdtrain
    from hvdtrain.train.coordinator import StoppedError
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype("f4")

    def made(seed=5):
        return hvdtrain.StreamSource(
            tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(48, seed=seed))
    whole = line(keras)
    hvdtrain.fit(whole, made(), config=settings(epochs=3))
    stop = Stop(keras, 1, 2)
    with pytest.raises(StoppedError):
        hvdtrain.fit(
            line(keras), made(),
            config=settings(
            epochs=3, output=folder, tensorboard=False),
            callbacks=[stop.callback], stop_asked=lambda: stop.asked)
    resumed = line(keras)
    hvdtrain.fit(
        resumed, made(),
        config=settings(epochs=3, output=folder, resume=True,
                                                  tensorboard=False))
    for a, b in zip(whole.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@TWO
def test_a_function_is_told_the_epoch(rank_session, keras, tf):
    import hvdtrain
    asked = []

    def make(rank, size, epoch):
        asked.append((rank, size, epoch))
        order = np.random.default_rng(epoch).permutation(16)[rank::size]
        return ((np.full(4, i, "f4"), np.zeros(1, "f4")) for i in order)
    hvdtrain.fit(line(keras), hvdtrain.StreamSource(make), config=settings(epochs=3))
    mine = (rank_session.world.rank, 2)
    assert {(*mine, epoch) for epoch in range(3)} <= set(asked)


@TWO
@pytest.mark.parametrize("stop_at", [None, (1, 3)], ids=["between epochs", "within an epoch"])
def test_an_open_accumulation_is_saved_for_all_ranks(stop_at, rank_session, keras, folder):
    """Six steps an epoch, four to an update."""
    import hvdtrain
    from hvdtrain.train.coordinator import StoppedError
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype("f4")

    def made():
        return line(keras, keras.optimizers.SGD(0.05, gradient_accumulation_steps=4))
    plain = made()
    expected = plain.fit(x, x[:, :1], batch_size=8, epochs=3, shuffle=False, verbose=0).history
    given = {"output": folder, "tensorboard": False}
    if stop_at is None:
        hvdtrain.fit(made(), x, x[:, :1], config=settings(epochs=1, **given))
    else:
        stop = Stop(keras, *stop_at)
        with pytest.raises(StoppedError):
            hvdtrain.fit(
                made(), x, x[:, :1], config=settings(epochs=3, **given),
                callbacks=[stop.callback], stop_asked=lambda: stop.asked)
    resumed = made()
    found = hvdtrain.fit(resumed, x, x[:, :1], config=settings(epochs=3, resume=True, **given))
    np.testing.assert_allclose(found.history["loss"], expected["loss"][1:], rtol=1e-5)
    for a, b in zip(resumed.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


@TWO
def test_callbacks_are_not_told_of_steps_that_were_done(rank_session, keras, folder):
    """One that sets the rate by its count, and one that does so when an epoch begins."""
    import hvdtrain
    from hvdtrain.train.coordinator import StoppedError
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype("f4")

    class Count(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.begun = self.ended = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.begun += 1
            self.model.optimizer.learning_rate = 0.05 / self.begun

        def on_train_batch_end(self, batch, logs=None):
            self.ended += 1

    class Halve(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epochs = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs += 1
            self.model.layers[0].bias.assign(self.model.layers[0].bias * 0.5)
    plain, counts = line(keras), [Count(), Halve()]
    expected = plain.fit(x, x[:, :1], batch_size=8, epochs=3, shuffle=False, verbose=0,
                         callbacks=counts).history
    given = {"epochs": 3, "output": folder, "tensorboard": False}
    stop = Stop(keras, 1, 3)
    with pytest.raises(StoppedError):
        hvdtrain.fit(
            line(keras), x, x[:, :1], config=settings(**given),
            callbacks=[Count(), Halve(), stop.callback], stop_asked=lambda: stop.asked)
    ours, again = line(keras), [Count(), Halve(), stop.callback]
    found = hvdtrain.fit(
        ours, x, x[:, :1], config=settings(resume=True, **given), callbacks=again)
    assert (again[0].begun, again[0].ended, again[1].epochs) == (
        counts[0].begun, counts[0].ended, counts[1].epochs) == (18, 18, 3)
    np.testing.assert_allclose(found.history["loss"], expected["loss"][1:], rtol=1e-5)
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


@TWO
def test_structures_that_keras_takes(rank_session, keras, tf):
    """Lists of inputs and outputs, from arrays, generators and data sets of batches."""
    import hvdtrain
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(16, 3)).astype("f4") for _ in range(2))

    def made():
        keras.utils.set_random_seed(3)
        one, two = keras.Input((3,)), keras.Input((3,))
        both = keras.layers.Concatenate()([one, two])
        model = keras.Model([one, two], [keras.layers.Dense(1, name="p")(both),
                                         keras.layers.Dense(1, name="q")(both)])
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
        return model
    plain = made()
    expected = plain.fit([a, b], [a[:, :1], b[:, :1]], batch_size=8, shuffle=False, verbose=0)
    rows = tf.data.Dataset.from_tensor_slices(((a, b), (a[:, :1], b[:, :1])))
    for data in (([a, b], [a[:, :1], b[:, :1]]), ((a, b), (a[:, :1], b[:, :1])),
                 [hvdtrain.StreamSource(rows)],
                 [hvdtrain.StreamSource(rows.batch(3).prefetch(1))],
                 [hvdtrain.StreamSource(lambda rank, size: (
                     [[a[i], b[i]], [a[i, :1], b[i, :1]]] for i in range(16)[rank::size]))]):
        model = made()
        found = hvdtrain.fit(model, *data, config=settings()).history
        np.testing.assert_allclose(found["loss"], expected.history["loss"], rtol=1e-5)
        assert set(found) == {*expected.history, "learning_rate"}
    one, two = hvdtrain.predict(model, [a, b])
    for mine, theirs in zip((one, two), model.predict([a, b], verbose=0), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    shared = hvdtrain.predict(model, rows.batch(5))
    np.testing.assert_allclose(shared[0], one, atol=1e-6)


@TWO
def test_samples_of_different_lengths_and_types_that_cannot_be_batched(rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.data.source import as_source
    from hvdtrain.errors import DataError
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.LSTM(3),
                              keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    texts = [np.arange(1, 2 + i % 4) for i in range(16)]
    source = hvdtrain.StreamSource(tf.data.Dataset.from_generator(
        lambda: ((text, np.ones(1, "f4")) for text in texts),
        output_signature=(tf.TensorSpec([None], tf.int64), tf.TensorSpec([1], tf.float32))))
    first = hvdtrain.fit(model, source, config=settings(epochs=2)).history["loss"]
    assert first[1] < first[0]
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(DataError, match=r"RaggedTensor.*to_tensor"):
        as_source((ragged, np.ones((2, 1))), "train")
    with pytest.raises(DataError, match=r"SparseTensor.*to_dense"):
        as_source((tf.sparse.eye(4), np.ones((4, 1))), "train")
    with pytest.raises(DataError, match=r"samples of dense tensors\. Received: RaggedTensor"):
        hvdtrain.fit(model, hvdtrain.StreamSource(
            tf.data.Dataset.from_tensor_slices((ragged, [[1.0], [1.0]]))), config=settings())


@TWO
def test_a_model_that_only_its_train_step_builds(rank_session, keras, tf):
    import hvdtrain
    from tests.rank_checks import assert_same_everywhere

    class Contrast(keras.Model):
        """`call` leaves out the head."""

        def __init__(self):
            super().__init__()
            self.body, self.head = keras.layers.Dense(4), keras.layers.Dense(2)
            self.built = True  # Keras takes it at its word

        def call(self, x):
            return self.body(x)

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.head(self(x))))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("f4")

    def made():
        keras.utils.set_random_seed(3)
        model = Contrast()
        model.compile(keras.optimizers.Adam(0.1))
        return model
    ours, plain = made(), made()
    hvdtrain.fit(ours, x, config=settings(epochs=2))
    plain.fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_everywhere(rank_session, ours.weights)
    assert len(ours.weights) == 4
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
