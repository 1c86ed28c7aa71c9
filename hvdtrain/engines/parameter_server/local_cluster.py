"""`LocalCluster`: chief, workers and servers in this process, for notebooks and tests."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.data.source import splits_of
from hvdtrain.engines.parameter_server.feeding import Reader
from hvdtrain.job import Job
from hvdtrain.runtime.admission import admit_only
from hvdtrain.runtime.progress import Progress
from hvdtrain.world import World

_LOOPBACK = "127.0.0.1"


class LocalCluster:
    """Real servers and workers, with TensorFlow's own protocol over the loopback, in one process.

    Make it before any TensorFlow or Keras object: variables that were made before do not work
    afterwards, in all of the process.

    Args:
        workers: Integer.
        servers: Integer.

    Example:
        ```python
        cluster = hvdtrain.LocalCluster(workers=2, servers=1)
        result = cluster.fit(job)
        ```
    """

    def __init__(self, *, workers: int = 2, servers: int = 1) -> None:
        from hvdtrain.engines.parameter_server import tf_seam
        tf_seam.check_tensorflow()
        ports = _free_ports(workers + servers)
        addresses = [f"{_LOOPBACK}:{port}" for port in ports]
        self.addresses = {"worker": addresses[:workers], "ps": addresses[workers:]}
        self._servers = [tf_seam.serve(self.addresses, kind, index, threads=1)
                         for kind, own in self.addresses.items() for index in range(len(own))]
        for port in ports:
            admit_only(port, ())

    def fit(self, job: Job, config: TrainConfig | None = None, *,
            stop_asked: Callable[[], bool] = lambda: False) -> Any:
        """Train a job on this cluster.

        Args:
            job: What to train; its functions are called here.
            config: Settings, in place of the job's own; `engine` and `ps.servers` do not count.
            stop_asked: Callable that tells whether to stop.

        Returns:
            A `RunResult`. The trained model is in its `model_path`, where there is an output, and
            is what the job's callbacks see.
        """
        from hvdtrain.engines.parameter_server.chief import Cluster, train
        config = config or job.config
        name = f"hvdtrain.{uuid.uuid4().hex}"
        reader = Reader(splits_of(job.data()), config,
                        config.ps.replicas(len(self.addresses["worker"])))
        reader.register(name)
        kinds = [f"{kind} {i}" for kind, own in self.addresses.items() for i in range(len(own))]
        return train(
            job, config,
            Cluster(addresses=self.addresses, task=None, feed=name,
                    texts=tuple(f"this process ({kind})" for kind in ["chief", *kinds])),
            world=World(rank=0, size=1, local_rank=0, local_size=1, host="localhost",
                        starter="single", rendezvous="none"),
            progress=Progress(), stop_asked=stop_asked, dry_run=False)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """The servers end with the process: TensorFlow has no way to end one before."""


def _free_ports(count: int) -> list[int]:
    made = [socket.socket() for _ in range(count)]
    try:
        for listener in made:
            listener.bind((_LOOPBACK, 0))
        return [int(listener.getsockname()[1]) for listener in made]
    finally:
        for listener in made:
            listener.close()
