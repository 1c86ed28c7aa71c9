"""Distributed optimization of Keras 3 models. Importing this package imports TensorFlow.

- `distributed`: hooks the user's optimizer object.
- `reducer`: averages one list of gradients.
- `state`: broadcasts variables, and compares them over ranks.
- `keras_seam`: the private parts of Keras, with their version range and self-test.
"""

from hvdtrain.optim.distributed import DistributedOptimizer, is_distributed
from hvdtrain.optim.reducer import ReducerOptions

__all__ = ["DistributedOptimizer", "ReducerOptions", "is_distributed"]
