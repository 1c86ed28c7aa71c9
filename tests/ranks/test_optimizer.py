"""DistributedOptimizer on real ranks: equal to one process, whatever the training looks like."""

import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

TWO = pytest.mark.ranks(2)


THREE = pytest.mark.ranks(3)


# Each way to update once, and each collective; all of them: `benchmarks/equality.py`.
@pytest.mark.parametrize("name", [
    *[pytest.param(n, marks=TWO) for n in (
        "LossScaleOptimizer(Adam)", "MultiOptimizer(SGD, Adam)", "Adam, CosineDecay with warmup")],
    pytest.param("SGD, accumulation 4, global_clipnorm", marks=THREE, id="accumulation-3-ranks"),
    pytest.param("LossScaleOptimizer(SGD, accumulation 4)",
                 marks=pytest.mark.ranks(2, collective="mpi4py"), id="scale-mpi4py"),
    pytest.param("Adam, global_clipnorm",
                 marks=pytest.mark.ranks(2, collective="horovod-mpi"), id="Adam-mpi"),
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
@pytest.mark.parametrize("sparse", ["auto", "gather", "dense"])
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
            hvdtrain.fit(model, x, x[:, :1], config=hvdtrain.TrainConfig(batch_per_rank=4))
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
        state.broadcast_variables([keras.Variable([1.0]), *extra],
                                  collective=rank_session.collective)


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
    state.broadcast_variables(variables, collective=rank_session.collective)
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
    result = fit_quietly(model, x, y, validation_data=(v, y[:11]),
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
    result = fit_quietly(model, x, x[:, :1], validation_data=(x[:1], x[:1, :1]),
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
    fit_quietly(make(), x, y, config=config)
    bad = x.copy()
    bad[5 * 4 + 2] = np.nan  # step 6 of 8, the first row of rank 1
    from hvdtrain.settings import replace
    with pytest.raises(TrainingError, match=r"since step 14, first on rank 1\."):
        fit_quietly(make(), bad, y, config=replace(config, resume=True, epochs=2))
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
    result = fit_quietly(model, np.ones((8, 2), "f4"), np.ones((8, 1), "f4"),
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
        fit_quietly(model, np.ones((8, 2), "f4"), np.ones((8, 1), "f4"), config=config)


@TWO
def test_ranks_with_other_data_of_the_same_length_are_named(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import DataError
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x = np.full((8, 2), 1.0 + rank_session.world.rank, "f4")
    with pytest.raises(DataError, match="training data of rank 1 differ from those of rank 0"):
        fit_quietly(model, x, x[:, :1])


@TWO
def test_a_rank_that_made_one_optimizer_more_is_named(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    if rank_session.world.rank == 1:
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with pytest.raises(ConfigError, match="order of distributed optimizers is .* on rank 1"):
        fit_quietly(model, np.ones((8, 2), "f4"), np.ones((8, 1), "f4"))
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


@TWO
def test_any_error_on_the_chief_reaches_every_rank(rank_session):
    from hvdtrain.errors import ChiefFailedError
    from hvdtrain.runtime.guard import exit_code_of
    from hvdtrain.train.chief import on_chief

    def fails():
        raise MemoryError("no memory")
    kind = MemoryError if rank_session.world.rank == 0 else ChiefFailedError
    with pytest.raises(kind, match="no memory") as caught:
        on_chief(rank_session.collective, fails)
    assert exit_code_of(caught.value) == (1 if rank_session.world.rank == 0 else 7)
    assert on_chief(rank_session.collective, lambda: 7) == 7


@TWO
@pytest.mark.parametrize("where", ["metrics.jsonl", "tensorboard"])
def test_figures_that_the_chief_cannot_write_end_every_rank(where, rank_session, tmp_path_factory):
    import keras

    import hvdtrain
    from hvdtrain.config import TrainConfig
    from hvdtrain.errors import NotWrittenError
    folder = Path(rank_session.collective.gather_objects(
        str(tmp_path_factory.mktemp("figures")))[0])
    if rank_session.world.rank == 0:
        if where == "tensorboard":
            (folder / where).write_text("a file where a folder is needed")
        else:
            (folder / where / "in the way").mkdir(parents=True)
    rank_session.collective.barrier()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with pytest.raises(NotWrittenError, match=f"{where} could not be written"):
        hvdtrain.fit(
            model, np.ones((8, 2), "f4"), np.ones((8, 1), "f4"),
            config=TrainConfig(
            output=folder, resume=True))


class Counting:
    """A collective that counts what is asked of it; eagerly, each call is one."""

    def __init__(self, inner):
        self._inner, self.calls = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def reduce(self, tensors, *, name, op):
        self.calls.append(name)
        return self._inner.reduce(tensors, name=name, op=op)


@TWO
def test_one_reduction_for_each_applied_update(rank_session, keras, tf):
    import hvdtrain
    counting = Counting(rank_session.collective)
    optimizer = hvdtrain.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), collective=counting)
    v, w = keras.Variable([1.0, 2.0]), keras.Variable([3.0])
    optimizer.build([v, w])
    for step in range(8):
        optimizer.apply([tf.constant([1.0, step]), tf.constant([2.0])], [v, w])
    assert len(counting.calls) == 2  # both variables are in one bucket
    assert_same_everywhere(rank_session, [v, w])


@TWO
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("difference", "message"), [
    ("missing", r"for variable 1 \(`.*b`\) rank 0 has a dense float32 gradient \(2\), rank 1 has"
                r" none"),
    ("sparse", r"for variable 0 \(`.*a`\) rank 0 has a dense .* rank 1 has a sparse float32"),
    ("options", "Rank 1 was given other ReducerOptions than rank 0"),
])
def test_ranks_with_other_gradients_are_refused_instead_of_waiting(
        difference, message, eager, rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.errors import OptimizerError
    odd = rank_session.world.rank == 1
    options = hvdtrain.ReducerOptions(
        bucket_bytes=99 if odd and difference == "options" else 100)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), options=options)
    a, b = keras.Variable(np.ones((4, 2), "f4"), name="a"), keras.Variable([1.0, 2.0], name="b")
    optimizer.build([a, b])

    def step(x):
        first = x
        if odd and difference == "sparse":
            first = tf.IndexedSlices(x[:1], tf.constant([2]), tf.constant([4, 2]))
        optimizer.apply([first, None if odd and difference == "missing" else x[0]], [a, b])
    with pytest.raises(OptimizerError, match=message):
        (step if eager else tf.function(step))(tf.ones((4, 2)))


@TWO
def test_a_trace_of_one_rank_alone_keeps_nobody_waiting(rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank
    table, bias = keras.Variable(np.ones((50, 2), "f4")), keras.Variable([1.0, 2.0])
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.1))
    optimizer.build([table, bias])

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table.value, ids) + bias.value) ** 2)
        optimizer.apply(tape.gradient(loss, [table.value, bias.value]), [table, bias])
    for number in range(4):
        # Rank 1 has another batch in step 2, and traces anew.
        step(tf.range(2 if rank == 1 and number == 2 else 8) * 5)
    assert_same_everywhere(rank_session, [table, bias, *optimizer.variables])


