"""The names of `horovod.keras.callbacks`."""

from hvdtrain.tensorflow.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint
from hvdtrain.tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from hvdtrain.tensorflow.keras.callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)
from hvdtrain.tensorflow.keras.callbacks import (
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from hvdtrain.tensorflow.keras.callbacks import MetricAverageCallback as MetricAverageCallback
