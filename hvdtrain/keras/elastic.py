"""The names of `horovod.keras.elastic`."""

from hvdtrain.tensorflow.keras.elastic import CommitStateCallback as CommitStateCallback
from hvdtrain.tensorflow.keras.elastic import KerasState as KerasState
from hvdtrain.tensorflow.keras.elastic import TensorFlowKerasState as TensorFlowKerasState
from hvdtrain.tensorflow.keras.elastic import UpdateBatchStateCallback as UpdateBatchStateCallback
from hvdtrain.tensorflow.keras.elastic import UpdateEpochStateCallback as UpdateEpochStateCallback
from hvdtrain.tensorflow.keras.elastic import run as run
