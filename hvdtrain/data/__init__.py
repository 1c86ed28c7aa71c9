"""Training data: sources (know no rank), the shard plan (knows ranks), tf.data pipelines."""

from hvdtrain.data.source import ArraySource, DataSplits, Source, load_npz

__all__ = ["ArraySource", "DataSplits", "Source", "load_npz"]
