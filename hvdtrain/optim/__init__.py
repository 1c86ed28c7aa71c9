"""Distributed optimization of Keras 3 models. Importing this package imports TensorFlow.

- `distributed`: hooks the user's optimizer object.
- `tape`: a gradient tape that averages, for loops with a plain optimizer.
- `reducer`: averages one list of gradients; `options` says how, `pattern` refuses ranks with other
  gradients, `sparse`, `wire` and `compression` say what travels.
- `state`: broadcasts and averages variables, and compares them over ranks.
- `sync_batchnorm`: batch normalization over the samples of all ranks.
- `zero`: divides the state of the optimizer over the ranks; with `zero_check`, `zero_files`,
  `zero_layout`, `zero_parts` and `zero_state`.
- `keras_seam`: the private parts of Keras, with their version range and self-test.
"""

from hvdtrain.optim.distributed import DistributedOptimizer, is_distributed
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.sync_batchnorm import sync_batchnorm
from hvdtrain.optim.tape import DistributedGradientTape, broadcast_variables
from hvdtrain.optim.zero_files import consolidated

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "ReducerOptions",
           "broadcast_variables", "consolidated", "is_distributed", "sync_batchnorm"]
