"""For training loops of your own in an elastic job (docs/elastic.md).

    state = hvdtrain.elastic.TensorFlowKerasState(model, optimizer, epoch=0)

    @hvdtrain.elastic.run
    def train(state):
        while state.epoch < 90:
            ...
            state.epoch += 1
            state.commit()

    train(state)

The use follows that of `horovod.tensorflow.elastic`.
"""

from hvdtrain.tensorflow.elastic import ObjectState as ObjectState
from hvdtrain.tensorflow.elastic import State as State
from hvdtrain.tensorflow.elastic import TensorFlowKerasState as TensorFlowKerasState
from hvdtrain.tensorflow.elastic import TensorFlowState as TensorFlowState
from hvdtrain.tensorflow.elastic import run as run
from hvdtrain.tensorflow.keras.elastic import CommitStateCallback as CommitStateCallback
from hvdtrain.tensorflow.keras.elastic import KerasState as KerasState
from hvdtrain.tensorflow.keras.elastic import UpdateBatchStateCallback as UpdateBatchStateCallback
from hvdtrain.tensorflow.keras.elastic import UpdateEpochStateCallback as UpdateEpochStateCallback
