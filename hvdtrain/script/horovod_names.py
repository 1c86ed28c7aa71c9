"""hvdtrain's modules under Horovod's names, for a script that imports Horovod."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from hvdtrain.collectives.real_horovod import real_horovod

_FORMS = {
    "horovod.tensorflow": "hvdtrain.tensorflow",
    "horovod.tensorflow.elastic": "hvdtrain.tensorflow.elastic",
    "horovod.tensorflow.keras": "hvdtrain.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "hvdtrain.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hvdtrain.tensorflow.keras.elastic",
    "horovod.keras": "hvdtrain.keras",
    "horovod.keras.callbacks": "hvdtrain.keras.callbacks",
    "horovod.keras.elastic": "hvdtrain.keras.elastic",
}


def install() -> Callable[[], None]:
    """Put them into `sys.modules`; gives a function that undoes it.

    Horovod's other modules (`horovod.runner`, `horovod.spark`) stay its own, where it is installed.
    """
    try:
        import horovod as package
        real_horovod()  # before its names are taken
    except ImportError:
        package = ModuleType("horovod")
        package.__path__ = []
    before = {name: sys.modules.get(name) for name in ("horovod", *_FORMS)}
    attributes = {name: vars(package).get(name) for name in ("tensorflow", "keras")}
    sys.modules["horovod"] = package
    for name, form in _FORMS.items():
        sys.modules[name] = importlib.import_module(form)
    for name in attributes:
        setattr(package, name, sys.modules[f"horovod.{name}"])

    def undo() -> None:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        for name, value in attributes.items():
            if value is None:
                delattr(package, name)
            else:
                setattr(package, name, value)
    return undo
