"""ZeRO-1 on real ranks: the weights and files of a plain optimizer, with a part of its state."""

import contextlib
import functools
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

TWO = pytest.mark.ranks(2)


def quiet_fit(*args, **kwargs):
    import hvdtrain
    with contextlib.redirect_stdout(io.StringIO()):
        return hvdtrain.fit(*args, **kwargs)


def train(make_optimizer, session, bucket_bytes=32 << 20, steps_per_execution=1, **settings):
    import equality

    import hvdtrain
    model = equality.make_model()
    optimizer = hvdtrain.DistributedOptimizer(
        make_optimizer(), zero=True, options=hvdtrain.ReducerOptions(bucket_bytes=bucket_bytes))
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    config = hvdtrain.TrainConfig(batch_per_rank=equality.BATCH, shuffle=False, zero=True,
                                  lr_scaling="none", **settings)
    quiet_fit(model, *equality.make_data(session.world.size), config=config)
    return model


@functools.cache
def train_plain(make_optimizer, size):
    import equality
    return equality.train_plain(make_optimizer, size)


def assert_like_one_process(make_optimizer, session, atol=1e-6, **kwargs):
    from hvdtrain.optim import keras_seam
    expected, moved = train_plain(make_optimizer, session.world.size)
    model = train(make_optimizer, session, **kwargs)
    assert moved > 1e-4
    for a, b in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, atol=atol)
    assert_same_everywhere(session, [*model.trainable_variables,
                                     *keras_seam.shared_variables(model.optimizer)])


# Each optimizer once, here or with its files below, and each collective with each way of dividing
# state. Clipping of each gradient is with the cuts, clipping of values with several steps per call.
@pytest.mark.parametrize("name", [
    *[pytest.param(n, marks=TWO) for n in (
        "Ftrl", "SGD, EMA overwriting", "SGD, accumulation 4, global_clipnorm",
        "Adam, CosineDecay with warmup")],
    pytest.param("AdamW, weight decay", marks=pytest.mark.ranks(3), id="3-ranks"),
    pytest.param("Muon", marks=pytest.mark.ranks(3), id="3-ranks-Muon"),
    pytest.param("Lamb", marks=pytest.mark.ranks(2, collective="mpi4py"), id="mpi4py-Lamb"),
    pytest.param("LossScaleOptimizer(SGD, accumulation 4)",
                 marks=pytest.mark.ranks(2, collective="mpi4py"), id="mpi4py-scale"),
    pytest.param("Adam, global_clipnorm", marks=pytest.mark.ranks(2, collective="horovod-mpi"),
                 id="horovod-mpi"),
])
def test_the_weights_are_those_of_one_process(name, rank_session, keras):
    import equality
    # An average over 3 rounds otherwise than one over 48 samples; without zero it is 2e-6 too.
    atol = 1e-6 if rank_session.world.size == 2 else 5e-6
    assert_like_one_process(equality.configurations()[name], rank_session, atol=atol)


def adamw():
    """Biases do not decay, and gradients are clipped each by its own norm."""
    import keras
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5, clipnorm=0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@TWO
@pytest.mark.parametrize("bucket_bytes", [300, 5000])
def test_variables_that_decay_or_not_may_be_cut_anywhere(bucket_bytes, rank_session, keras):
    assert_like_one_process(adamw, rank_session, bucket_bytes=bucket_bytes)


@TWO
@pytest.mark.parametrize("name", ["Adam, accumulation 4", "SGD, clipvalue"])
def test_several_steps_in_one_call_of_the_train_function(name, rank_session, keras):
    import equality
    assert_like_one_process(equality.configurations()[name], rank_session, steps_per_execution=5)


def bytes_of(optimizer):
    return sum(int(np.prod(v.shape)) * v.value.dtype.size for v in optimizer.variables)


@TWO
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adafactor"])
def test_a_rank_holds_its_share_of_the_state(name, rank_session, keras):
    import hvdtrain
    # One variable is as large as all others together.
    variables = [keras.Variable(np.ones(shape, "f4"), name=f"v{i}") for i, shape in enumerate(
        [(400, 300), (300,), (300, 200), (200,), (200, 300), (10,)])]
    plain, mine = (getattr(keras.optimizers, name)(0.01) for _ in range(2))
    plain.build(variables)
    hvdtrain.DistributedOptimizer(mine, zero=True)
    mine.build(variables)
    assert bytes_of(mine) <= 0.55 * bytes_of(plain)


