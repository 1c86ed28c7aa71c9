"""Program: a rank that initialises Horovod without importing TensorFlow, in 1 s instead of 10.

Prints what Horovod and `detect_world` say of its place, as one line of JSON; they must agree.
The time from T_LAUNCH (seconds since the epoch) to the end of `hvd.init()` comes with it.
"""

import contextlib
import ctypes
import json
import os
import sys
import sysconfig
import time

from hvdtrain.rendezvous.barrier import rendezvous_barrier
from hvdtrain.rendezvous.bootstrap import bootstrap
from hvdtrain.rendezvous.relay import relayed
from hvdtrain.world import detect_world


def horovod():
    """Horovod's basics over its TensorFlow library, loaded by hand."""
    site = sysconfig.get_path("purelib")
    for name in ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2"):
        ctypes.CDLL(os.path.join(site, "tensorflow", name), mode=ctypes.RTLD_GLOBAL)
    from horovod.common import process_sets
    from horovod.common.basics import HorovodBasics
    basics = HorovodBasics(os.path.join(site, "horovod", "tensorflow", "__init__.py"), "mpi_lib")
    process_sets._setup(basics)
    return basics


def main():
    world = detect_world(os.environ)
    bare = "--bare" in sys.argv  # as under a bare mpirun: Horovod alone
    if not bare:
        os.environ.update(bootstrap(world, os.environ))
    hvd = horovod()
    if not bare and world.rendezvous != "mpi" and "--mpi" not in sys.argv:
        rendezvous_barrier(world, os.environ)
    with contextlib.nullcontext() if bare else relayed(world, os.environ):
        hvd.init()
    place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    promised = [world.rank, world.size, world.local_rank, world.local_size]
    sys.stdout.write(json.dumps({
        "place": place, "promised": promised, "cross": [hvd.cross_rank(), hvd.cross_size()],
        "host": os.uname().nodename, "starter": world.starter, "mpi": hvd.mpi_enabled(),
        "seconds": round(time.time() - float(os.environ.get("T_LAUNCH", "nan")), 3)}) + "\n")
    sys.stdout.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
