"""Named models and data sets for job files; they know nothing of ranks.

Name -> "module:function", imported at first use. Other packages register nothing: job files name
their "module:function".
"""

MODELS = {name: f"hvdtrain.zoo.models:{name}" for name in (
    "digits_mlp", "digits_cnn", "mlp", "autoencoder", "text_transformer")}

DATASETS = {name: f"hvdtrain.zoo.datasets:{name}" for name in (
    "csv", "digits", "digits_images", "images", "npy", "npz", "parquet", "synthetic", "text",
    "tfrecord")}
