"""Training data: sources (know no rank), the shard plan (knows ranks), tf.data pipelines."""
