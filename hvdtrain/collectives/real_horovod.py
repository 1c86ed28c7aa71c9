"""The real Horovod, under whatever names `sys.modules` has: `hvdtrain run` puts our own there."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import NamedTuple

from hvdtrain.optional import require


class RealHorovod(NamedTuple):
    """Modules of the installed Horovod: `horovod.tensorflow`, `.mpi_ops`, `.process_sets`."""

    tensorflow: ModuleType
    ops: ModuleType
    process_sets: ModuleType


@functools.cache
def real_horovod() -> RealHorovod:
    """Load Horovod once; later calls return the same modules, whatever was put in their place.

    Modules that stand in `sys.modules` under a name of Horovod, but have another name themselves,
    are set aside while it loads, and stay there afterwards.

    Raises:
        MissingExtraError: Horovod is not installed.
    """
    ours = {name: module for name, module in sys.modules.items()
            if name.partition(".")[0] == "horovod" and module.__name__ != name}
    # With one of ours, a part of the real package would be found as an attribute of it.
    aside = {name: sys.modules.pop(name) for name in list(sys.modules)
             if ours and name.partition(".")[0] == "horovod"}
    try:
        return RealHorovod(*(require(name, "the Horovod collective") for name in (
            "horovod.tensorflow", "horovod.tensorflow.mpi_ops", "horovod.common.process_sets")))
    finally:
        if ours:
            for name in [n for n in sys.modules if n.partition(".")[0] == "horovod"]:
                del sys.modules[name]
            sys.modules.update(aside)
