"""Several inputs and outputs: as dictionaries of arrays, and as lists from a `PyDataset`."""

import keras
import numpy as np
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(7)
SAMPLES, BATCH = 240, 16
rng = np.random.default_rng(7)
inputs = {"title": rng.integers(1, 50, (SAMPLES, 6)), "body": rng.integers(1, 50, (SAMPLES, 20)),
          "tags": rng.integers(0, 2, (SAMPLES, 5)).astype("float32")}
targets = {"priority": inputs["tags"].mean(axis=1, keepdims=True),
           "department": inputs["title"].sum(axis=1) % 4}
weights = {"priority": rng.uniform(0.5, 1.5, SAMPLES), "department": np.ones(SAMPLES)}


def make_model(optimizer, *, named, **settings):
    title = keras.Input((6,), name="title")
    body = keras.Input((20,), name="body")
    tags = keras.Input((5,), name="tags")
    x = layers.concatenate([
        layers.GlobalAveragePooling1D()(layers.Embedding(50, 8)(title)),
        layers.LSTM(8)(layers.Embedding(50, 8)(body)), tags])
    priority = layers.Dense(1, activation="sigmoid", name="priority")(x)
    department = layers.Dense(4, name="department")(x)
    outputs = {"priority": priority, "department": department}
    network = keras.Model([title, body, tags], outputs if named else list(outputs.values()))
    # hvdtrain: hvdtrain.distribute(network)
    # exact: hvdtrain.DistributedOptimizer(optimizer, options=hvdtrain.ReducerOptions(merge="none"))
    network.compile(optimizer, **settings)
    return network


tickets = make_model(
    keras.optimizers.RMSprop(0.001), named=True,
    loss={"priority": "mse",
          "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"priority": ["mae"], "department": ["accuracy"]},
    weighted_metrics={"priority": ["mse"]})
first = tickets.fit(inputs, targets, sample_weight=weights, epochs=2, batch_size=BATCH,
                    validation_split=0.2)
figures = tickets.evaluate(inputs, targets, batch_size=BATCH, return_dict=True)
answers = tickets.predict(inputs)


class Tickets(keras.utils.PyDataset):
    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, number):
        rows = slice(BATCH * number, BATCH * (number + 1))
        return ((inputs["title"][rows], inputs["body"][rows], inputs["tags"][rows]),
                (targets["priority"][rows], targets["department"][rows]),
                (weights["priority"][rows], weights["department"][rows]))


model = make_model(
    keras.optimizers.Adam(0.001), named=False,
    loss=["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)],
    loss_weights=[1.0, 0.2], metrics=[["mae"], ["accuracy"]])
history = model.fit(Tickets(workers=2), epochs=2, validation_data=Tickets())
evaluation = model.evaluate(Tickets(workers=2), return_dict=True)
predictions = model.predict(Tickets())
