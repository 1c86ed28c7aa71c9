"""The first script of many: a `Sequential`, arrays, a validation split, a saved model."""

import keras
import numpy as np

keras.utils.set_random_seed(12)
digits = np.load("digits.npz")
x, y = digits["images"], keras.utils.to_categorical(digits["labels"], 10)

model = keras.Sequential()
model.add(keras.Input((8, 8, 1)))
model.add(keras.layers.Conv2D(8, 3, activation="relu"))
model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(10, activation="softmax"))
model.summary()
model.compile(optimizer="adam", loss="categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x[:250], y[:250], batch_size=32, epochs=3, validation_split=0.1)

evaluation = model.evaluate(x[250:], y[250:])
print("Test accuracy:", evaluation[1])
model.save("sequential.keras")
model = keras.models.load_model("sequential.keras")
predictions = model.predict(x[250:])
