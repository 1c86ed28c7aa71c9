"""Classes of texts: strings in the pipeline, a vocabulary that is adapted, an embedding."""

import keras
import tensorflow as tf
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(3)
train, held_out = keras.utils.text_dataset_from_directory(
    "reviews", validation_split=0.2, subset="both", seed=3, batch_size=20)


def standardize(texts):
    return tf.strings.regex_replace(tf.strings.lower(texts), "<br />|[.,!]", " ")


vectorize = layers.TextVectorization(
    standardize=standardize, max_tokens=200, output_sequence_length=16)
vectorize.adapt(train.map(lambda texts, labels: texts))


def numbered(texts, labels):
    return vectorize(texts), labels


train_numbers = train.map(numbered, num_parallel_calls=tf.data.AUTOTUNE).cache().prefetch(2)
held_out_numbers = held_out.map(numbered).cache().prefetch(2)

model = keras.Sequential([
    keras.Input((16,), dtype="int64"),
    layers.Embedding(200, 16),
    layers.Conv1D(16, 3, activation="relu"),
    layers.GlobalAveragePooling1D(),  # the largest of equal windows would be chosen by rounding
    layers.Dense(1, activation="sigmoid"),
])
# hvdtrain: hvdtrain.distribute(model)
# With Keras' 1e-7 Adam makes a step of the rounding of gradients that are almost zero.
optimizer = keras.optimizers.Adam(epsilon=1e-4)
# exact: hvdtrain.DistributedOptimizer(optimizer, options=hvdtrain.ReducerOptions(merge="none"))
model.compile(optimizer, "binary_crossentropy", metrics=["accuracy", "auc"])
history = model.fit(train_numbers, validation_data=held_out_numbers, epochs=3)
evaluation = model.evaluate(held_out_numbers, return_dict=True)

# A model of strings, for those who use it.
reader = keras.Sequential([keras.Input((1,), dtype="string"), vectorize, model])
predictions = reader.predict(tf.constant([["what a great film"], ["a dull and boring story"]]))
