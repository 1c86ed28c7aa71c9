"""Distributed optimization of Keras 3 models. Importing this package imports TensorFlow."""

from hvdtrain.optim.distributed import DistributedOptimizer, is_distributed
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.reducer import DistributedGradientTape
from hvdtrain.optim.state import broadcast_variables
from hvdtrain.optim.sync_batchnorm import sync_batchnorm
from hvdtrain.optim.zero import consolidated

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "ReducerOptions",
           "broadcast_variables", "consolidated", "is_distributed", "sync_batchnorm"]
