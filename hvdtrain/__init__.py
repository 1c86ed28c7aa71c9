"""Train Keras 3 models on many processes with Horovod's collectives.

Importing this package is free: names load what they need when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, which takes a while to import
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


# Not in `__all__`: `import *` must not replace what a script calls keras.
_PACKAGES = ("elastic", "keras", "tensorflow")


def __getattr__(name: str) -> Any:
    from importlib import import_module
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    # The stub for type checkers is the only list of names: one in a line, with its module.
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub]
    modules = {words[5]: words[1] for words in lines if words[:1] == ["from"] and "as" in words}
    if name == "__all__":
        return ["__version__", *sorted(modules)]
    if name not in modules:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(modules[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__getattr__("__all__"), *_PACKAGES])
