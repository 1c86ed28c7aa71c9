"""Engine ps in one process: real servers and workers over the loopback (`LocalCluster`).

Marked `ranks(1)`: a cluster wants a process of its own, before any other TensorFlow variable.
With `staleness=0` one batch is in flight, so that async training is that of one process.
"""

import functools
import gc
import json
import socket
import time

import numpy as np
import pytest

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.engine_config import PsConfig
from hvdtrain.errors import ConfigError, DataError, TrainingError
from hvdtrain.settings import replace

pytestmark = pytest.mark.ranks(1)
BATCH, STEPS = 8, 10


@pytest.fixture(scope="module")
def cluster():
    return hvdtrain.LocalCluster(workers=3, servers=2)


@pytest.fixture(scope="module")
def keras(cluster):
    del cluster  # made before Keras is loaded
    import keras
    return keras


def reaches(port, source):
    with socket.socket() as connection:
        connection.settimeout(0.5)
        connection.bind((source, 0))
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_a_stranger_does_not_reach_the_servers(cluster):
    for addresses in cluster.addresses.values():
        port = int(addresses[0].rpartition(":")[2])
        assert [reaches(port, f"127.0.0.{host}") for host in (1, 2)] == [True, False]


def numbers(samples=BATCH * STEPS, features=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, features)).astype("float32")
    y = (x @ rng.normal(size=(features,)) > 0).astype("int32")
    return x, y


def words(samples=BATCH * STEPS, length=6, vocabulary=50, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, vocabulary, (samples, length)).astype("int32")
    return x, (x.sum(1) % 2).astype("int32")


def mlp(keras, **dense):
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="relu", **dense),
                             keras.layers.Dense(2)])


def embedding(keras):
    return keras.Sequential([
        keras.Input((6,), dtype="int32"), keras.layers.Embedding(50, 4),
        keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)])


def two_tables(keras):
    """One table is used twice, and one is also read whole (as tied output weights)."""
    inputs = keras.Input((6,), dtype="int32")
    shared, tied = keras.layers.Embedding(50, 4), keras.layers.Embedding(50, 4)
    a = keras.layers.GlobalAveragePooling1D()(shared(inputs) + shared(inputs[:, ::-1]))
    b = keras.layers.GlobalAveragePooling1D()(tied(inputs))
    scores = keras.layers.Lambda(lambda t: keras.ops.matmul(
        t, keras.ops.transpose(tied.embeddings)), output_shape=(50,))(b)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()([a, scores])))


def normalized(keras):
    return keras.Sequential([
        keras.Input((12,)), keras.layers.Dense(16), keras.layers.BatchNormalization(),
        keras.layers.Dense(2)])


def unused(keras):
    """A layer whose weights get no gradient, and a frozen one."""
    inputs = keras.Input((12,))
    frozen = keras.layers.Dense(12, trainable=False)
    x = frozen(inputs)
    keras.layers.Dense(3)(x)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(8)(x)))


def train(cluster, keras, make, optimizer, data, ps, *, epochs=1, batch=BATCH, callbacks=(),
          validation=None, stop_asked=lambda: False, **config):
    """Train on the cluster; returns the model and the result."""
    made = []

    def model():
        keras.utils.set_random_seed(1)
        network = make(keras)
        network.compile(optimizer(keras), keras.losses.SparseCategoricalCrossentropy(
            from_logits=True), metrics=["accuracy"])
        made.append(network)
        return network

    def splits():
        return hvdtrain.DataSplits(
            train=hvdtrain.ArraySource(data),
            validation=None if validation is None else hvdtrain.ArraySource(validation))

    job = hvdtrain.Job(name="test", model=model, data=splits, callbacks=lambda: callbacks,
                       config=TrainConfig(batch_per_rank=batch, epochs=epochs, shuffle=False,
                                          lr_scaling="none", ps=ps, **config))
    result = cluster.fit(job, stop_asked=stop_asked)
    return made[-1], result