@TWO
@pytest.mark.parametrize(("rows", "ids_of_ranks", "kind"), [
    (200_000, (8, 8), "sparse"), (200_000, (8, 3), "sparse"), (40, (400, 400), "dense"),
    (40, (400, 300), "dense")])
def test_the_way_of_a_sparse_gradient_is_the_same_on_all_ranks(
        rows, ids_of_ranks, kind, rank_session, tf):
    import hvdtrain
    rng = np.random.default_rng(0)
    table = tf.Variable(tf.zeros((rows, 4)), name="table")
    ids = [rng.integers(0, rows, n) for n in ids_of_ranks]
    with hvdtrain.DistributedGradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, ids[rank_session.world.rank]))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices) == (kind == "sparse")
    expected = np.zeros((rows, 4), "f4")
    np.add.at(expected, np.concatenate(ids), 0.5)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, atol=1e-6)


@TWO
def test_rows_that_are_left_apart_train_as_plain_keras_does(rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank
    ids = np.random.default_rng(0).integers(0, 12, size=(6, 8, 6))

    def train(wrap, rows):
        table = keras.Variable(np.random.default_rng(2).normal(size=(12, 3)).astype("f4"))
        optimizer = keras.optimizers.RMSprop(0.05)
        if wrap:
            hvdtrain.DistributedOptimizer(
                optimizer, options=hvdtrain.ReducerOptions(merge="none"))
        optimizer.build([table])
        for batch in ids:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table.value, batch[rows]) ** 2)
            optimizer.apply([tape.gradient(loss, table.value)], [table])
        return table
    mine = train(True, slice(4 * rank, 4 * rank + 4))
    np.testing.assert_allclose(mine.numpy(), train(False, slice(0, 8)).numpy(), atol=2e-6)
    assert_same_everywhere(rank_session, [mine])


