"""The private parts of TensorFlow that engine ps leans on: all of them, and only here.

- a variable's server: `strategy.extended` chooses it by a counter, which is set before;
- Python functions on workers: an op that calls a function by name calls the one that was
  registered under it *in the process where the op runs*;
- a closure's end: the event of its `RemoteValue`;
- which errors mean that a server was lost;
- the address that this process serves.

`check_tensorflow` compares what is there with what is expected, before the first use.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from packaging.version import Version
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.ops import script_ops

from hvdtrain.errors import MachineError

TF_MIN, TF_BELOW = Version("2.16"), Version("2.22")
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)
# What a server answers that was started again so soon that no call has failed.
_FORGOTTEN = ("Unable to find the relevant tensor remote_handle", "unknown device",
              "Could not find variable", "does not exist", "Unable to find a context_id",
              "Resource localhost", "not found in container", "Primary device is not remote",
              "nor a name of a function registered")
_CANCEL_S = 5.0  # cancelled closures have ended by then, unless their worker hangs
_functions: dict[str, Callable[..., Any]] = {}


def check_tensorflow() -> None:
    """Refuse a TensorFlow that is not known, by version and by the parts it lacks.

    Raises:
        MachineError: Naming what was found and expected.
    """
    found = Version(tf.__version__)
    expected = f"TensorFlow {TF_MIN} to {TF_BELOW} (exclusive)"
    if not TF_MIN <= Version(found.base_version) < TF_BELOW:
        raise MachineError(f"TensorFlow {found} is installed; engine ps knows {expected}. Install "
                           "one of these, or use the engine allreduce.")
    value = coordinator_values.RemoteValueImpl(None, None)
    registry = script_ops._py_funcs
    missing = [name for thing, name in (
        (value, "_status_available_event"), (value, "_wait_and_maybe_error"),
        (cluster_coordinator, "Closure"), (registry, "_funcs"), (registry, "_lock"))
        if not hasattr(thing, name)]
    if missing:
        raise MachineError(f"TensorFlow {found} lacks {', '.join(missing)}, which engine ps needs. "
                           f"Expected: {expected} as released.")


def connect(cluster: Mapping[str, Sequence[str]], task: str | None = "chief") -> tuple[Any, Any]:
    """Connect this process, as the chief, with workers and servers; waits until all are there.

    Call it before any other TensorFlow operation: what was made before does not work after.

    Args:
        cluster: Addresses `HOST:PORT` of each kind.
        task: String or None, the kind of this process, where it is in `cluster`.

    Returns:
        The strategy and the coordinator.
    """
    tf.get_logger().setLevel("CRITICAL")  # the coordinator prints hundreds of lines per loss
    spec = tf.train.ClusterSpec({kind: list(own) for kind, own in cluster.items()})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc", **({"task_type": task, "task_id": 0} if task else {}))
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def disconnect(coordinator: Any) -> None:
    """End the coordinator's threads; closures that still run are cancelled."""
    cluster = coordinator._cluster
    cluster.stop()
    queue = cluster.closure_queue
    with queue._queue_lock:
        queue._no_inflight_closure_condition.wait_for(
            lambda: not queue._inflight_closure_count, _CANCEL_S)
    for worker in cluster.workers:
        # What was cancelled has been told; the garbage collector would raise it once more.
        worker.executor.clear_error()


def serve(cluster: Mapping[str, Sequence[str]], kind: str, index: int, *, threads: int) -> Any:
    """Start the server of a worker or a parameter server in this process.

    Args:
        cluster: Addresses `HOST:PORT` of each kind.
        kind: String, `worker` or `ps`.
        index: Integer, which one.
        threads: Integer, for one operation and for operations beside each other.
    """
    config = tf.compat.v1.ConfigProto()
    config.intra_op_parallelism_threads = threads
    # Operations that wait for another process hold a thread.
    config.inter_op_parallelism_threads = max(4, threads)
    config.gpu_options.allow_growth = True
    spec = tf.train.ClusterSpec({name: list(own) for name, own in cluster.items()})
    return tf.distribute.Server(spec, job_name=kind, task_index=index, config=config,
                                protocol="grpc", start=True)


@contextmanager
def on_server(strategy: Any, server: int) -> Iterator[None]:
    """Variables that are made in this block lie on the server with this number."""
    extended = strategy.extended
    original = type(extended)._create_variable_round_robin.__get__(extended)

    def create(next_creator: Any, **kwargs: Any) -> Any:
        extended._variable_count = server
        return original(next_creator, **kwargs)

    extended._create_variable_round_robin = create
    try:
        with strategy.scope():
            yield
    finally:
        del extended._create_variable_round_robin


def register_function(name: str, function: Callable[..., Any]) -> None:
    """Let `call_function` with this name run `function` where it runs in this process."""
    _functions[name] = function  # the registry itself holds weak references
    with script_ops._py_funcs._lock:
        script_ops._py_funcs._funcs[name] = function


def call_function(name: str, arguments: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """The op that calls a registered function with arrays; it gives a list of arrays back."""
    found = tf.raw_ops.PyFunc(input=list(arguments), token=name, Tout=list(dtypes))
    return list(found)


class _Announced(threading.Event):
    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then

    def set(self) -> None:
        super().set()
        self._then()


def schedule(coordinator: Any, function: Any, arguments: Sequence[Any],
             then: Callable[[], None]) -> Any:
    """Schedule a closure; `then` is called, from another thread, when it has ended.

    As `coordinator.schedule`, but that the event is in place before a worker can have it.

    Returns:
        Its `RemoteValue`; keep it until then.
    """
    cluster = coordinator._cluster
    with coordinator.strategy.scope():
        closure = cluster_coordinator.Closure(
            function, cluster.closure_queue._cancellation_mgr, args=tuple(arguments))
        value = closure.build_output_remote_value()
        value._status_available_event = _Announced(then)
        cluster.closure_queue.put(closure)
    return value


def has_ended(value: Any) -> bool:
    """Whether a closure has ended, well or not."""
    return bool(value._status_available_event.is_set())


def result(value: Any) -> Any:
    """The result of a closure that has ended, as a structure of arrays.

    Raises:
        Exception: What it raised.
    """
    value._wait_and_maybe_error()
    return value.fetch()


def means_lost_server(error: BaseException) -> bool:
    """Whether an error says that parameters are gone with their server."""
    original = getattr(error, "original_exception", error)
    if isinstance(original, _LOST):
        return True
    return isinstance(original, tf.errors.OpError) and any(
        words in str(original) for words in _FORGOTTEN)


def accumulator(like: Any) -> Any:
    """A place beside a server's variable that takes gradients of one step only.

    A gradient of a former step is dropped. Of several that came for the same step it holds the
    mean.

    Args:
        like: `tf.Variable` on a server.
    """
    with tf.device(like.device):
        # Without a name of its own it would be the same object as every other one there.
        return tf.compat.v1.ConditionalAccumulator(
            accumulated_dtype(like), shape=like.shape, reduction_type="MEAN",
            shared_name=f"hvdtrain_{uuid.uuid4().hex}")


def accumulated_dtype(like: Any) -> Any:
    """The type in which gradients of a variable wait; there is none for bfloat16."""
    known = (tf.float16, tf.float32, tf.float64)
    return like.dtype if like.dtype in known else tf.float32