def plain(keras, make, optimizer, data, *, batch, epochs=1, **fit):
    """Plain Keras in one process; rows of embeddings that occur twice are added up, which some of
    its optimizers do not do themselves.
    """
    import tensorflow as tf
    keras.utils.set_random_seed(1)
    network, made = make(keras), optimizer(keras)
    # Built by `fit` itself, ScheduleFreeAdamW begins from zeros (Keras 3.15).
    made.build(network.trainable_variables)
    apply = made.apply
    object.__setattr__(made, "apply", lambda grads, variables=None: apply(
        [g if g is None else tf.convert_to_tensor(g) for g in grads], variables))
    network.compile(made, keras.losses.SparseCategoricalCrossentropy(
        from_logits=True), metrics=["accuracy"])
    history = network.fit(*data[:2], sample_weight=data[2] if len(data) > 2 else None,
                          batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **fit)
    return network, history.history


def difference(one, other):
    """The largest one over all weights and optimizer variables."""
    pairs = [*zip(one.variables, other.variables, strict=True),
             *zip(one.optimizer.variables, other.optimizer.variables, strict=True)]
    return max(float(np.max(np.abs(np.asarray(a.numpy(), np.float64) - b.numpy())))
               for a, b in pairs if "seed" not in a.path)


def sgd(keras, **options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def without_decay_of_biases(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda k: sgd(k),
    "adam": lambda k: k.optimizers.Adam(0.01),
    "adamw": lambda k: k.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda k: sgd(k, clipnorm=0.1),
    "global_clipnorm": lambda k: sgd(k, global_clipnorm=0.1),
    "clipvalue": lambda k: k.optimizers.Adam(0.01, clipvalue=0.01),
    "ema": lambda k: k.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "schedule": lambda k: k.optimizers.SGD(k.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)),
    "lamb": lambda k: k.optimizers.Lamb(0.01),
    "adafactor": lambda k: k.optimizers.Adafactor(0.01),
    "muon": lambda k: k.optimizers.Muon(0.01),
    "schedule_free": lambda k: k.optimizers.ScheduleFreeAdamW(0.01, weight_decay=0.01),
    "excluded": lambda k: without_decay_of_biases(k.optimizers.AdamW(0.01, weight_decay=0.1)),
    "nadam": lambda k: k.optimizers.Nadam(0.01),
    "ftrl": lambda k: k.optimizers.Ftrl(0.01),
    "lion": lambda k: k.optimizers.Lion(0.001),
    "adadelta": lambda k: k.optimizers.Adadelta(1.0),
    "adamax": lambda k: k.optimizers.Adamax(0.01),
    "adagrad": lambda k: k.optimizers.Adagrad(0.1),
    "rmsprop": lambda k: k.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
}
SYNC = PsConfig(mode="sync", replicas_to_aggregate=2)
ONE_BY_ONE = PsConfig(staleness=0)
MODES = {"sync": (SYNC, 2), "async": (ONE_BY_ONE, 1)}
"""Settings, and how many batches make an update."""


# Updates happen on the servers in both modes: each optimizer once. Clipping is on the servers in
# one and on the workers in the other, and so is ScheduleFreeAdamW's point of the gradient.
@pytest.mark.parametrize(("name", "mode"), [
    ("schedule", "async"), ("clipnorm", "sync"), ("global_clipnorm", "sync"),
    ("global_clipnorm", "async"), ("clipvalue", "sync"), ("clipvalue", "async"), ("ema", "sync"),
    ("lamb", "sync"), ("adafactor", "async"), ("muon", "sync"), ("schedule_free", "sync"),
    ("schedule_free", "async"), ("excluded", "sync"), ("nadam", "async"), ("ftrl", "async"),
    ("lion", "async"), ("adamax", "sync"), ("adagrad", "sync")])
def test_it_equals_one_process(cluster, keras, name, mode):
    """In mode sync on the larger batch, in mode async batch by batch."""
    ps, replicas = MODES[mode]
    data = numbers(replicas * BATCH * STEPS)
    ours, result = train(cluster, keras, mlp, OPTIMIZERS[name], data, ps)
    theirs, history = plain(keras, mlp, OPTIMIZERS[name], data, batch=replicas * BATCH)
    assert difference(ours, theirs) < 1e-6
    assert result.history["loss"][0] == pytest.approx(history["loss"][0], abs=1e-6)
    assert result.history["accuracy"][0] == pytest.approx(history["accuracy"][0], abs=1e-6)