ON_ALL = [pytest.param(name, marks=pytest.mark.ranks(2, collective=name), id=name)
          for name in ("horovod-gloo", "mpi4py")]
TWO_OR_THREE = [ON_ALL[1], pytest.param("horovod-gloo", marks=THREE, id="3-ranks")]


_numbers = itertools.count()


def reducer(collective, **options):
    from hvdtrain.optim import ReducerOptions
    from hvdtrain.optim.reducer import GradientReducer
    return GradientReducer(collective, f"test{next(_numbers)}", ReducerOptions(**options))


ALL_DTYPES = ("float32", "float64", "float16", "bfloat16")


# Each wire on both collectives, in a graph on one of them; each collective with both.
@pytest.mark.parametrize("collective", TWO_OR_THREE)
@pytest.mark.parametrize(("options", "dtypes", "tolerance", "graph_on"), [
    ({}, ALL_DTYPES, 1e-6, "horovod-gloo"),
    ({"predivide": 3.0}, ALL_DTYPES, 1e-6, "mpi4py"),
    ({"op": "sum"}, ("float32", "float64"), 1e-6, "horovod-gloo"),
    ({"compression": "fp16"}, ALL_DTYPES, 1e-3, "mpi4py"),
    ({"compression": "fp16", "predivide": 8.0}, ("float32",), 1e-3, "horovod-gloo"),
    ({"compression": "bf16"}, ALL_DTYPES, 1e-2, "mpi4py"),
])
def test_averages_over_each_wire(collective, options, dtypes, tolerance, graph_on, rank_session,
                                 tf):
    own = {"float16": 2e-3, "bfloat16": 1e-2}  # of the gradient itself
    rng = np.random.default_rng(7)
    shapes = [(5, 3), (), (7,), (1200,)]
    parts = [[rng.normal(size=(rank_session.world.size, *shape)) for shape in shapes]
             for _ in dtypes]
    variables = [tf.Variable(tf.zeros(shape, dtype)) for dtype in dtypes for shape in shapes]
    mine = [tf.cast(part[rank_session.world.rank], dtype)
            for dtype, group in zip(dtypes, parts, strict=True) for part in group]
    reduce = reducer(rank_session.collective, **options)

    def step(*gradients):
        return reduce(gradients, variables, range(len(gradients)))
    out = (tf.function(step) if graph_on == collective else step)(*mine)
    for got, gradient, part in zip(out, mine, [p for g in parts for p in g], strict=True):
        assert got.dtype == gradient.dtype
        assert got.shape == gradient.shape
        expected = part.sum(0) if options.get("op") == "sum" else part.mean(0)
        np.testing.assert_allclose(tf.cast(got, tf.float64), expected,
                                   atol=4 * max(tolerance, own.get(gradient.dtype.name, 0)))
    everyone = rank_session.collective.gather_objects(
        [np.asarray(tf.cast(t, tf.float64)).tolist() for t in out])
    assert all(other == everyone[0] for other in everyone)


