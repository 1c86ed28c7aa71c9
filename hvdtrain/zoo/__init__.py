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
    "digits": "hvdtrain.zoo.datasets:digits",
    "digits_images": "hvdtrain.zoo.datasets:digits_images",
    "npz": "hvdtrain.zoo.datasets:npz",
    "synthetic": "hvdtrain.zoo.datasets:synthetic",
    "text": "hvdtrain.zoo.datasets:text",
}