@pytest.mark.parametrize(("make", "name", "mode"), [
    (embedding, "sgd", "async"), (embedding, "rmsprop", "sync"), (two_tables, "adam", "async"),
    (two_tables, "global_clipnorm", "sync"), (two_tables, "global_clipnorm", "async"),
    (two_tables, "adadelta", "sync")])
def test_embeddings_equal_one_process(cluster, keras, make, name, mode):
    ps, replicas = MODES[mode]
    data = words(replicas * BATCH * STEPS)
    ours, _ = train(cluster, keras, make, OPTIMIZERS[name], data, ps)
    theirs, _ = plain(keras, make, OPTIMIZERS[name], data, batch=replicas * BATCH)
    assert difference(ours, theirs) < 1e-6


@functools.cache
def plain_embedding(replicas):
    """Of plain Keras, for each mode. The cluster must have been used before."""
    import keras
    return plain(keras, embedding, OPTIMIZERS["adam"], words(replicas * BATCH * STEPS),
                 batch=replicas * BATCH)[0]


# Every two values of two columns are in one row, as far as they go together.
@pytest.mark.parametrize(("partitioner", "mode", "fused", "placement", "sparse"), [
    ("none", "sync", False, "round_robin", True),
    ("none", "async", True, "greedy", False),
    ("fixed:3", "sync", True, "greedy", True),
    ("fixed:3", "async", False, "round_robin", False),
    ("min_size:256:3", "sync", True, "round_robin", False),
    ("min_size:256:3", "async", False, "greedy", True),
    ("max_size:512", "sync", False, "greedy", False),
    ("max_size:512", "async", True, "round_robin", True)])
def test_the_layout_changes_nothing(cluster, keras, partitioner, mode, fused, placement, sparse):
    ps, replicas = MODES[mode]
    ps = replace(ps, partitioner=partitioner, fused=fused, placement=placement,
                 sparse_embeddings=sparse)
    data = words(replicas * BATCH * STEPS)
    ours, _ = train(cluster, keras, embedding, OPTIMIZERS["adam"], data, ps)
    assert difference(ours, plain_embedding(replicas)) < 1e-6


@pytest.mark.parametrize("make", [normalized, unused])
def test_statistics_and_frozen_layers(cluster, keras, make):
    data = numbers()
    ours, _ = train(cluster, keras, make, OPTIMIZERS["adamw"], data, ONE_BY_ONE)
    theirs, _ = plain(keras, make, OPTIMIZERS["adamw"], data, batch=BATCH)
    assert difference(ours, theirs) < 1e-6


def test_regularizers_constraints_and_weights_of_samples(cluster, keras):
    def make(k):
        return mlp(k, kernel_regularizer="l2", activity_regularizer="l1")

    weights = np.random.default_rng(3).random(2 * BATCH * STEPS).astype("float32")
    data = (*numbers(2 * BATCH * STEPS), weights)
    ours, result = train(cluster, keras, make, OPTIMIZERS["sgd"], data[:2], SYNC)
    theirs, history = plain(keras, make, OPTIMIZERS["sgd"], data[:2], batch=2 * BATCH)
    # The activity penalty is a mean over the batch of each worker, as one process would have it.
    assert difference(ours, theirs) < 1e-6
    assert result.history["loss"][0] == pytest.approx(history["loss"][0], abs=1e-5)

    def bounded(k):
        return mlp(k, kernel_constraint=k.constraints.MaxNorm(0.5))
    ours, _ = train(cluster, keras, bounded, OPTIMIZERS["sgd"], data, SYNC)
    theirs, _ = plain(keras, bounded, OPTIMIZERS["sgd"], data, batch=2 * BATCH)
    assert difference(ours, theirs) < 1e-6


def test_more_gradients_than_workers(cluster, keras):
    data = numbers(5 * BATCH * STEPS)
    ours, _ = train(cluster, keras, mlp, OPTIMIZERS["adam"], data,
                    PsConfig(mode="sync", replicas_to_aggregate=5))
    theirs, _ = plain(keras, mlp, OPTIMIZERS["adam"], data, batch=5 * BATCH)
    assert difference(ours, theirs) < 1e-6


