"""Several inputs and outputs: as dictionaries of arrays, and as lists from a `PyDataset`."""

import keras
import numpy as np
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(7)
SAMPLES = 250
rng = np.random.default_rng(7)
inputs = {"title": rng.integers(1, 50, (SAMPLES, 6)), "body": rng.integers(1, 50, (SAMPLES, 20)),
          "tags": rng.integers(0, 2, (SAMPLES, 5)).astype("float32")}
targets = {"priority": inputs["tags"].mean(axis=1, keepdims=True),
           "department": inputs["title"].sum(axis=1) % 4}
weights = {"priority": rng.uniform(0.5, 1.5, SAMPLES), "department": np.ones(SAMPLES)}


def make_model():
    title = keras.Input((6,), name="title")
    body = keras.Input((20,), name="body")
    tags = keras.Input((5,), name="tags")
    x = layers.concatenate([
        layers.GlobalAveragePooling1D()(layers.Embedding(50, 8)(title)),
        layers.LSTM(8)(layers.Embedding(50, 8)(body)), tags])
    priority = layers.Dense(1, activation="sigmoid", name="priority")(x)
    department = layers.Dense(4, name="department")(x)
    return title, body, tags, priority, department


title, body, tags, priority, department = make_model()
tickets = keras.Model([title, body, tags], {"priority": priority, "department": department})
# hvdtrain: hvdtrain.distribute(tickets)
tickets.compile(
    keras.optimizers.RMSprop(0.001),
    loss={"priority": "mse",
          "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"priority": ["mae"], "department": ["accuracy"]},
    weighted_metrics={"priority": ["mse"]})
first = tickets.fit(inputs, targets, sample_weight=weights, epochs=2, batch_size=32,
                    validation_split=0.2)
figures = tickets.evaluate(inputs, targets, batch_size=32, return_dict=True)
answers = tickets.predict(inputs)


class Tickets(keras.utils.PyDataset):
    def __len__(self):
        return -(-SAMPLES // 32)

    def __getitem__(self, number):
        rows = slice(32 * number, 32 * number + 32)
        return ((inputs["title"][rows], inputs["body"][rows], inputs["tags"][rows]),
                (targets["priority"][rows], targets["department"][rows]),
                (weights["priority"][rows], weights["department"][rows]))


title, body, tags, priority, department = make_model()
model = keras.Model([title, body, tags], [priority, department])
# hvdtrain: hvdtrain.distribute(model)
model.compile(
    keras.optimizers.Adam(0.001),
    loss=["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)],
    loss_weights=[1.0, 0.2], metrics=[["mae"], ["accuracy"]])
history = model.fit(Tickets(workers=2), epochs=2, validation_data=Tickets())
evaluation = model.evaluate(Tickets(workers=2), return_dict=True)
predictions = model.predict(Tickets())