@TWO
@pytest.mark.parametrize(("compression", "value", "expected"), [
    ("fp16", 6e4, 6e4), ("bf16", 6e4, 6e4), ("bf16", 3e38, 3e38), ("bf16", 1e-9, 1e-9),
    ("lowrank", 6e4, 6e4), ("lowrank", 1e-30, 1e-30)])
def test_sums_do_not_overflow_on_the_way(compression, value, expected, rank_session, tf):
    reduce = reducer(rank_session.collective, compression=compression)
    variable = tf.Variable(tf.zeros([1200]))
    out = reduce([tf.fill([1200], value)], [variable], [0])[0].numpy()
    np.testing.assert_allclose(out, expected, rtol=1e-2)


@pytest.mark.parametrize("collective", ON_ALL)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "lowrank"])
def test_gathered_rows_over_each_wire(collective, compression, rank_session, tf):
    rank = rank_session.world.rank
    reduce = reducer(rank_session.collective, compression=compression, sparse="gather")
    table = tf.Variable(tf.zeros((1000, 3)))
    rows = [[4, 9, 4], [9, 7]][rank]
    slices = tf.IndexedSlices(tf.ones((len(rows), 3)) * (rank + 0.3), tf.constant(rows),
                              tf.constant([1000, 3]))
    out = reduce([slices], [table], [0])[0]
    assert sorted(out.indices.numpy()) == [4, 7, 9]
    dense = tf.convert_to_tensor(out).numpy()[:, 0]
    np.testing.assert_allclose(dense[[4, 7, 9]], [0.3, 0.65, 0.8], rtol=1e-2)


@pytest.mark.parametrize("options", [
    pytest.param({}, marks=pytest.mark.ranks(2, collective="mpi4py"), id="mpi4py"),
    pytest.param({"op": "sum", "approximation_rank": 2}, marks=TWO, id="sum"),
    pytest.param({"bucket_bytes": 4096}, marks=THREE, id="buckets-3-ranks")])
def test_what_is_sent_and_what_is_kept_back_are_the_whole(options, rank_session, tf):
    """Also what is lost by rounding, on this rank and in the sums."""
    rank, size = rank_session.world.rank, rank_session.world.size
    reduce = reducer(rank_session.collective, compression="lowrank", **options)
    variables = [tf.Variable(tf.zeros(s)) for s in
                 [(64, 96), (3, 3, 8, 32), (10,), (), (700,), (40, 1, 50)]]
    step = tf.function(lambda *g: reduce(g, variables, range(len(variables))))
    sent, exact = [0.0] * len(variables), [0.0] * len(variables)
    for number in range(4):
        parts = [[tf.random.stateless_normal(v.shape, [10 * number + i, r]) * 10.0 ** (i - 3)
                  for i, v in enumerate(variables)] for r in range(size)]
        out = step(*parts[rank])
        assert_same_everywhere(rank_session, [tf.Variable(t) for t in out])
        share = 1 if options.get("op") == "sum" else size
        for i, gradients in enumerate(zip(*parts, strict=True)):
            sent[i] += out[i].numpy()
            exact[i] += sum(g.numpy() for g in gradients) / share
    kept = reduce.compression.feedback.collect()
    for i, v in enumerate(variables):
        rest = kept[f"residual/{i}"].reshape(v.shape) * (size / share)
        np.testing.assert_allclose(sent[i] + rest, exact[i], atol=2e-6 * 10.0 ** (i - 3) * size)
    assert np.abs(rest).max() > 0