class Straggling(hvdtrain.ArraySource):
    """The first reading of every third batch takes long, as on a slow worker."""

    def __init__(self, data):
        super().__init__(data)
        self.slow, self.readings = 0, {}

    @property
    def arrays(self):
        return None

    def read(self, rows):
        first = int(rows[0])
        self.readings[first] = self.readings.get(first, 0) + 1
        if (first // BATCH) % 3 == 1 and self.readings[first] == 1 and len(rows) > 1:
            self.slow += 1
            time.sleep(0.3)
        return super().read(rows)


def test_a_backup_worker_takes_over_from_a_straggler(cluster, keras):
    data = numbers(2 * BATCH * 20)
    source = Straggling(data)
    ours, _ = train(cluster, keras, mlp, OPTIMIZERS["sgd"], data,
                    PsConfig(mode="sync", backup_workers=1))
    assert source.slow == 0
    made = []

    def model():
        keras.utils.set_random_seed(1)
        network = mlp(keras)
        network.compile(OPTIMIZERS["sgd"](keras), keras.losses.SparseCategoricalCrossentropy(
            from_logits=True))
        made.append(network)
        return network
    began = time.monotonic()
    cluster.fit(hvdtrain.Job(name="straggler", model=model, data=lambda: source,
                             config=TrainConfig(batch_per_rank=BATCH, shuffle=False,
                                                lr_scaling="none",
                                                ps=PsConfig(mode="sync", backup_workers=1))))
    seconds = time.monotonic() - began
    theirs, _ = plain(keras, mlp, OPTIMIZERS["sgd"], data, batch=2 * BATCH)
    assert difference(ours, theirs) < 1e-6
    assert difference(made[-1], theirs) < 1e-6
    assert source.slow >= 10
    assert max(source.readings.values()) >= 2, "nothing was computed twice"
    assert seconds < 100


def test_the_same_steps_with_and_without_a_bound_on_staleness(cluster, keras):
    data = numbers(BATCH * STEPS + 3)
    for ps in (PsConfig(), PsConfig(staleness=2), PsConfig(steps_per_closure=1)):
        ours, result = train(cluster, keras, mlp, OPTIMIZERS["adam"], data, ps, epochs=3)
        assert int(ours.optimizer.iterations.numpy()) == 3 * (STEPS + 1)
        assert result.history["loss"][-1] < result.history["loss"][0]


@pytest.mark.parametrize(("evaluation", "samples"), [
    ("direct", 61), ("distributed", 1), ("distributed", 61), ("distributed", 64)])
def test_each_sample_is_evaluated_once(cluster, keras, evaluation, samples):
    data, held_out = numbers(), numbers(samples, seed=5)
    ours, result = train(cluster, keras, normalized, OPTIMIZERS["adam"], data,
                         PsConfig(evaluation=evaluation), validation=held_out)
    expected = ours.evaluate(*held_out, verbose=0, return_dict=True)
    for name, value in expected.items():
        assert result.history[f"val_{name}"][0] == pytest.approx(value, abs=1e-6)


def dropped(keras):
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(64),
                             keras.layers.Dropout(0.5), keras.layers.Dense(2)])


def test_dropout_is_reproducible_and_differs_between_batches(cluster, keras):
    x, y = numbers(2 * BATCH)
    x, y = np.concatenate([x[:BATCH]] * 2 * STEPS), np.concatenate([y[:BATCH]] * 2 * STEPS)
    runs = [train(cluster, keras, dropped, OPTIMIZERS["sgd"], (x, y), SYNC)[0] for _ in range(2)]
    assert difference(*runs) == 0
    # Two replicas with the same samples and the same mask would be one replica.
    one, _ = train(cluster, keras, dropped, OPTIMIZERS["sgd"], (x[::2], y[::2]),
                   PsConfig(mode="sync", replicas_to_aggregate=1))
    assert difference(runs[0], one) > 1e-4


