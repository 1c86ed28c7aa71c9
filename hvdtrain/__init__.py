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
    "DistributedGradientTape": "hvdtrain.optim",
    "DistributedOptimizer": "hvdtrain.optim",
    "HvdtrainError": "hvdtrain.errors",
    "Job": "hvdtrain.job",
    "LocalCluster": "hvdtrain.engines.parameter_server.local_cluster",
    "PsConfig": "hvdtrain.engine_config",
    "ReducerOptions": "hvdtrain.optim",
    "Session": "hvdtrain.session",
    "Source": "hvdtrain.data.source",
    "StreamSource": "hvdtrain.data.stream",
    "TfConfig": "hvdtrain.engine_config",
    "TrainConfig": "hvdtrain.config",
    "World": "hvdtrain.world",
    "allgather": "hvdtrain.train.own_loop",
    "allreduce": "hvdtrain.train.own_loop",
    "alone": "hvdtrain.train.plain_fit",
    "broadcast": "hvdtrain.train.own_loop",
    "broadcast_variables": "hvdtrain.optim",
    "by_file": "hvdtrain.data.file_shares",
    "consolidated": "hvdtrain.optim",
    "detect_world": "hvdtrain.world.detect",
    "distribute": "hvdtrain.train.distribute",
    "evaluate": "hvdtrain.train.keras_door",
    "fit": "hvdtrain.train.keras_door",
    "gather": "hvdtrain.train.own_loop",
    "init": "hvdtrain.session",
    "is_chief": "hvdtrain.train.own_loop",
    "is_distributed": "hvdtrain.optim",
    "load_csv": "hvdtrain.data.csv_files",
    "load_dataset": "hvdtrain.data.in_memory",
    "load_images": "hvdtrain.data.images",
    "load_npy": "hvdtrain.data.npy",
    "load_npz": "hvdtrain.data.source",
    "load_parquet": "hvdtrain.data.parquet",
    "load_tfrecord": "hvdtrain.data.tfrecord",
    "notebook_launcher": "hvdtrain.notebook.launcher",
    "once_per_host": "hvdtrain.data.once",
    "predict": "hvdtrain.train.keras_door",
    "print_on_chief": "hvdtrain.train.own_loop",
    "rank": "hvdtrain.train.own_loop",
    "shard": "hvdtrain.train.own_loop",
    "shutdown": "hvdtrain.session",
    "size": "hvdtrain.train.own_loop",
    "sync_batchnorm": "hvdtrain.optim",
    "undistribute": "hvdtrain.train.distribute",
    "unpacked": "hvdtrain.data.unpack",
    "weighted": "hvdtrain.data.weights",
}

__all__ = ["__version__", *sorted(_LAZY)]  # noqa: PLE0604

if TYPE_CHECKING:
    from hvdtrain.config import TrainConfig as TrainConfig
    from hvdtrain.data.csv_files import load_csv as load_csv
    from hvdtrain.data.file_shares import by_file as by_file
    from hvdtrain.data.images import load_images as load_images
    from hvdtrain.data.in_memory import load_dataset as load_dataset
    from hvdtrain.data.npy import load_npy as load_npy
    from hvdtrain.data.once import once_per_host as once_per_host
    from hvdtrain.data.parquet import load_parquet as load_parquet
    from hvdtrain.data.source import ArraySource as ArraySource
    from hvdtrain.data.source import DataSplits as DataSplits
    from hvdtrain.data.source import Source as Source
    from hvdtrain.data.source import load_npz as load_npz
    from hvdtrain.data.stream import StreamSource as StreamSource
    from hvdtrain.data.tfrecord import load_tfrecord as load_tfrecord
    from hvdtrain.data.unpack import unpacked as unpacked
    from hvdtrain.data.weights import weighted as weighted
    from hvdtrain.engine_config import PsConfig as PsConfig
    from hvdtrain.engine_config import TfConfig as TfConfig
    from hvdtrain.engines.parameter_server.local_cluster import LocalCluster as LocalCluster
    from hvdtrain.errors import HvdtrainError as HvdtrainError
    from hvdtrain.job import Job as Job
    from hvdtrain.notebook.launcher import notebook_launcher as notebook_launcher
    from hvdtrain.optim import DistributedGradientTape as DistributedGradientTape
    from hvdtrain.optim import DistributedOptimizer as DistributedOptimizer
    from hvdtrain.optim import ReducerOptions as ReducerOptions
    from hvdtrain.optim import broadcast_variables as broadcast_variables
    from hvdtrain.optim import consolidated as consolidated
    from hvdtrain.optim import is_distributed as is_distributed
    from hvdtrain.optim import sync_batchnorm as sync_batchnorm
    from hvdtrain.session import Session as Session
    from hvdtrain.session import init as init
    from hvdtrain.session import shutdown as shutdown
    from hvdtrain.train.distribute import distribute as distribute
    from hvdtrain.train.distribute import undistribute as undistribute
    from hvdtrain.train.keras_door import evaluate as evaluate
    from hvdtrain.train.keras_door import fit as fit
    from hvdtrain.train.keras_door import predict as predict
    from hvdtrain.train.own_loop import allgather as allgather
    from hvdtrain.train.own_loop import allreduce as allreduce
    from hvdtrain.train.own_loop import broadcast as broadcast
    from hvdtrain.train.own_loop import gather as gather
    from hvdtrain.train.own_loop import is_chief as is_chief
    from hvdtrain.train.own_loop import print_on_chief as print_on_chief
    from hvdtrain.train.own_loop import rank as rank
    from hvdtrain.train.own_loop import shard as shard
    from hvdtrain.train.own_loop import size as size
    from hvdtrain.train.plain_fit import alone as alone
    from hvdtrain.world import World as World
    from hvdtrain.world.detect import detect_world as detect_world


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
