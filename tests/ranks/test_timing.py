"""Where the time of a training goes: told for each rank, with the slowest one and its reason."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.runtime.phases import added, slowest

BOTH = [pytest.param(name, marks=pytest.mark.ranks(2, collective=name), id=name)
        for name in ("horovod-gloo", "shared-memory")]
SLEEP_S, STEPS, EPOCHS = 0.03, 12, 3


def train(keras, folder, *, rank, slow, **compiled):
    """A run whose rank 1 sleeps in each step, by default in no place of them."""
    import hvdtrain
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).random((STEPS * 16, 32), dtype="f4")

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            if slow == "input" and rank == 1:
                time.sleep(SLEEP_S)
            return x[index * 16:index * 16 + 16], x[index * 16:index * 16 + 16, :1]

    class Sleep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if slow == "other" and rank == 1:
                time.sleep(SLEEP_S)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    hvdtrain.fit(model, Data(), validation_data=(x, x[:, :1]), callbacks=[Sleep()], epochs=EPOCHS,
                 config=hvdtrain.TrainConfig(output=folder, tensorboard=False), verbose=2)
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def on_all(session, value):
    return session.collective.gather_objects(value)[0]


@pytest.mark.parametrize("collective", BOTH)
@pytest.mark.parametrize("slow", ["input", "other"])
def test_a_slow_rank_is_named_with_its_reason(collective, slow, rank_session, keras, tmp_path,
                                              capsys):
    rank, folder = rank_session.world.rank, on_all(rank_session, str(tmp_path / "run"))
    lines = train(keras, folder, rank=rank, slow=slow)
    printed = capsys.readouterr().out
    for before, line in itertools.pairwise(lines):
        spent = line["time"]
        assert spent[slow][1] > 0.4 * STEPS * SLEEP_S  # batches are read ahead
        assert spent["waiting"][0] > 0.3 * STEPS * SLEEP_S, spent
        assert spent["waiting"][1] < 0.5 * spent["waiting"][0]
        assert spent["evaluating"][0] > 0
        for each in zip(*spent.values(), strict=True):
            assert sum(each) == pytest.approx(line["time_s"] - before["time_s"], rel=0.1, abs=0.1)
    told = slowest(added([line["time"] for line in lines[1:]]), ["a", "b"])
    assert told.startswith("rank 1 on b spends ")
    assert f"of the time on {slow}; the others spend" in told
    assert on_all(rank_session, printed).count("hvdtrain time") == 1
    assert rank == 0 or "hvdtrain time" not in printed


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("collective", BOTH)
def test_data_of_unknown_length(collective, rank_session, keras, tf, tmp_path):
    """Keras calls the train function once more, which finds no batch."""
    import hvdtrain
    x = np.random.default_rng(0).random((STEPS * 16, 32), dtype="f4")
    data = tf.data.Dataset.from_generator(
        lambda: iter(x), output_signature=tf.TensorSpec((32,))).map(
        lambda row: (row, row[:1])).batch(16)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    folder = on_all(rank_session, str(tmp_path / "run"))
    hvdtrain.fit(model, data, epochs=EPOCHS, verbose=0, shuffle=False,
                 config=hvdtrain.TrainConfig(output=folder, tensorboard=False))
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        assert min(line["time"]["input"]) > 0
        assert min(line["time"]["updating"]) > 0
        assert max(map(sum, zip(*line["time"].values(), strict=True))) < 2 * line["seconds"]


@pytest.mark.parametrize("collective", BOTH)
def test_ranks_that_are_equally_fast_are_not_named(collective, rank_session, keras, tmp_path,
                                                   capsys):
    folder = on_all(rank_session, str(tmp_path / "run"))
    for number, compiled in enumerate([
            {}, {"steps_per_execution": 3}, {"run_eagerly": True},
            {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)}]):
        lines = train(keras, f"{folder}{number}", rank=rank_session.world.rank, slow="",
                      **compiled)
        assert len(lines) == EPOCHS
        assert all(seconds >= 0 for line in lines for each in line["time"].values()
                   for seconds in each)
        assert lines[0]["time"]["building"][0] > 0 == lines[1]["time"]["building"][0]
        assert all(line["time"]["computing"][0] > 0 for line in lines)
    assert on_all(rank_session, capsys.readouterr().out).count("hvdtrain time") == 4


@pytest.mark.ranks(2, collective="horovod-gloo")
def test_few_collectives_at_the_end_of_an_epoch(rank_session, keras, monkeypatch):
    """Losses, statistics of layers, metrics (2), weights, and requests to stop."""
    import horovod.tensorflow as hvd
    from horovod.tensorflow import mpi_ops

    import hvdtrain
    done = []

    def counted(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (
            done.append(k["name"]), original(*a, **k))[1])
    counted(hvd, "allgather")
    counted(mpi_ops, "_allreduce")
    counted(mpi_ops, "_grouped_allreduce")
    ends = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done.clear()

        def on_epoch_end(self, epoch, logs=None):
            ends.append(list(done))
    x = np.random.default_rng(0).random((64, 32), dtype="f4")
    model = keras.Sequential([keras.Input((32,)), keras.layers.BatchNormalization(),
                              keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
    hvdtrain.fit(model, x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=[Count()])
    assert ends[1:] == [["hvdtrain.agree", "hvdtrain.gather", "hvdtrain.statistics",
                         "hvdtrain.gather", "hvdtrain.metrics", "hvdtrain.gather"]] * 2
