"""Engine tf in one process with two CPU replicas: runs that are cut, refused or broken.

Marked `ranks(1)`: the CPU must be split before TensorFlow runs its first operation.
"""

import dataclasses
import json

import numpy as np
import pytest

from hvdtrain.errors import CheckpointError, ConfigError, DeviceError, OptimizerError, TrainingError
from hvdtrain.settings import replace
from tests.engines.tf.cases import (
    SGD,
    TWO,
    Case,
    distance,
    embedding,
    normalized,
    numbers,
    settings,
    train,
    with_state,
    words,
)

pytestmark = [pytest.mark.ranks(1), pytest.mark.usefixtures("fresh_keras")]


def test_a_run_that_was_cut_is_the_run_that_was_not(tmp_path):
    """Cut at the end of an epoch, and then by a signal within the next."""
    def make():
        return Case(lambda keras: keras.optimizers.Adam(0.01), with_state)
    whole, cut = make(), make()
    config = settings("mirrored", TWO, output=tmp_path / "whole", batch_per_rank=2)
    expected = train(whole, config).history
    config = replace(config, output=tmp_path / "cut")
    first = train(cut, replace(config, epochs=1))
    assert {k: v[0] for k, v in expected.items()} == {k: v[0] for k, v in first.history.items()}
    with pytest.raises(CheckpointError, match="holds files of a former run"):
        train(make(), config)
    from hvdtrain.train.coordinator import StoppedError
    asked = iter([False, True])
    config = replace(config, resume=True)
    with pytest.raises(StoppedError, match=r"after step 2\d of epoch 2"):
        train(cut, config, stop_asked=lambda: next(asked, True))
    result = train(cut, config)
    assert result.first_epoch == 1
    # Where it was cut within the epoch the statistics were averaged once more.
    assert distance(whole.weights, cut.weights) < 1e-6
    for name, values in result.history.items():
        assert values == pytest.approx(expected[name][1:], abs=1e-6)
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


@pytest.mark.parametrize(("samples", "processes", "replicas", "remainder"), [
    (150, 1, 3, "drop"), (31, 2, 2, "pad"), (31, 2, 2, "drop"), (16, 2, 2, "pad"),
    (23, 1, 4, "pad")])
def test_a_replica_sees_what_the_rank_in_its_place_sees(samples, processes, replicas, remainder):
    from hvdtrain.data.plans import ShardPlan
    from hvdtrain.data.source import ArraySource
    from hvdtrain.engines.tf_distribute.training import training_input

    class Strategy:
        """Hands the data set over as it is."""

        def distribute_datasets_from_function(self, make):
            return make(None)
    plan = ShardPlan(samples=samples, rank=0, size=processes * replicas, batch_per_rank=4,
                     remainder=remainder)
    source = ArraySource((np.arange(samples), np.arange(samples)))
    for process in range(processes):
        batches = training_input(
            Strategy(), source, dataclasses.replace(plan, rank=process * replicas),
            replicas_here=replicas, epoch=1, step=1).as_numpy_iterator()
        for epoch, first_step in ((1, 1), (2, 0)):
            for step in range(first_step, plan.steps):
                for replica in range(replicas):
                    rank = dataclasses.replace(plan, rank=process * replicas + replica)
                    expected = rank.order(epoch)[step * 4:(step + 1) * 4]
                    assert next(batches)[0].tolist() == expected.tolist()


def test_a_plan_is_printed_and_nothing_done(tmp_path, capsys):
    case = Case(SGD[1])
    result = train(case, settings("mirrored", TWO, output=tmp_path / "run"), dry_run=True)
    text = capsys.readouterr().out
    assert "mirrored (MirroredStrategy, reduction to one device)" in text
    assert "8 per rank x 2 = 16 global" in text
    assert result.history == {}
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    x, y = numbers()
    x[3] = np.nan
    case = Case(SGD[1], with_state, (x, y), validation=0)
    with pytest.raises(TrainingError, match="The loss is not finite"):
        train(case, settings("mirrored", TWO, output=tmp_path))
    assert not list(tmp_path.rglob("*.keras"))