@TWO
def test_more_ranks_than_variables(rank_session, keras, tf):
    import hvdtrain
    results = []
    for zero in (False, True):
        v = keras.Variable(np.arange(6, dtype="f4").reshape(2, 3) + 1)
        opt = keras.optimizers.Adafactor(0.1)
        if zero:
            hvdtrain.DistributedOptimizer(opt, zero=True)
        opt.build([v])
        for step in range(3):
            factor = (rank_session.world.rank + 0.5) if zero else 1.0
            opt.apply([tf.constant([[1.0, -2.0, 3.0], [0.5, 1.0, 2.0]]) * factor * (step + 1)], [v])
        assert int(opt.iterations.numpy()) == 3
        results.append(v.numpy())
    np.testing.assert_allclose(*results, atol=1e-6)


@TWO
@pytest.mark.parametrize("eager", [False, True])
def test_a_loop_of_ones_own_with_an_embedding(eager, rank_session, keras, tf):
    import hvdtrain
    rank = rank_session.world.rank
    ids = np.random.default_rng(0).integers(0, 12, size=(5, 8, 6))

    def run(zero):
        rng = np.random.default_rng(2)
        table, w = (keras.Variable(rng.normal(size=s).astype("f4")) for s in ((12, 3), (3, 2)))
        opt = keras.optimizers.Adam(0.05)
        if zero:
            hvdtrain.DistributedOptimizer(opt, zero=True)
        opt.build([table, w])

        def step(batch):
            with tf.GradientTape() as tape:
                rows = tf.gather(table.value, batch)
                loss = tf.reduce_mean((rows @ w.value) ** 2)
            grads = tape.gradient(loss, [table.value, w.value])
            if zero:  # in another order than it was built for
                opt.apply(grads[::-1], [w, table])
            else:
                opt.apply([tf.convert_to_tensor(grads[0]), grads[1]], [table, w])
        step = step if eager else tf.function(step)
        for batch in ids:
            step(tf.constant(batch[4 * rank:4 * rank + 4] if zero else batch))
        return [table, w]
    for a, b in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


@TWO
def test_an_overflow_on_one_rank_is_skipped_by_all(rank_session, keras, tf):
    import hvdtrain
    for steps in (None, 2):
        v = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.Adam(0.1, gradient_accumulation_steps=steps)
        opt = hvdtrain.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner), zero=True)
        opt.build([v])
        bad = rank_session.world.rank == 1
        opt.apply([tf.constant([np.inf if bad else 1.0, 1.0])], [v])
        np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])
        assert float(opt.dynamic_scale.numpy()) == 2.0 ** 14


PLAIN_PROCESS = """
import sys
import keras, numpy as np
before, after, data = sys.argv[1:]
model = keras.models.load_model(before)
assert "hvdtrain" not in sys.modules and "horovod" not in sys.modules
x, y = np.load(data).values()
model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
model.save(after)
"""

OPTIMIZERS = {
    "AdamW AMSGrad, EMA, accumulation": lambda o: o.AdamW(
        0.01, amsgrad=True, use_ema=True, gradient_accumulation_steps=5),
    "Nadam": lambda o: o.Nadam(0.01),
    "Muon": lambda o: o.Muon(0.01),
    "Adafactor": lambda o: o.Adafactor(0.01),
    "LossScaleOptimizer": lambda o: o.LossScaleOptimizer(
        o.Adam(0.01, global_clipnorm=0.05), dynamic_growth_steps=7),
    "MultiOptimizer": lambda o: o.MultiOptimizer(
        o.OptimizerMap(o.SGD(0.05, momentum=0.9), {"d0/.*": o.Adam(0.01)})),
}


def variables_of(model):
    return [*model.variables, *model.optimizer.variables]


@TWO
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_files_are_those_of_a_plain_optimizer_and_load_again(
        name, rank_session, keras, tmp_path):
    import equality

    import hvdtrain
    from hvdtrain.optim import keras_seam
    folder = Path(rank_session.collective.gather_objects(str(tmp_path))[0])

    def make():
        return OPTIMIZERS[name](keras.optimizers)
    model = train(make, rank_session, output=folder / "run", tensorboard=False)
    plain = equality.make_model()
    optimizer = make()
    optimizer.build(plain.trainable_variables)
    plain.compile(optimizer, "mse")
    x, y = equality.make_data(2)
    start = [v.numpy() for v in plain.trainable_variables]
    plain.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert max(np.abs(a - b.numpy()).max()
               for a, b in zip(start, plain.trainable_variables, strict=True)) > 1e-4
    for a, b in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    assert_same_everywhere(rank_session, [*model.trainable_variables,
                                          *keras_seam.shared_variables(model.optimizer)])
    saved = keras.models.load_model(folder / "run/model.keras")
    assert len(saved.optimizer.variables) == len(plain.optimizer.variables)
    for a, b in zip(variables_of(saved), variables_of(plain), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=3e-6, err_msg=b.path)
    # and back: a plain file, loaded by every rank, trained on with divided state
    saved.compile(hvdtrain.DistributedOptimizer(saved.optimizer, zero=True), "mse")
    config = hvdtrain.TrainConfig(batch_per_rank=8, shuffle=False, lr_scaling="none", zero=True)
    quiet_fit(saved, x, y, config=config)
    plain.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    for a, b in zip(saved.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=5e-6)


