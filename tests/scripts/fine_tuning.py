"""A trained base with a new head: first the head alone, then all of it at a low rate."""

import keras
import numpy as np
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(2)
photos = np.load("photos.npz")
x, y = photos["images"], photos["labels"]

base = keras.saving.load_model("base.keras")
base.trainable = False
inputs = keras.Input((24, 24, 3))
features = base(layers.Rescaling(1 / 127.5, offset=-1)(inputs))
outputs = layers.Dense(1)(layers.GlobalAveragePooling2D()(features))
model = keras.Model(inputs, outputs)
# hvdtrain: hvdtrain.distribute(model)

model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True),
              metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)])
first = model.fit(x, y, batch_size=32, epochs=2, validation_split=0.2)

# Batch normalizations keep the statistics that the base was trained with.
for layer in base.layers:
    layer.trainable = not isinstance(layer, layers.BatchNormalization)
model.compile(keras.optimizers.Adam(1e-4), keras.losses.BinaryCrossentropy(from_logits=True),
              metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)])
history = model.fit(x, y, batch_size=32, epochs=4, initial_epoch=2, validation_split=0.2)

evaluation = model.evaluate(x, y, return_dict=True)
predictions = model.predict(x)
