"""`SyncBatchNormalization`: a layer whose statistics are over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_model
from hvdtrain.optim.sync_batchnorm import synchronize
from hvdtrain.tensorflow import current


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the samples of all ranks.

    All ranks build and call it in the same order, once `hvd.init()` was called. Each sample counts
    alike, also where the ranks have batches of other sizes. Files hold this class; those made after
    `hvdtrain.sync_batchnorm(model)` hold Keras' own, which load without hvdtrain.

    Args:
        fused: False; there was another way in former versions of Keras.
        **kwargs: Those of `keras.layers.BatchNormalization`.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ConfigError("SyncBatchNormalization does not support fused=True. Leave it out.")
        super().__init__(**kwargs)

    def build(self, input_shape: Any) -> None:
        """Make the weights. All ranks."""
        keras_model.check_batch_normalization()
        super().build(input_shape)
        if not current.is_alone():
            synchronize(self, current.session().collective)
