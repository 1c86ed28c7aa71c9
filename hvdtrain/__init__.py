"""Train Keras 3 models on many processes with Horovod's collectives.

Importing this package is free: names load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "ArraySource": "hvdtrain.data.source",
    "DataSplits": "hvdtrain.data.source",
    "DistributedOptimizer": "hvdtrain.optim",
    "FitResult": "hvdtrain.train.fit",
    "HvdtrainError": "hvdtrain.errors",
    "Job": "hvdtrain.job",
    "LocalCluster": "hvdtrain.engines.parameter_server.local_cluster",
    "PsConfig": "hvdtrain.engine_config",
    "Session": "hvdtrain.session",
    "Source": "hvdtrain.data.source",
    "TfConfig": "hvdtrain.engine_config",
    "TrainConfig": "hvdtrain.config",
    "World": "hvdtrain.world",
    "detect_world": "hvdtrain.world.detect",
    "fit": "hvdtrain.train.fit",
    "init": "hvdtrain.session",
    "is_distributed": "hvdtrain.optim",
    "load_npz": "hvdtrain.data.source",
    "shutdown": "hvdtrain.session",
}

__all__ = ["__version__", *sorted(_LAZY)]  # noqa: PLE0604

if TYPE_CHECKING:
    from hvdtrain.config import TrainConfig as TrainConfig
    from hvdtrain.data.source import ArraySource as ArraySource
    from hvdtrain.data.source import DataSplits as DataSplits
    from hvdtrain.data.source import Source as Source
    from hvdtrain.data.source import load_npz as load_npz
    from hvdtrain.engine_config import PsConfig as PsConfig
    from hvdtrain.engine_config import TfConfig as TfConfig
    from hvdtrain.engines.parameter_server.local_cluster import LocalCluster as LocalCluster
    from hvdtrain.errors import HvdtrainError as HvdtrainError
    from hvdtrain.job import Job as Job
    from hvdtrain.optim import DistributedOptimizer as DistributedOptimizer
    from hvdtrain.optim import is_distributed as is_distributed
    from hvdtrain.session import Session as Session
    from hvdtrain.session import init as init
    from hvdtrain.session import shutdown as shutdown
    from hvdtrain.train.fit import FitResult as FitResult
    from hvdtrain.train.fit import fit as fit
    from hvdtrain.world import World as World
    from hvdtrain.world.detect import detect_world as detect_world


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