def test_numbers_travel_as_bfloat16(cluster, keras):
    data = numbers(2 * BATCH * STEPS)
    exact, _ = train(cluster, keras, mlp, OPTIMIZERS["sgd"], data, SYNC)
    short, _ = train(cluster, keras, mlp, OPTIMIZERS["sgd"], data,
                     replace(SYNC, wire_dtype="bfloat16"))
    assert 0 < difference(exact, short) < 0.1
    assert short.variables[0].dtype == "float32"


def history_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_and_exact_resume(cluster, keras, tmp_path):
    data, held_out = numbers(2 * BATCH * STEPS), numbers(33, seed=5)
    options = {"validation": held_out, "tensorboard": False}
    whole, result = train(cluster, keras, dropped, OPTIMIZERS["adam"], data, SYNC, epochs=2,
                          output=tmp_path / "whole", **options)
    train(cluster, keras, dropped, OPTIMIZERS["adam"], data, SYNC, epochs=1,
          output=tmp_path / "parts", **options)
    parts, again = train(cluster, keras, dropped, OPTIMIZERS["adam"], data, SYNC, epochs=2,
                         output=tmp_path / "parts", resume=True, **options)
    assert again.first_epoch == 1
    assert difference(whole, parts) == 0
    assert [line["loss"] for line in history_of(tmp_path / "parts/metrics.jsonl")] == (
        result.history["loss"])
    loaded = keras.models.load_model(tmp_path / "parts/model.keras")
    assert loaded.evaluate(*held_out, verbose=0)[0] == pytest.approx(
        result.history["val_loss"][-1], abs=1e-6)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert difference(loaded, whole) == 0


@pytest.mark.parametrize("ps", [SYNC, ONE_BY_ONE], ids=["sync", "async"])
def test_a_stop_within_an_epoch_loses_nothing(cluster, keras, tmp_path, ps):
    from hvdtrain.train.coordinator import StoppedError
    data = numbers(2 * BATCH * STEPS)
    whole, result = train(cluster, keras, dropped, OPTIMIZERS["adam"], data, ps, epochs=2)
    asked = []

    def stop_asked():
        asked.append(1)
        return len(asked) > 7

    with pytest.raises(StoppedError, match="go on with --resume"):
        train(cluster, keras, dropped, OPTIMIZERS["adam"], data, ps, epochs=2,
              output=tmp_path / "run", tensorboard=False, stop_asked=stop_asked)
    names = [p.name for p in (tmp_path / "run/checkpoints").iterdir()]
    assert any("sample" in name for name in names), names
    parts, again = train(cluster, keras, dropped, OPTIMIZERS["adam"], data, ps, epochs=2,
                         output=tmp_path / "run", resume=True, tensorboard=False)
    assert difference(whole, parts) == 0
    assert again.history["loss"] == pytest.approx(result.history["loss"], abs=1e-6)


def test_callbacks_see_the_model_and_change_it(cluster, keras):
    seen = []

    class Rate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, sorted(logs), float(self.model.optimizer.learning_rate)))
            self.model.optimizer.learning_rate = 0.0
            self.model.layers[0].kernel.assign(np.ones((12, 16)))
            if epoch == 1:
                self.model.stop_training = True

    ours, result = train(cluster, keras, mlp, OPTIMIZERS["sgd"], numbers(), ONE_BY_ONE, epochs=5,
                         callbacks=[Rate()], validation=numbers(9))
    assert [epoch for epoch, *_ in seen] == [0, 1]
    assert seen[0][1] == ["accuracy", "learning_rate", "loss", "val_accuracy", "val_loss"]
    assert len(result.history["loss"]) == 2
    # The rate is 0 in the second epoch; momentum moves the ones that were set.
    assert result.history["learning_rate"] == [pytest.approx(0.1), 0.0]
    assert np.abs(ours.layers[0].kernel.numpy() - 1).max() < 1.0


