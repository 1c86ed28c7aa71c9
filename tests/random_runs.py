"""Random small trainings, by hvdtrain on all ranks and by plain Keras in one process.

`draw(seed, ranks)` gives a case: layers, optimizer, loss, callbacks, kind of data, sizes, and
steps at which the run is stopped and resumed. `difference(case, ...)` runs it both ways, in
float64, where what is not a fault is far below 1e-5. Equal on all ranks; the chief runs plain
Keras.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. Its text is all that is needed to run it again."""

    seed: int
    ranks: int
    kind: str
    data: str
    samples: int
    held: int
    epochs: int
    optimizer: str
    options: dict
    loss: str
    reduction: str
    weighted: bool
    callbacks: tuple
    stops: tuple
    settings: dict
    layers: tuple
    steps_per_execution: int


def draw(seed: int, ranks: int) -> Case:
    """A case that depends on its seed and the number of ranks only."""
    rng = np.random.default_rng([seed, ranks])

    def one(*values):
        return values[rng.integers(len(values))]

    def maybe(chance):
        return bool(rng.random() < chance)
    kind = one("dense", "dense", "sequence", "tokens", "conv", "two", "own_step")
    data = one("arrays", "arrays", "stream", "batches", "function", "pydataset")
    optimizer = one("SGD", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Nadam", "Adamax", "Lamb")
    options: dict = {}
    if optimizer == "SGD" and maybe(0.6):
        options["momentum"] = 0.9
    if maybe(0.3):
        options[one("clipnorm", "global_clipnorm", "clipvalue")] = 0.05
    if maybe(0.3):
        options["gradient_accumulation_steps"] = one(2, 3)
    elif maybe(0.3):
        options |= {"use_ema": True, "ema_momentum": 0.8}
        if maybe(0.3):
            options["ema_overwrite_frequency"] = 3
    settings: dict = {"remainder": one("join", "pad", "drop"), "bucket_mb": one(32.0, 0.0002)}
    if data != "arrays":
        settings["remainder"] = "join"
    if data == "arrays" and maybe(0.4):
        settings |= {"shuffle": True, "seed": int(rng.integers(1, 99))}
    if optimizer in ("SGD", "Adam", "AdamW") and maybe(0.15) and (
            "use_ema" not in options and kind not in ("sequence", "tokens")):
        settings["zero"] = True
    layers = tuple(one("dense", "tanh", "norm", "batchnorm") for _ in range(rng.integers(0, 3)))
    # Statistics are of the whole batch only where every rank has an equal part of it.
    if "batchnorm" in layers:
        settings["sync_batch_norm"] = True
    callbacks = [name for name, chance in (
        ("plateau", 0.3), ("scheduler", 0.3), ("early", 0.3), ("counter", 0.3), ("stopper", 0.1))
        if maybe(chance)]
    if options.get("use_ema") and maybe(0.6):
        callbacks.append("swap")
    if not {"plateau", "scheduler", "counter"} & set(callbacks) and maybe(0.3):
        settings["lr_scaling"] = one("linear", "sqrt")
    epochs, samples = int(rng.integers(1, 4)), int(rng.integers(2 * ranks, 12 * ranks))
    stops = tuple(sorted((int(rng.integers(epochs)), int(rng.integers(5)))
                         for _ in range(one(0, 1, 1, 2))))
    return Case(
        seed=seed, ranks=ranks, kind=kind, data=data, samples=samples, epochs=epochs,
        held=one(0, int(rng.integers(1, 10))), optimizer=optimizer, options=options,
        loss=one("mse", "huber", "mae"), weighted=maybe(0.3) and kind not in ("own_step", "tokens"),
        reduction=one("sum_over_batch_size", "sum_over_batch_size", "sum",
                      "mean_with_sample_weight"),
        callbacks=tuple(callbacks), stops=stops, settings=settings, layers=layers,
        steps_per_execution=1 if "counter" in callbacks else one(1, 1, 2))


def arrays_of(case: Case, samples: int, seed: int):
    """`(x, y)` or `(x, y, weight)`; lists where the model has several inputs."""
    rng = np.random.default_rng([case.seed, seed])
    if case.kind in ("sequence", "tokens"):
        x = rng.integers(1, 9, size=(samples, 6))
        for row, length in enumerate(rng.integers(1, 7, size=samples)):
            x[row, length:] = 0
    elif case.kind == "conv":
        x = rng.normal(size=(samples, 8, 2))
    elif case.kind == "two":
        x = (rng.normal(size=(samples, 3)), rng.normal(size=(samples, 4)))
    else:
        x = rng.normal(size=(samples, 5))
    y = rng.normal(size=(samples, 6, 2) if case.kind == "tokens" else (samples, 2))
    if case.kind == "two":
        y = (y, rng.normal(size=(samples, 1)))
    weight = rng.uniform(0.1, 2, size=samples)
    if case.kind == "two":
        weight = (weight, weight)
    return (x, y, weight) if case.weighted else (x, y)


def model_of(case: Case, keras, factor: float = 1.0, *, distributed: bool = False):
    """The compiled model, always with the same weights.

    Args:
        case: The case.
        keras: The module.
        factor: Float, on the learning rate.
        distributed: Boolean, for hvdtrain.
    """
    keras.utils.set_random_seed(case.seed)
    layers = keras.layers
    if case.kind in ("sequence", "tokens"):
        inputs = keras.Input((6,), dtype="int64")
        x = layers.GRU(4, return_sequences=case.kind == "tokens")(
            layers.Embedding(9, 3, mask_zero=True)(inputs))
    elif case.kind == "conv":
        inputs = keras.Input((8, 2))
        x = layers.Flatten()(layers.Conv1D(3, 3, activation="tanh")(inputs))
    elif case.kind == "two":
        inputs = [keras.Input((3,)), keras.Input((4,))]
        x = layers.Concatenate()(inputs)
    else:
        inputs = x = keras.Input((5,))
    for name in case.layers:
        x = {"dense": lambda: layers.Dense(4), "tanh": lambda: layers.Dense(4, activation="tanh"),
             "norm": layers.LayerNormalization, "batchnorm": layers.BatchNormalization}[name]()(x)
    outputs = layers.Dense(2, name="p")(x)
    if case.kind == "two":
        outputs = [outputs, layers.Dense(1, name="q")(x)]
    cls = own_step(keras) if case.kind == "own_step" else keras.Model
    model = cls(inputs, outputs)
    loss = {"mse": keras.losses.MeanSquaredError, "huber": keras.losses.Huber,
            "mae": keras.losses.MeanAbsoluteError}[case.loss](reduction=case.reduction)
    optimizer = getattr(keras.optimizers, case.optimizer)(0.02 * factor, **case.options)
    if distributed and case.kind in ("sequence", "tokens"):
        # As Keras, which applies rows of an embedding that occur twice otherwise than their sum.
        import hvdtrain
        hvdtrain.DistributedOptimizer(optimizer, options=hvdtrain.ReducerOptions(merge="none"))
    metric = "mean_absolute_error"
    several = case.kind == "two"
    model.compile(optimizer, [loss, loss] if several else loss,
                  metrics=[[metric], [metric]] if several else [metric])
    return model


def own_step(keras):
    """A model class with a `train_step` of its own."""
    import tensorflow as tf

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
            weights = self.trainable_variables
            gradients = [0.5 * g for g in tape.gradient(scaled, weights)]
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return self.compute_metrics(x, y, self(x, training=True))
    return Own


def callbacks_of(case: Case, keras):
    """New callbacks; `counter` sets the rate from how many steps it has seen."""
    class Counter(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.count = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.count += 1
            self.model.optimizer.learning_rate = 0.02 / (1 + 0.1 * self.count)

    class Stopper(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.count = 0

        def on_epoch_end(self, epoch, logs=None):
            self.count += 1
            self.model.stop_training = self.model.stop_training or self.count == 2
    monitor = "val_loss" if case.held else "loss"
    c = keras.callbacks
    known = {
        "plateau": lambda: c.ReduceLROnPlateau(monitor=monitor, patience=0, min_delta=0.5),
        "scheduler": lambda: c.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        "early": lambda: c.EarlyStopping(monitor=monitor, patience=0, min_delta=0.05,
                                         restore_best_weights=True),
        "counter": Counter, "stopper": Stopper, "swap": c.SwapEMAWeights}
    return [known[name]() for name in case.callbacks]


def source_of(case: Case, data):
    """The training data in the form that the case names."""
    import keras
    import tensorflow as tf

    import hvdtrain
    if case.data == "stream":
        return hvdtrain.StreamSource(tf.data.Dataset.from_tensor_slices(data))
    if case.data == "batches":
        return tf.data.Dataset.from_tensor_slices(data).batch(4).prefetch(2)
    if case.data == "function":
        def rows(rank, size):
            for i in range(case.samples)[rank::size]:
                yield tf.nest.map_structure(lambda a, i=i: a[i], data)
        return hvdtrain.StreamSource(rows)
    if case.data == "pydataset":
        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return -(-case.samples // 4)

            def __getitem__(self, number):
                return tf.nest.map_structure(lambda a: a[number * 4:number * 4 + 4], data)
        return Batches()
    return tuple(list(part) if isinstance(part, tuple) else part for part in data)


def epochs_of(case: Case, steps: int):
    """For each epoch and step the numbers of the samples, as one process sees them."""
    batch = BATCH * case.ranks
    for epoch in range(case.epochs):
        order = np.arange(case.samples)
        if case.settings.get("shuffle"):
            order = np.random.default_rng(
                [case.settings["seed"], epoch]).permutation(case.samples)
        left = case.samples % batch
        each = left // case.ranks
        if case.settings["remainder"] == "pad":
            each = -(-left // case.ranks)
        if left and case.settings["remainder"] != "join":
            order = np.concatenate([order, order])[:case.samples - left + each * case.ranks]
        for step in range(steps):
            yield order[step * batch:(step + 1) * batch]


def train_plain(case: Case, keras, data, held, steps: int):
    """Weights and figures of plain Keras."""
    import tensorflow as tf
    factor = {"linear": case.ranks, "sqrt": case.ranks ** 0.5}.get(
        case.settings.get("lr_scaling", "none"), 1.0)
    model = model_of(case, keras, factor)

    def batches():
        for rows in epochs_of(case, steps):
            yield tf.nest.map_structure(lambda a, rows=rows: a[rows], data)
    signature = tf.nest.map_structure(
        lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), data)
    history = model.fit(
        tf.data.Dataset.from_generator(batches, output_signature=signature), epochs=case.epochs,
        steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=callbacks_of(case, keras),
        validation_data=held, validation_batch_size=BATCH * case.ranks)
    return [w.numpy() for w in model.weights], history.history


def train_ranks(case: Case, keras, session, data, held, folder: Path):
    """Weights and figures of all ranks, stopped and resumed as the case says."""
    import hvdtrain
    from hvdtrain.data.source import as_source
    from hvdtrain.train.coordinator import StoppedError
    figures: dict = {}
    for number, stop in enumerate([*case.stops, None]):
        model = model_of(case, keras, distributed=True)
        model.steps_per_execution = case.steps_per_execution
        asked = []

        class Ask(keras.callbacks.Callback):
            epoch = 0

            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_train_batch_begin(self, batch, logs=None):
                if stop is not None and (self.epoch, batch) >= stop:  # noqa: B023
                    asked.append(True)  # noqa: B023
        config = hvdtrain.TrainConfig(**{
            "batch_per_rank": BATCH, "epochs": case.epochs, "shuffle": False,
            "lr_scaling": "none", "output": folder, "resume": number > 0, "tensorboard": False,
            "overwrite": number == 0, **case.settings})
        try:
            source = as_source(source_of(case, data), "train")
            result = hvdtrain.fit(
                model, source, validation_data=held, config=config,
                callbacks=[*callbacks_of(case, keras), Ask()], stop_asked=lambda: bool(asked))  # noqa: B023
        except StoppedError:
            continue
        for name, values in result.history.items():
            figures[name] = (result.epoch[0], values)
        break
    return [w.numpy() for w in model.weights], figures


def difference(case: Case, keras, session, folder: Path) -> tuple[float, str]:
    """The largest difference between the two ways, and where. All ranks; known on all."""
    from hvdtrain.data.plans import ShardPlan
    data = arrays_of(case, case.samples, 0)
    held = arrays_of(case, case.held, 1) if case.held else None
    plan = ShardPlan(samples=case.samples, rank=0, size=case.ranks, batch_per_rank=BATCH,
                     remainder=case.settings["remainder"])
    shutil.rmtree(folder, ignore_errors=True)
    session.collective.barrier()
    weights, figures = train_ranks(case, keras, session, data, held, folder)
    found: tuple[float, str] = (0.0, "")
    if session.world.is_chief:
        import hvdtrain
        with hvdtrain.alone():
            expected, history = train_plain(case, keras, data, held, plan.steps)
        found = max(_differences(weights, expected, figures, history), key=lambda d: d[0])
    return session.collective.gather_objects(found)[0]


def _differences(weights, expected, figures, history):
    yield 0.0, ""
    for number, (a, b) in enumerate(zip(weights, expected, strict=True)):
        yield float(np.abs(a - b).max(initial=0)), f"weight {number} of shape {a.shape}"
    for name, values in history.items():
        if name not in figures:
            yield np.inf, f"{name} is missing"
            continue
        if name.removeprefix("val_") in ("p_loss", "q_loss") or name == "learning_rate":
            continue  # Keras weights batches, and knows no scale
        first, mine = figures[name]
        if len(mine) + first != len(values):
            yield np.inf, f"{name}: {first} and {len(mine)} epochs, {len(values)} expected"
            continue
        for a, b in zip(mine, values[first:], strict=True):
            yield abs(a - b) / max(1.0, abs(b)), f"{name}: {a} and {b}"


def text(case: Case) -> str:
    """What is needed to run it again."""
    return ", ".join(f"{k}={v!r}" for k, v in dataclasses.asdict(case).items())
