"""Mixed precision, moving averages of the weights, a schedule, accumulation of gradients."""

import os

import keras
import numpy as np
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(10)
# float16 rounds the sums over samples, which are others on each number of ranks.
if "EXACT" not in os.environ:
    keras.config.set_dtype_policy("mixed_float16")

digits = np.load("digits.npz")
x, y = digits["images"].reshape(-1, 64), digits["labels"]

model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(64, activation="relu"),
    layers.Dense(64, activation="relu"),
    layers.Dense(10),
    layers.Activation("softmax", dtype="float32"),
])
# hvdtrain: hvdtrain.distribute(model)
model.compile(
    keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.0, 30, warmup_target=0.01, warmup_steps=5),
        use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2),
    "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x[:240], y[:240], batch_size=32, epochs=3, validation_data=(x[240:], y[240:]),
                    callbacks=[keras.callbacks.SwapEMAWeights()])

evaluation = model.evaluate(x[240:], y[240:], return_dict=True)
predictions = model.predict(x[240:])
