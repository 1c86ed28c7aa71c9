"""All private parts of TensorFlow that engine ps depends on.

- a variable's server: `strategy.extended` chooses it by a counter, which is set before;
- Python functions on workers: an op that calls a function by name uses the registry *of the process
  where it runs*;
- a closure's end (the event of its `RemoteValue`), and errors that mean a lost server.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from packaging.version import Version
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.ops import script_ops

from hvdtrain.engines.parameter_server.roles import Addresses
from hvdtrain.errors import MachineError

TF_MIN, TF_BELOW = Version("2.16"), Version("2.22")
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)
# What a server answers that was started again so soon that no call has failed.
_FORGOTTEN = ("Unable to find the relevant tensor remote_handle", "unknown device",
              "Could not find variable", "does not exist", "Unable to find a context_id",
              "Resource localhost", "not found in container", "Primary device is not remote",
              "nor a name of a function registered")
_CANCEL_S = 5.0  # cancelled closures have ended by then, unless their worker hangs
_CHECK_S = 0.5
_functions: dict[str, Callable[..., Any]] = {}


def check_tensorflow() -> None:
    """Refuse an unknown TensorFlow, by version and by the parts it lacks."""
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


def _spec(cluster: Addresses) -> Any:
    return tf.train.ClusterSpec({kind: list(own) for kind, own in cluster.items()})


@contextmanager
def connected(cluster: Addresses) -> Iterator[Any]:
    """A coordinator on the chief, once all workers and servers are there; cancels at the end."""
    # What was made in TensorFlow before does not work after. `cluster` has the chief's address
    # unless all roles are in one process.
    tf.get_logger().setLevel("CRITICAL")  # the coordinator prints hundreds of lines per loss
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _spec(cluster), rpc_layer="grpc",
        **({"task_type": "chief", "task_id": 0} if "chief" in cluster else {}))
    coordinator = tf.distribute.coordinator.ClusterCoordinator(
        tf.distribute.ParameterServerStrategy(resolver))
    try:
        yield coordinator
    finally:
        threads = coordinator._cluster
        threads.stop()
        queue = threads.closure_queue
        with queue._queue_lock:
            queue._no_inflight_closure_condition.wait_for(
                lambda: not queue._inflight_closure_count, _CANCEL_S)
        for worker in threads.workers:
            # Cancelled closures are reported already; garbage collection would raise it again.
            worker.executor.clear_error()


def serve(cluster: Addresses, kind: str, index: int, *, threads: int) -> Any:
    """Start a worker's or parameter server's (`ps`) server in this process."""
    # It has `threads` for one operation, and as many for parallel operations.
    config = tf.compat.v1.ConfigProto()
    config.intra_op_parallelism_threads = threads
    # Operations that wait for another process hold a thread.
    config.inter_op_parallelism_threads = max(4, threads)
    config.gpu_options.allow_growth = True
    return tf.distribute.Server(_spec(cluster), job_name=kind, task_index=index, config=config,
                                protocol="grpc", start=True)


@contextmanager
def on_server(strategy: Any, server: int) -> Iterator[None]:
    """Variables made in this block lie on this server."""
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
    """Let `call_function` with this name run `function` in this process."""
    _functions[name] = function  # the registry itself holds weak references
    with script_ops._py_funcs._lock:
        script_ops._py_funcs._funcs[name] = function


def call_function(name: str, arguments: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """The op that calls a registered function with arrays and gives a list of arrays."""
    return list(tf.raw_ops.PyFunc(input=list(arguments), token=name, Tout=list(dtypes)))


class _Announced(threading.Event):
    """An event that also sets another one."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def set(self) -> None:
        super().set()
        self._other.set()


class InFlight:
    """Closures that workers have not finished. Only in the chief's thread."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._closures: list[tuple[Any, Any]] = []
        self._ended = threading.Event()

    def __len__(self) -> int:
        return len(self._closures)

    def send(self, tag: Any, function: Any, arguments: Sequence[Any]) -> None:
        """Send a `tf.function` to any free worker; `take` gives the tag with its result."""
        # As `coordinator.schedule`, but the event is in place before a worker can have it.
        queue = self._coordinator._cluster.closure_queue
        with self._coordinator.strategy.scope():
            closure = cluster_coordinator.Closure(
                function, queue._cancellation_mgr, args=tuple(arguments))
            value = closure.build_output_remote_value()
            value._status_available_event = _Announced(self._ended)
            queue.put(closure)
        self._closures.append((tag, value))

    def take(self, *, in_order: bool = False) -> list[tuple[Any, Any]]:
        """Wait briefly; take pairs of tag and result of ended closures, or raise their error."""
        # With `in_order`, one counts only when all before it have ended.
        self._ended.wait(_CHECK_S)
        self._ended.clear()
        taken = []
        for item in list(self._closures):
            tag, value = item
            if value._status_available_event.is_set():
                self._closures.remove(item)
                value._wait_and_maybe_error()
                taken.append((tag, value.fetch()))
            elif in_order:
                break
        return taken

    def drain(self) -> list[tuple[Any, Any]]:
        """Wait for all of them, and take them."""
        taken = []
        while self._closures:
            taken += self.take()
        return taken


def means_lost_server(error: BaseException) -> bool:
    """Whether an error means that a server's parameters are lost."""
    original = getattr(error, "original_exception", error)
    return isinstance(original, _LOST) or (isinstance(original, tf.errors.OpError) and any(
        words in str(original) for words in _FORGOTTEN))


def accumulator(like: Any) -> Any:
    """A mean of one step's gradients beside a server's variable; it drops other steps'."""
    with tf.device(like.device):
        # Without a name of its own it would be the same object as every other one there.
        return tf.compat.v1.ConditionalAccumulator(
            accumulated_dtype(like), shape=like.shape, reduction_type="MEAN",
            shared_name=f"hvdtrain_{uuid.uuid4().hex}")


def accumulated_dtype(like: Any) -> Any:
    """The type in which gradients wait; bfloat16 has no accumulator."""
    known = (tf.float16, tf.float32, tf.float64)
    return like.dtype if like.dtype in known else tf.float32