def test_replicas_that_differ_stop_the_run():
    import keras

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[0].kernel.value.values[1].assign_add(
                np.full((8, 16), 1e-3, "float32"))
    with pytest.raises(TrainingError, match=r"replica 1 differs from replica 0, first in .*kernel"):
        train(Case(SGD[1], callbacks=[Breaks()]), settings("mirrored", TWO))


@pytest.mark.parametrize(("policy", "strategy"), [
    ("mixed_float16", "mirrored"), ("mixed_bfloat16", "central_storage")])
def test_mixed_precision(policy, strategy):
    import keras
    keras.config.set_dtype_policy(policy)
    case = Case(lambda keras: keras.optimizers.Adam(0.01), validation=0)
    result = train(case, settings(strategy, TWO))
    history = case.plain(2)[1]
    assert result.history["loss"] == pytest.approx(history["loss"], rel=1e-2)


@pytest.mark.parametrize(("strategy", "make", "error", "said"), [
    ("mirrored", lambda keras: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
     ConfigError, "gradient_accumulation_steps=2 cannot be trained under"),
    ("mirrored", lambda keras: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3),
     ConfigError, "ema_overwrite_frequency=3 cannot be trained under"),
    ("central_storage", lambda keras: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1)), ConfigError, "Use mixed_bfloat16"),
    ("default", None, OptimizerError, "is a DistributedOptimizer of engine allreduce"),
])
def test_what_a_strategy_cannot_do_is_refused(strategy, make, error, said):
    if make is None:
        from hvdtrain.collectives.single import SingleCollective
        from hvdtrain.optim.distributed import DistributedOptimizer

        def make(keras):
            return DistributedOptimizer(keras.optimizers.SGD(0.1), collective=SingleCollective())
    case = Case(make)
    with pytest.raises(error, match=said):
        train(case, settings(strategy, {} if strategy == "default" else TWO))


@pytest.mark.parametrize("name", ["", "local"])
def test_a_tpu_that_is_not_there(name):
    with pytest.raises(DeviceError, match=r"The TPU .* cannot be used .*--tpu NAME"):
        train(Case(SGD[1]), settings("tpu", {"tpu": name}))


@pytest.mark.parametrize(("layers", "data"), [(normalized, None), (embedding, words())])
def test_the_step_compiles_for_a_tpu(layers, data):
    """XLA is what a TPU runs; here it compiles for the CPU."""
    case = Case(lambda keras: keras.optimizers.SGD(0.05, clipnorm=1.0), layers, data,
                validation=0, jit_compile=True)
    result = train(case, settings("default"))
    assert case.models[-1].jit_compile is True
    assert result.history["loss"] == pytest.approx(case.plain(1)[1]["loss"], rel=1e-4)


def test_a_train_step_of_its_own_is_told(warnings_of):
    import keras

    class Own(keras.Sequential):
        def compute_loss(self, *arguments, **named):
            return super().compute_loss(*arguments, **named)
    case = Case(SGD[1], validation=0)
    case.kind = Own
    train(case, settings("mirrored", TWO, epochs=1))
    assert any("Own has a compute_loss of its own" in line for line in warnings_of())


def test_patches_are_put_back_and_know_what_they_replace():
    import keras
    import tensorflow as tf

    from hvdtrain.engines.tf_distribute import patches
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    known = patches.patches_of(strategy)
    before = [getattr(p.owner, p.name) for p in known]
    with patches.applied(strategy):
        assert all(getattr(p.owner, p.name) != was for p, was in zip(known, before, strict=True))
    assert [getattr(p.owner, p.name) for p in known] == before
    changed = patches.Patch(keras.random.SeedGenerator, "next", ("sorted",), lambda was: was)
    with (pytest.raises(OptimizerError, match=r"next\(self, sorted\) was expected, found"),
          changed.applied()):
        pass
