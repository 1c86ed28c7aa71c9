"""Small models that train in seconds on a CPU; each returns an uncompiled `keras.Model`."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def digits_mlp(hidden: int = 128, dropout: float = 0.1, classes: int = 10) -> Any:
    """A perceptron with two hidden layers on flat digits: `(batch, 64)` to probabilities."""
    return keras.Sequential([
        keras.Input((64,)),
        layers.Dense(hidden, activation="relu"),
        layers.Dropout(dropout),
        layers.Dense(hidden, activation="relu"),
        layers.Dense(classes, activation="softmax"),
    ], name="digits_mlp")


def mlp(features: int = 64, hidden: int = 1024, depth: int = 2, classes: int = 10) -> Any:
    """A perceptron of any size: most of its time goes into moving parameters.

    It has about `depth - 1` times `hidden` squared parameters; with the defaults 1,126,410.
    """
    return keras.Sequential([
        keras.Input((features,)),
        *(layers.Dense(hidden, activation="relu") for _ in range(depth)),
        layers.Dense(classes, activation="softmax"),
    ], name="mlp")


def digits_cnn(filters: int = 32, classes: int = 10) -> Any:
    """A convolutional network on digits: `(batch, 8, 8, 1)` to probabilities.

    The second convolution has twice as many filters.
    """
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(filters, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(2 * filters, 3, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(classes, activation="softmax"),
    ], name="digits_cnn")


def autoencoder(features: int = 64, code: int = 16, hidden: int = 64) -> Any:
    """A dense autoencoder of inputs `(batch, features)` in [0, 1]."""
    return keras.Sequential([
        keras.Input((features,)),
        layers.Dense(hidden, activation="relu"),
        layers.Dense(code, name="code"),
        layers.Dense(hidden, activation="relu"),
        layers.Dense(features, activation="sigmoid"),
    ], name="autoencoder")


def text_transformer(vocabulary: int = 96, length: int = 64, width: int = 64, heads: int = 4,
                     blocks: int = 2) -> Any:
    """A causal Transformer: characters `(batch, length)` to logits of the next ones.

    The logits are `(batch, length, vocabulary)`.
    """
    inputs = keras.Input((length,), dtype="int32")
    # Computed from the input: an embedding of a constant would be a constant, not a layer.
    positions = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(vocabulary, width)(inputs)
    x = x + layers.Embedding(length, width)(positions)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(heads, width // heads)(
            layers.LayerNormalization()(x), layers.LayerNormalization()(x), use_causal_mask=True)
        x = x + attended
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = x + layers.Dense(width)(y)
    return keras.Model(inputs, layers.Dense(vocabulary)(layers.LayerNormalization()(x)),
                       name="text_transformer")
