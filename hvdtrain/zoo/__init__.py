"""Named models and data sets for job files. They know nothing of ranks.

Name -> "module:function", imported at first use. Another package adds its own by naming
"module:function" in the job file; there is nothing to register.
"""

MODELS = {
    "digits_mlp": "hvdtrain.zoo.models:digits_mlp",
    "digits_cnn": "hvdtrain.zoo.models:digits_cnn",
    "mlp": "hvdtrain.zoo.models:mlp",
    "autoencoder": "hvdtrain.zoo.models:autoencoder",
    "text_transformer": "hvdtrain.zoo.models:text_transformer",
}

DATASETS = {
    "csv": "hvdtrain.zoo.files:csv",
    "digits": "hvdtrain.zoo.datasets:digits",
    "digits_images": "hvdtrain.zoo.datasets:digits_images",
    "images": "hvdtrain.zoo.files:images",
    "npy": "hvdtrain.zoo.files:npy",
    "npz": "hvdtrain.zoo.datasets:npz",
    "parquet": "hvdtrain.zoo.files:parquet",
    "synthetic": "hvdtrain.zoo.datasets:synthetic",
    "text": "hvdtrain.zoo.datasets:text",
    "tfrecord": "hvdtrain.zoo.files:tfrecord",
}
