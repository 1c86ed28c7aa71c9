"""A small causal Transformer on English prose that ships with scikit-learn.

    hvdtrain launch -np 2 fit examples/text_transformer.py
"""

from importlib import resources

import keras
import numpy as np
from keras import layers

import hvdtrain

LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2
CHARACTERS = 96  # printable ASCII, and one for everything else


def model():
    inputs = keras.Input((LENGTH,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(CHARACTERS, WIDTH)(inputs) + layers.Embedding(LENGTH, WIDTH)(positions)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = x + layers.Dense(WIDTH)(y)
    outputs = layers.Dense(CHARACTERS)(layers.LayerNormalization()(x))
    network = keras.Model(inputs, outputs)
    network.compile(
        keras.optimizers.AdamW(2e-3, weight_decay=0.01, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return network


def data():
    folder = resources.files("sklearn.datasets") / "descr"
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".rst"))
    text = b"\n".join((folder / name).read_bytes() for name in files)
    codes = np.frombuffer(text, np.uint8).astype("int32") - 32
    codes[(codes < 0) | (codes > 94)] = 95
    cut = len(codes) * 9 // 10
    return hvdtrain.DataSplits(train=windows(codes[:cut]), validation=windows(codes[cut:]))


def windows(codes):
    """Windows of characters, each with the characters that follow."""
    count = (len(codes) - 1) // LENGTH
    return hvdtrain.ArraySource((codes[:count * LENGTH].reshape(count, LENGTH),
                                 codes[1:count * LENGTH + 1].reshape(count, LENGTH)))


def job() -> hvdtrain.Job:
    return hvdtrain.Job(
        name="text_transformer", model=model, data=data,
        config=hvdtrain.TrainConfig(batch_per_rank=16, epochs=8, lr_scaling="sqrt",
                                    warmup_epochs=1))