def setters(keras):
    """Callbacks that set something in the model, each in a method of its own."""
    class Base(keras.callbacks.Callback):
        def kernel(self):
            return self.model.layers[0].kernel

    class TrainBegin(Base):
        def on_train_begin(self, logs=None):
            self.kernel().assign(np.full((12, 16), 0.1))

    class EpochBegin(Base):
        def on_epoch_begin(self, epoch, logs=None):
            self.kernel().assign(np.full((12, 16), 0.1 * (epoch + 1)))

    class Slots(Base):
        def on_epoch_end(self, epoch, logs=None):
            for variable in self.model.optimizer.variables[2:]:
                variable.assign(np.zeros(variable.shape))

    class Annealing(Base):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[-1].factor.assign(1.0 + epoch)

    class Rate(Base):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)
    return {kind.__name__: kind for kind in (TrainBegin, EpochBegin, Slots, Annealing, Rate)}


def annealed(keras):
    class Factor(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(), initializer="ones", trainable=False)

        def call(self, inputs):
            return inputs * self.factor
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="relu"),
                             keras.layers.Dense(2), Factor()])


# What is set within an epoch is heeded by the modes, the rest around them.
@pytest.mark.parametrize(("name", "mode"), [
    ("TrainBegin", "sync"), ("EpochBegin", "async"), ("Slots", "sync"), ("Annealing", "async"),
    ("Rate", "sync"), ("Rate", "async")])
def test_what_callbacks_set_counts_as_in_keras(cluster, keras, name, mode):
    ps, replicas = MODES[mode]
    data = numbers(replicas * BATCH * 4)
    ours, _ = train(cluster, keras, annealed, sgd, data, ps, epochs=3,
                    callbacks=[setters(keras)[name]()])
    theirs, _ = plain(keras, annealed, sgd, data, batch=replicas * BATCH, epochs=3,
                      callbacks=[setters(keras)[name]()])
    assert difference(ours, theirs) < 1e-6


def test_metrics_of_several_figures_and_figures_within_an_epoch(cluster, keras):
    class Two(keras.metrics.Mean):
        def result(self):
            return {"mean": super().result(), "twice": 2 * super().result()}

        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(keras.ops.cast(y_true, "float32"))

    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])

    def model():
        network = mlp(keras)
        network.compile(sgd(keras), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                        metrics=[Two(name="two")])
        return network
    x, y = numbers()
    result = cluster.fit(hvdtrain.Job(
        name="two", model=model, data=lambda: (x, y), callbacks=lambda: [Watch()],
        config=TrainConfig(batch_per_rank=BATCH, lr_scaling="none", ps=SYNC)))
    assert result.history["mean"] == [pytest.approx(y.mean(), abs=1e-6)]
    assert result.history["twice"] == [pytest.approx(2 * y.mean(), abs=1e-6)]
    assert len(seen) == STEPS // 2
    assert seen[-1] == pytest.approx(result.history["loss"][0])


def test_own_evaluation_and_bfloat16(cluster, keras):
    class Own(keras.Sequential):
        def test_step(self, data):
            return {"mine": keras.ops.convert_to_tensor(42.0)}
    _, result = train(cluster, keras, lambda k: Own([k.Input((12,)), k.layers.Dense(2)]), sgd,
                      numbers(), ONE_BY_ONE, validation=numbers(9))
    assert result.history["val_mine"] == [42.0]
    ours, result = train(cluster, keras, lambda k: k.Sequential([
        k.Input((12,)), k.layers.Dense(8), k.layers.Dense(2, dtype="bfloat16")]), sgd,
        numbers(2 * BATCH * STEPS), SYNC)
    assert ours.layers[-1].kernel.dtype == "bfloat16"
    assert np.isfinite(result.history["loss"][0])


def test_weights_that_are_not_finite_end_the_run(cluster, keras):
    """The activation swallows what is not finite, and the loss is a number."""
    # Not relu: whether it swallows NaN depends on the processor.
    def swallow(x):
        return keras.ops.where(keras.ops.isfinite(x), keras.ops.tanh(x), 0.0)

    def model(keras):
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation=swallow),
                                 keras.layers.Dense(2)])
    x, y = numbers()
    x[5] = np.nan
    with pytest.raises(TrainingError, match="kernel is not finite at the end of epoch 1"):
        train(cluster, keras, model, sgd, (x, y), ONE_BY_ONE)


