"""Program: a rank of `growth.py`, which meets the others, exchanges what the end of an epoch does,
and trains nothing. Horovod's library works without TensorFlow's Python, through TensorFlow's C.

Prints when it did what, in seconds since the epoch, as one line of JSON. `--load` only loads the
library, which any rank must.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import statistics
import sys
import time

BEGUN = time.time()

import numpy as np  # noqa: E402

from hvdtrain.collectives.plain import encode  # noqa: E402
from hvdtrain.rendezvous.barrier import rendezvous_barrier  # noqa: E402
from hvdtrain.world import detect_world  # noqa: E402
from tests.cluster.light_rank import horovod  # noqa: E402

try:
    from hvdtrain.rendezvous.relay import relayed
except ImportError:  # a former version, by `growth.py --against`
    def relayed(world, environ):
        return contextlib.nullcontext()

_TYPES = {"uint8": 4, "int64": 9, "float64": 2}
_ROUNDS = 30


class Gloo:
    """Horovod's allgather, run by TensorFlow's C interface for eager operations."""

    def __init__(self):
        self._c = c = ctypes.CDLL(None)
        for name in ("TF_NewStatus", "TF_Message", "TFE_NewContextOptions", "TFE_NewContext",
                     "TFE_NewOp", "TF_AllocateTensor", "TF_TensorData", "TFE_NewTensorHandle",
                     "TFE_TensorHandleResolve"):
            getattr(c, name).restype = ctypes.c_void_p
        c.TF_Message.restype = ctypes.c_char_p
        c.TF_TensorByteSize.restype = ctypes.c_size_t
        self._status = ctypes.c_void_p(c.TF_NewStatus())
        options = ctypes.c_void_p(c.TFE_NewContextOptions())
        self._context = ctypes.c_void_p(self._call(c.TFE_NewContext, options))

    def _call(self, function, *arguments):
        value = function(*arguments, self._status)
        if self._c.TF_GetCode(self._status):
            raise RuntimeError(self._c.TF_Message(self._status).decode())
        return value

    def allgather(self, array):
        """Concatenate the arrays of all ranks."""
        c, kind = self._c, _TYPES[array.dtype.name]
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        tensor = ctypes.c_void_p(c.TF_AllocateTensor(
            kind, shape, array.ndim, ctypes.c_size_t(array.nbytes)))
        ctypes.memmove(c.TF_TensorData(tensor), array.ctypes.data, array.nbytes)
        handle = ctypes.c_void_p(self._call(c.TFE_NewTensorHandle, tensor))
        op = ctypes.c_void_p(self._call(c.TFE_NewOp, self._context, b"HorovodAllgather"))
        c.TFE_OpSetAttrType(op, b"T", kind)
        self._call(c.TFE_OpAddInput, op, handle)
        out, count = (ctypes.c_void_p * 1)(), ctypes.c_int(1)
        self._call(c.TFE_Execute, op, out, ctypes.byref(count))
        found = ctypes.c_void_p(self._call(c.TFE_TensorHandleResolve, ctypes.c_void_p(out[0])))
        data = ctypes.string_at(c.TF_TensorData(found), c.TF_TensorByteSize(found))
        for one in (tensor, found):
            c.TF_DeleteTensor(one)
        for one in (handle, ctypes.c_void_p(out[0])):
            c.TFE_DeleteTensorHandle(one)
        c.TFE_DeleteOp(op)
        return np.frombuffer(data, array.dtype)

    def gather_object(self, value):
        """As `gather_objects` of the collective: bytes that begin with their size."""
        mine = np.frombuffer(encode(value), np.uint8)
        return self.allgather(np.concatenate([np.array([mine.size]).view(np.uint8), mine]))


def epoch_end(gather, gather_object, rank):
    """Median milliseconds of what the ranks exchange: five numbers, and an object."""
    lap = {name: 1.0 + rank for name in ("building", "input", "computing", "waiting", "moving",
                                         "updating", "evaluating", "saving", "other")}
    found = {}
    for name, call in (("numbers", lambda: gather(np.zeros((1, 5)))),
                       ("object", lambda: gather_object((False, lap)))):
        call()
        times = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        found[name] = round(1000 * statistics.median(times), 3)
    return found


def main():
    hvd = horovod()
    loaded = time.time()
    if "--load" in sys.argv:
        return
    world = detect_world(os.environ)
    rendezvous_barrier(world, os.environ)
    met = time.time()
    with relayed(world, os.environ):
        hvd.init()
    ready = time.time()
    if hvd.size() != world.size:
        raise SystemExit(f"rank {world.rank} finds {hvd.size()} ranks, not {world.size}")
    files = len(os.listdir("/proc/self/fd"))
    gloo = Gloo()
    epoch = epoch_end(gloo.allgather, gloo.gather_object, world.rank)
    done = time.time()
    hvd.shutdown()
    used = resource.getrusage(resource.RUSAGE_SELF)
    sys.stdout.write(json.dumps({
        "rank": world.rank, "begun": BEGUN, "loaded": loaded, "met": met, "ready": ready,
        "epoch": epoch, "done": done, "shut": time.time(), "rss": used.ru_maxrss, "files": files,
        "cpu": round(used.ru_utime + used.ru_stime, 3)}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
