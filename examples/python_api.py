"""A Keras script on N ranks: two lines of it are hvdtrain's.

    hvdtrain launch -np 2 -- python examples/python_api.py
    python examples/python_api.py
"""

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain

hvdtrain.init()

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)

keras.utils.set_random_seed(0)
model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(128, activation="relu"),
    layers.Dense(128, activation="relu"),
    layers.Dense(10, activation="softmax"),
])
hvdtrain.distribute(model)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=15, validation_data=(x_test, y_test))