@TWO
def test_a_process_without_hvdtrain_trains_on_what_two_ranks_saved(
        rank_session, keras, tmp_path):
    import equality
    folder = Path(rank_session.collective.gather_objects(str(tmp_path))[0])
    model = train(lambda: keras.optimizers.Adam(0.01), rank_session, output=folder / "run",
                  tensorboard=False)
    x, y = equality.make_data(2)
    if rank_session.world.is_chief:
        np.savez(folder / "data.npz", x=x, y=y)
        program = [sys.executable, "-c", PLAIN_PROCESS, folder / "run/model.keras",
                   folder / "after.keras", folder / "data.npz"]
        subprocess.run(program, check=True, cwd=folder)
    rank_session.collective.barrier()
    after = keras.models.load_model(folder / "after.keras")
    import hvdtrain
    config = hvdtrain.TrainConfig(batch_per_rank=8, shuffle=False, lr_scaling="none", zero=True)
    quiet_fit(model, x, y, config=config)
    for a, b in zip(model.trainable_variables, after.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=5e-6)


@TWO
def test_a_run_goes_on_with_or_without_it(rank_session, keras, tmp_path):
    import equality

    import hvdtrain
    from hvdtrain.settings import replace
    folder = Path(rank_session.collective.gather_objects(str(tmp_path))[0])

    def run(zero, config):
        model = equality.make_model()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        model.compile(hvdtrain.DistributedOptimizer(optimizer, zero=zero), "mse")
        quiet_fit(model, *equality.make_data(2), config=replace(config, zero=zero))
        rank_session.collective.barrier()
        return model
    config = hvdtrain.TrainConfig(batch_per_rank=8, epochs=2, output=folder / "whole",
                                  tensorboard=False)
    whole = run(False, config)
    for first in (False, True):
        cut = replace(config, output=folder / f"cut-{first}", resume=True)
        run(first, replace(cut, epochs=1, resume=False))
        resumed = run(not first, cut)
        for a, b in zip(resumed.trainable_variables, whole.trainable_variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=5e-6)


@TWO
def test_what_cannot_be_divided_is_refused(rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.errors import OptimizerError
    o = keras.optimizers

    class Mine(o.SGD):
        pass
    with pytest.raises(OptimizerError, match=r"these optimizers of Keras: SGD, .*Received: Mine"):
        hvdtrain.DistributedOptimizer(Mine(0.1), zero=True)
    with pytest.raises(OptimizerError, match="Received: ScheduleFreeAdamW"):
        hvdtrain.DistributedOptimizer(o.ScheduleFreeAdamW(0.1), zero=True)
    with pytest.raises(OptimizerError, match="cannot be combined with compression='fp16'"):
        hvdtrain.DistributedOptimizer(
            o.SGD(0.1), zero=True, options=hvdtrain.ReducerOptions(compression="fp16"))
    half = hvdtrain.DistributedOptimizer(o.SGD(0.1), zero=True)
    with pytest.raises(OptimizerError, match="is of bfloat16"):
        half.build([keras.Variable([1.0], dtype="bfloat16")])
    used, unused = keras.Variable([1.0], name="used"), keras.Variable([1.0], name="unused")
    two = hvdtrain.DistributedOptimizer(o.SGD(0.1), zero=True)
    two.build([used, unused])
    with pytest.raises(OptimizerError, match="2 variables.*`unused` has none"):
        two.apply([tf.constant([1.0]), None], [used, unused])
    with pytest.raises(OptimizerError, match="one rank alone cannot save it"):
        two.save_own_variables({})
    with hvdtrain.consolidated(two):
        if rank_session.world.is_chief:
            store = {}
            two.save_own_variables(store)
            assert len(store) == 2


@TWO
def test_what_does_not_go_together_in_fit(rank_session, keras, tmp_path):
    import hvdtrain
    from hvdtrain.errors import OptimizerError
    data = (np.ones((8, 2), "f4"), np.ones((8, 1), "f4"))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), zero=True), "mse")
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")
    with pytest.raises(OptimizerError, match="ModelCheckpoint saves the optimizer on the chief"):
        quiet_fit(model, *data, callbacks=[saving])
