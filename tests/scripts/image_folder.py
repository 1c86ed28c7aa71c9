"""Classes of images in folders, augmented in the pipeline and by layers; the best epoch is kept."""

import os

import keras
import tensorflow as tf
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(1)
# Layers that draw random numbers draw others on each rank.
RANDOM_LAYERS = "EXACT" not in os.environ

train, held_out = keras.utils.image_dataset_from_directory(
    "photos", validation_split=0.25, subset="both", seed=1, image_size=(24, 24), batch_size=16)


def augment(images, labels):
    images = tf.image.random_flip_left_right(images)
    return tf.image.random_brightness(images, 0.1), labels


train = train.map(augment).prefetch(tf.data.AUTOTUNE)
held_out = held_out.cache().prefetch(tf.data.AUTOTUNE)

model = keras.Sequential([
    keras.Input((24, 24, 3)),
    layers.Rescaling(1 / 255),
    *([layers.RandomTranslation(0.1, 0.1), layers.RandomRotation(0.05)] if RANDOM_LAYERS else []),
    layers.Conv2D(8, 3, activation="relu"),
    layers.MaxPooling2D(),
    layers.Conv2D(16, 3, activation="relu"),
    layers.GlobalAveragePooling2D(),
    layers.Dropout(0.3 if RANDOM_LAYERS else 0.0),
    layers.Dense(3),
])
# hvdtrain: hvdtrain.distribute(model)
model.compile(
    keras.optimizers.Adam(0.002), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"])
history = model.fit(train, validation_data=held_out, epochs=6, callbacks=[
    keras.callbacks.ModelCheckpoint("photos.keras", monitor="val_loss", save_best_only=True),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True),
])

evaluation = model.evaluate(held_out, return_dict=True)
predictions = model.predict(held_out)
best = keras.saving.load_model("photos.keras")