def test_a_loss_that_is_not_finite_ends_the_run(cluster, keras):
    x, y = numbers()
    x[5] = np.inf
    with pytest.raises(TrainingError, match="not finite between steps 1 and"):
        train(cluster, keras, unused, OPTIMIZERS["sgd"], (x, y), ONE_BY_ONE)


def test_an_error_in_reading_the_data_names_itself(cluster, keras):
    class Broken(hvdtrain.ArraySource):
        arrays = None

        def read(self, rows):
            if len(rows) > 1:
                raise RuntimeError("the disk is gone")
            return super().read(rows)

    def model():
        network = mlp(keras)
        network.compile("sgd", "sparse_categorical_crossentropy")
        return network
    for _ in range(4):
        with pytest.raises(DataError, match="arrays: RuntimeError: the disk is gone"):
            cluster.fit(hvdtrain.Job(name="broken", model=model, data=lambda: Broken(numbers())))
    gc.collect()  # what the other worker was doing was cancelled, and nothing of it is raised here


def refusal(cluster, keras, make, optimizer, ps=SYNC):
    with pytest.raises(ConfigError) as error:
        train(cluster, keras, make, optimizer, numbers(), ps)
    return str(error.value)


def test_what_would_train_otherwise_than_keras_is_refused(cluster, keras):
    class Own(keras.Sequential):
        def train_step(self, data):
            return {}

    assert "train_step" in refusal(
        cluster, keras, lambda k: Own([k.Input((12,)), k.layers.Dense(2)]), sgd)
    assert "accumulate" in refusal(
        cluster, keras, mlp, lambda k: sgd(k, gradient_accumulation_steps=2))
    assert "mixed_bfloat16" in refusal(
        cluster, keras, mlp, lambda k: k.optimizers.LossScaleOptimizer(sgd(k)))
    assert "--ps-fused" in refusal(cluster, keras, mlp, OPTIMIZERS["lamb"], PsConfig(fused=True))
    assert "--ps-partitioner fixed:2" in refusal(
        cluster, keras, mlp, OPTIMIZERS["adafactor"], PsConfig(partitioner="fixed:2"))
    assert "ema_overwrite_frequency" in refusal(
        cluster, keras, mlp, lambda k: sgd(k, use_ema=True, ema_overwrite_frequency=3))
    assert "SpectralNormalization" in refusal(cluster, keras, lambda k: k.Sequential(
        [k.Input((12,)), k.layers.SpectralNormalization(k.layers.Dense(2))]), sgd)
    with pytest.raises(DataError, match="at most --ps-replicas 5"):
        train(cluster, keras, mlp, sgd, numbers(5), PsConfig(mode="sync",
                                                            replicas_to_aggregate=6))
    assert "constraint" in refusal(
        cluster, keras, lambda k: mlp(k, kernel_constraint="non_neg"), sgd, PsConfig())


@pytest.mark.parametrize("evaluation", ["distributed", "direct"])
def test_averaged_weights_are_validated_and_callbacks_told_of_it(cluster, keras, evaluation):
    def averaged(keras):
        return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append("begin")

        def on_test_batch_end(self, batch, logs=None):
            seen.append(batch)

        def on_test_end(self, logs=None):
            seen.append(logs["loss"])
    ps, replicas = MODES["sync"]
    data, held = numbers(replicas * BATCH * 4), numbers(2 * BATCH)
    _, result = train(cluster, keras, mlp, averaged, data, replace(ps, evaluation=evaluation),
                      epochs=2, validation=held,
                      callbacks=[keras.callbacks.SwapEMAWeights(), Watch()])
    _, expected = plain(keras, mlp, averaged, data, batch=replicas * BATCH, epochs=2,
                        validation_data=held, callbacks=[keras.callbacks.SwapEMAWeights()])
    np.testing.assert_allclose(result.history["val_loss"], expected["val_loss"], rtol=1e-5)
    assert seen == ["begin", 0, 1, seen[3], "begin", 0, 1, seen[7]]
    np.testing.assert_allclose([seen[3], seen[7]], expected["val_loss"], rtol=1e-5)