@pytest.mark.parametrize("collective", TWO_OR_THREE)
def test_a_gradient_of_low_rank_arrives_whole(collective, rank_session, tf):
    """Of the mean, not of each rank; and after gradients of zeros, which have no columns."""
    rank, size = rank_session.world.rank, rank_session.world.size
    reduce = reducer(rank_session.collective, compression="lowrank")
    variable = tf.Variable(tf.zeros([96, 80]))
    rng = np.random.default_rng(3)
    mean = (rng.normal(size=(96, 2)) @ rng.normal(size=(2, 80))).astype("f4")
    noise = rng.normal(size=(size, 96, 80)).astype("f4")
    mine = mean + noise[rank] - noise.mean(0)
    for gradient in (mine, np.zeros_like(mine), np.zeros_like(mine), mine):
        out = reduce([tf.constant(gradient)], [variable], [0])[0].numpy()
    off = np.linalg.norm(out - mean) / np.linalg.norm(mean)
    assert off < 0.05  # eight bits of numbers that are as large as the noise


@TWO
def test_a_gradient_that_is_not_finite_leaves_no_trace(rank_session, tf):
    """Neither in its own tensor nor in one that travelled apart from it."""
    rank = rank_session.world.rank
    variables = [tf.Variable(tf.zeros([40, 50])) for _ in range(2)]
    good = [tf.random.stateless_normal([40, 50], [i, rank]) for i in range(2)]
    after = []
    for bad_values in ((), (np.inf, np.nan)):
        reduce = reducer(rank_session.collective, compression="lowrank", bucket_bytes=100)
        reduce(good, variables, [0, 1])
        for value in bad_values:
            bad = tf.concat([tf.fill([1, 50], value), good[0][1:]], 0) if rank == 1 else good[0]
            found = reduce([bad, good[1]], variables, [0, 1])
            assert not np.isfinite(found[0].numpy()).all()
            assert np.isfinite(found[1].numpy()).all()
        after.append([t.numpy() for t in reduce([tf.zeros([40, 50])] * 2, variables, [0, 1])])
    for undisturbed, disturbed in zip(*after, strict=True):
        assert np.count_nonzero(undisturbed)
        np.testing.assert_array_equal(undisturbed, disturbed)


@TWO
def test_a_resumed_run_sends_what_the_former_one_kept_back(
        rank_session, keras, tmp_path_factory, caplog):
    import hvdtrain
    folder = rank_session.collective.gather_objects(str(tmp_path_factory.mktemp("kept")))[0]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 20)).astype("f4"), rng.normal(size=(64, 40)).astype("f4")

    def fit(output, epochs, compression="lowrank", **config):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(50, activation="tanh"),
                                  keras.layers.Dense(40)])
        model.compile(hvdtrain.DistributedOptimizer(
            keras.optimizers.Adam(1e-2), options=hvdtrain.ReducerOptions(compression=compression)),
            "mse")
        hvdtrain.fit(
            model, x, y,
            config=hvdtrain.TrainConfig(
            batch_per_rank=8, epochs=epochs, lr_scaling="none", tensorboard=False,
            output=f"{folder}/{output}", **config))
        rank_session.collective.barrier()
        return model
    whole = fit("whole", 2)
    fit("cut", 1)
    resumed = fit("cut", 2, resume=True)
    for a, b in zip(whole.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    fit("cut", 3, compression="none", resume=True)
    if rank_session.world.is_chief:
        assert "no compression that sends it later" in caplog.text


@TWO
@pytest.mark.parametrize(("compression", "steps"), [
    ("none", None), ("none", 2), ("fp16", None), ("bf16", 2), ("lowrank", 2), ("lowrank", None)])
def test_all_ranks_skip_or_apply_together_under_loss_scaling(
        compression, steps, rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank
    v = keras.Variable(np.ones(2000, "f4"))
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
    optimizer = hvdtrain.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0),
        options=hvdtrain.ReducerOptions(compression=compression))
    optimizer.build([v])

    @tf.function
    def step(gradient):
        optimizer.apply([gradient * optimizer.dynamic_scale], [v])
    good = tf.random.stateless_normal([2000], [3, rank])
    overflow = tf.concat([[np.inf], good[1:]], 0)
    step(overflow if rank == 1 else good)
    np.testing.assert_array_equal(v.numpy(), np.ones(2000))
    assert float(optimizer.dynamic_scale.numpy()) == 512.0
    assert int(inner.iterations.numpy()) == 0
    for _ in range(steps or 1):
        step(good)
    assert int(inner.iterations.numpy()) == 1  # updates, not calls
    mean = np.mean([tf.random.stateless_normal([2000], [3, r]) for r in (0, 1)], axis=0)
    moved = (1 - v.numpy()) / 0.1
    assert np.count_nonzero(moved)
    np.testing.assert_allclose(moved, mean, atol=0.02)
    assert_same_everywhere(rank_session, [v, *optimizer.variables])


