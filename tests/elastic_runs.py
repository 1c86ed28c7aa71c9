"""Trainings that end within an epoch and go on with other ranks; each is a case.

    hvdtrain launch -np N -- python -m tests.elastic_runs STAGE FOLDER [CASE ...]

Stage `whole` trains each case undisturbed, `cut` ends it by a change of ranks, `on` goes on from
its commits. The chief writes weights, history and what the case notes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

EPOCHS, CUT_AT = 3, (1, 2)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def data(samples=53, width=6):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(samples, width))
    return x, (x[:, :1] > 0).astype("float64")


def model_of(keras, optimizer=None, normalized=False, metrics=()):
    keras.utils.set_random_seed(9)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((6,)), layers.Dense(8, activation="tanh"),
        *([layers.BatchNormalization()] if normalized else ()),
        layers.Dense(1, activation="sigmoid")])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "binary_crossentropy",
                  metrics=["accuracy", *metrics])
    return model


def source(samples=53):
    import hvdtrain
    return hvdtrain.ArraySource(data(samples))


@case
def uneven_batches(keras, folder):
    """With backups, which are older than a commit."""
    backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    return model_of(keras, metrics=[keras.metrics.AUC(num_thresholds=20)]), {
        "x": source(), "validation_data": data(17), "callbacks": [backup]}, {"batch_per_rank": 3}


@case
def second_training(keras, folder):
    """Of arrays, with a global batch. The first training has no files: it is done again."""
    import hvdtrain
    model, (x, y) = model_of(keras), data()
    return model, {"x": x, "y": y, "batch_size": 7, "before": lambda: hvdtrain.fit(
        model, x, y, verbose=0)}, {"seed": 5}


@case
def second_training_with_files(keras, folder):
    """The first one is taken from its files; state divided by whole variables."""
    import hvdtrain
    model, (x, y), begun = model_of(keras, keras.optimizers.Lamb(0.01)), data(20), []

    class Begun(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            begun.append(epoch)

    def before():
        hvdtrain.fit(model, x, y, epochs=2, verbose=0, callbacks=[Begun()],
                     config=hvdtrain.TrainConfig(output=folder / "first", tensorboard=False,
                                                 zero=True))
    return model, {"x": source(), "before": before, "notes": lambda: len(begun)}, {
        "batch_per_rank": 4, "zero": True}


@case
def scaled_rate_with_warmup(keras, folder):
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9),
                                     momentum=0.9)
    return model_of(keras, optimizer, normalized=True), {"x": source()}, {
        "batch_per_rank": 4, "warmup_epochs": 2.0, "sync_batch_norm": True}


@case
def state_of_callbacks(keras, folder):
    class Seen(keras.callbacks.Callback):
        steps = epochs = 0

        def on_train_begin(self, logs=None):
            self.steps, self.losses = 0, []

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1

        def on_epoch_end(self, epoch, logs=None):
            self.losses.append(logs["loss"])
            logs["seen"] = float(self.steps)

    class OnChief(Seen):
        chief_only = True

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1

        def get_state(self):
            return {"steps": self.steps, "epochs": self.epochs}

        def set_state(self, state):
            self.steps, self.epochs = state["steps"], state["epochs"]
    callbacks = [Seen(), OnChief(), keras.callbacks.EarlyStopping(
        "loss", patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0)]
    return model_of(keras), {"x": source(), "callbacks": callbacks, "notes": lambda: [
        callbacks[0].losses, callbacks[1].steps, callbacks[1].epochs]}, {"batch_per_rank": 4}


@case
def divided_state(keras, folder):
    return model_of(keras), {"x": source()}, {"batch_per_rank": 4, "zero": True}


@case
def a_stream_with_accumulation(keras, folder):
    import tensorflow as tf

    import hvdtrain
    stream = hvdtrain.StreamSource(tf.data.Dataset.from_tensor_slices(data(48)))
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    return model_of(keras, optimizer), {"x": stream}, {"batch_per_rank": 2, "shuffle": False}


@case
def a_pipeline_of_batches(keras, folder):
    import tensorflow as tf
    keras.utils.set_random_seed(9)
    batches = tf.data.Dataset.from_tensor_slices(data(50)).shuffle(50, seed=3).batch(4)
    return model_of(keras), {"x": batches, "shuffle": False}, {"batch": "per_rank"}


@case
def the_batch_of_each_rank(keras, folder):
    """The weight counts how often each sample was trained on."""
    import hvdtrain
    rows = np.eye(72)
    model = keras.Sequential([keras.Input((72,)), keras.layers.Dense(
        1, use_bias=False, kernel_initializer="zeros")])

    def loss(y, predicted):  # the gradient is the sum of the rows, over the batch
        return predicted[:, 0]
    model.compile(keras.optimizers.SGD(1.0), loss)
    return model, {"x": hvdtrain.ArraySource((rows, np.zeros((72, 1))))}, {
        "batch_per_rank": 4, "keep": "batch_per_rank"}


class Cut:
    """A callback that lets the launcher ask for a change before a step."""

    def __new__(cls, keras, folder):
        class Ask(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self._epoch = epoch

            def on_train_batch_begin(self, batch, logs=None):
                if (self._epoch, batch) == CUT_AT:
                    (folder / "change").touch()

            def get_state(self):
                return {}

            def set_state(self, state):
                pass
        return Ask()


ON_HOSTS_OF_THEIR_OWN = ("divided_state", "state_of_callbacks")


def elastic_for(name, session, folder, world):
    """What `hvdtrain.init` makes of the variables of the launcher; each case has its own."""
    from hvdtrain.train.elastic import Elastic
    alone = name in ON_HOSTS_OF_THEIR_OWN
    if alone:
        folder = folder / f"rank{session.world.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "change").unlink(missing_ok=True)
    session.collective.barrier()
    made = Elastic.of({"HVDTRAIN_COMMITS": str(folder), "HVDTRAIN_WORLD": str(world)},
                      session.world)
    if alone:
        made.writes, made.one_host = True, False
    return made


def run(name, stage, folder, session, keras):
    import hvdtrain
    from hvdtrain.train.coordinator import ChangedError
    model, arguments, settings = CASES[name](keras, folder)
    notes = arguments.pop("notes", lambda: None)
    before = arguments.pop("before", lambda: None)
    elastic = None if stage == "whole" else elastic_for(
        name, session, folder / name, 1 + (stage == "on"))
    object.__setattr__(session, "elastic", elastic)
    before()
    asked = elastic.store.folder if stage == "cut" and session.world.rank == 1 else folder
    callbacks = [*arguments.pop("callbacks", []), Cut(keras, asked)]
    config = hvdtrain.TrainConfig(epochs=EPOCHS, **settings)
    try:
        history = hvdtrain.fit(model, callbacks=callbacks, config=config, verbose=0, **arguments)
    except ChangedError:
        assert stage == "cut"  # noqa: S101
        return
    assert stage != "cut"
    if session.world.is_chief:
        np.savez(folder / f"{name}.npz", *model.get_weights())
        (folder / f"{name}.json").write_text(json.dumps(
            {"history": history.history, "epoch": history.epoch, "notes": notes()}, default=float))
    object.__setattr__(session, "elastic", None)


def main():
    import keras

    import hvdtrain
    from hvdtrain.train import coordinator
    stage, folder, *names = sys.argv[1:]
    coordinator.AGREE_EVERY_S = 0.0
    session = hvdtrain.init()
    keras.config.set_floatx("float64")
    for name in names or CASES:
        if session.world.is_chief:
            print(f"=== {stage} {name}", flush=True)
        run(name, stage, Path(folder), session, keras)


if __name__ == "__main__":
    main()
