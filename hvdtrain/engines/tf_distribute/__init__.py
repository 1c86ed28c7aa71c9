"""Engine `tf`: Keras 3 under the strategies of tf.distribute, with the promises of `fit`.

`engine.fit_with_strategy` is the entry. A *replica* is a copy of the model that computes
gradients; it stands where a rank of allreduce stands: `batch_per_rank` is the batch of a replica,
and replica r sees the samples that rank r would see.
"""