@TWO
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_with_an_overflow_on_one_rank(policy, rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, dtype=policy),
                              keras.layers.Dense(1, dtype=policy)])
    optimizer = keras.optimizers.SGD(0.01)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
    model.compile(hvdtrain.DistributedOptimizer(
        optimizer, options=hvdtrain.ReducerOptions(compression="bf16")), "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    before = model.trainable_variables[0].numpy()
    x = np.random.default_rng(rank).normal(size=(8, 4)).astype("f4")
    if policy == "mixed_float16":
        bad = x * 1e6 if rank == 1 else x  # float16 overflows in the forward pass
        model.fit(bad, bad[:, :1], batch_size=8, verbose=0)
        np.testing.assert_array_equal(model.trainable_variables[0].numpy(), before)
        assert float(optimizer.dynamic_scale.numpy()) == 128.0
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert np.abs(model.trainable_variables[0].numpy() - before).max() > 1e-5
    assert_same_everywhere(rank_session, [*model.trainable_variables, *optimizer.variables])


@TWO
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_local_variables_stay_on_their_rank(scaled, rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.optim import keras_seam
    rank = rank_session.world.rank
    a, own = keras.Variable([1.0], name="a"), keras.Variable([1.0] * (rank + 1), name="own")
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    hvdtrain.DistributedOptimizer(
        optimizer, options=hvdtrain.ReducerOptions(local_variables=("own",)))
    optimizer.build([a, own])
    factor = 4.0 if scaled else 1.0

    def apply(value):
        optimizer.apply([tf.constant([value * factor]),
                         tf.constant([float(rank) * factor] * (rank + 1))], [a, own])
    apply(float(rank))
    np.testing.assert_allclose(a.numpy(), [0.5])
    np.testing.assert_allclose(own.numpy(), [1.0 - rank] * (rank + 1))
    assert_same_everywhere(rank_session, [
        *keras_seam.shared_weights(optimizer, [a, own]), *keras_seam.shared_variables(optimizer)])
    if scaled:
        apply(np.inf if rank == 1 else 0.0)
        np.testing.assert_allclose(a.numpy(), [0.5])
        assert float(optimizer.dynamic_scale.numpy()) == 2.0


@pytest.mark.parametrize("collective", ON_ALL)
def test_a_loop_with_a_tape_trains_as_one_process_does(collective, rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank

    def make(seed):
        rng = np.random.default_rng(seed)
        return [tf.Variable(rng.normal(size=s).astype("f4"), name=n)
                for n, s in (("w", (5, 3)), ("table", (9, 3)), ("b", (1,)))]

    def step_of(variables, optimizer, tape_of):
        @tf.function
        def step(x, y):
            with tape_of() as tape:
                rows = tf.reduce_mean(tf.gather(variables[1], [1, 2, 7]), 0)
                hidden = x @ variables[0] + rows
                loss = tf.reduce_mean((tf.reduce_sum(hidden, 1) + variables[2] - y[:, 0]) ** 2)
            optimizer.apply(tape.gradient(loss, variables), variables)
        return step
    mine, alone = make(rank), make(0)
    sent = hvdtrain.broadcast_variables(mine)
    assert sent == sum(v.numpy().nbytes for v in mine)
    optimizers = [keras.optimizers.Adam(0.05) for _ in range(2)]
    for optimizer, variables in zip(optimizers, (mine, alone), strict=True):
        optimizer.build(variables)
    distributed = step_of(mine, optimizers[0], hvdtrain.DistributedGradientTape)
    reference = step_of(alone, optimizers[1], tf.GradientTape)
    for number in range(6):
        x, y, all_x, all_y = loop_data(tf, rank, number)
        distributed(x, y)
        reference(all_x, all_y)
    for a, b in zip(mine, alone, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    assert_same_everywhere(rank_session, [*mine, *optimizers[0].variables])


@pytest.mark.ranks(2, collective="horovod-mpi")
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel(rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank
    parts = np.random.default_rng(5).normal(size=(2, 3, 4)).astype("f4")
    tests = {"mixed": parts, "orthogonal": np.stack([[[1, 0], [2, 0]], [[0, 3], [0, 1]]]),
             "parallel": np.stack([np.ones((2, 2)), np.ones((2, 2))])}
    for name, pair in tests.items():
        a, b = pair.astype("f4")
        dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
        expected = (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b
        v = keras.Variable(np.zeros_like(a))
        optimizer = hvdtrain.DistributedOptimizer(
            keras.optimizers.SGD(1.0), options=hvdtrain.ReducerOptions(op="adasum"))
        optimizer.build([v])
        optimizer.apply([tf.constant(pair[rank].astype("f4"))], [v])
        np.testing.assert_allclose(-v.numpy(), expected, atol=1e-5, err_msg=name)
        assert_same_everywhere(rank_session, [v])


@pytest.mark.parametrize(("collective", "message"), [
    pytest.param("horovod-gloo", "over MPI only", marks=TWO, id="gloo"),
    pytest.param("mpi4py", "`mpi4py` has no Adasum",
                 marks=pytest.mark.ranks(2, collective="mpi4py"), id="mpi4py")])
def test_adasum_is_refused_where_it_is_not(collective, message, rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import OptimizerError
    with pytest.raises(OptimizerError, match=message):
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1.0),
                                      options=hvdtrain.ReducerOptions(op="adasum"))


@THREE
@pytest.mark.parametrize("compression", ["fp16", "bf16", "lowrank"])
def test_three_ranks_get_the_same_bits(compression, rank_session, tf):
    rank = rank_session.world.rank
    reduce = reducer(rank_session.collective, compression=compression, sparse="gather",
                     bucket_bytes=4096)
    variables = [tf.Variable(tf.zeros(s), name=f"v{i}")
                 for i, s in enumerate([(3,), (50, 40), (), (2100,)])]
    table = tf.Variable(tf.zeros([300, 5]))

    @tf.function
    def step(number):
        normal = [tf.random.stateless_normal(v.shape, [number, 10 * rank + i])
                  for i, v in enumerate(variables)]
        rows = tf.random.stateless_uniform([40], [number, rank], 0, 300, tf.int32)
        slices = tf.IndexedSlices(tf.random.stateless_normal([40, 5], [number, rank]), rows,
                                  tf.constant([300, 5]))
        *dense, gathered = reduce([*normal, slices], [*variables, table], range(5))
        return [*dense, tf.convert_to_tensor(gathered)]
    for number in range(3):
        out = [t.numpy().tobytes() for t in step(tf.constant(number))]
        assert all(theirs == out for theirs in rank_session.collective.gather_objects(out))
