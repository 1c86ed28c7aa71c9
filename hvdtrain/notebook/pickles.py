"""Pickles of what is defined in a notebook, which no other process can import.

cloudpickle puts functions and classes of `__main__` into a pickle as code. What is added here: the
code keeps the name of its file, by which tracebacks and AutoGraph find its source; and definitions
by name, which Keras looks up in `__main__` when it reads a model.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

from hvdtrain.optional import require

_LARGEST_DEFINITION_BYTES = 1 << 20
_PLAIN = (pickle.PicklingError, TypeError, AttributeError)
"""What pickle raises for what it cannot handle."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A class or function of the notebook."""

    name: str
    """In `__main__`."""
    registered: str
    """Its name among the custom objects of Keras, `PACKAGE>NAME`; "" for none."""
    pickle: bytes


def dump(value: object, file: IO[bytes]) -> None:
    """Pickle a value; what is defined in `__main__` as code.

    Raises:
        MissingExtraError: cloudpickle is not installed.
    """
    _pickler()(file).dump(value)


@cache
def _pickler() -> Any:
    base = require("cloudpickle", "hvdtrain.notebook_launcher").Pickler
    reduce = base.dispatch_table[types.CodeType]

    def reduce_code(code: types.CodeType) -> Any:
        made, arguments = reduce(code)
        return made, tuple(code.co_filename if argument == "<dynamic-code>" else argument
                           for argument in arguments)

    table = ChainMap({types.CodeType: reduce_code}, base.dispatch_table)
    return type("_Pickler", (base,), {"dispatch_table": table})


def dump_result(value: object, file: IO[bytes]) -> None:
    """Pickle a value for the notebook, which finds its own definitions by their names."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except _PLAIN:  # as of a function within the function
        dump(value, file)
    else:
        file.write(data)


def definitions(main: Mapping[str, Any], *, everything: bool) -> list[Definition]:
    """The definitions of a notebook that Keras may ask for.

    What cannot be pickled or drags much data along is left out.

    Args:
        main: The names of `__main__`.
        everything: Boolean, whether to take all of them, and not only those that are registered
            with Keras.
    """
    keras = sys.modules.get("keras")
    registered = {id(value): name for name, value in keras.saving.get_custom_objects().items()
                  } if keras is not None else {}
    found = []
    for name, value in list(main.items()):
        wanted = everything or id(value) in registered
        if wanted and _is_of_main(value):
            file = _SmallFile()
            try:
                dump(value, file)
            except Exception:  # noqa: S112, BLE001 - whatever a class of the user's raises
                continue
            found.append(Definition(name=name, registered=registered.get(id(value), ""),
                                    pickle=file.getvalue()))
    return found


def define(found: list[Definition]) -> types.ModuleType:
    """Be, from here on, a process whose `__main__` has these definitions. On a rank."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for definition in found:
        value = pickle.loads(definition.pickle)  # noqa: S301 - of the process that started this one
        vars(main)[definition.name] = value
        if definition.registered:
            import keras
            package, _, name = definition.registered.rpartition(">")
            keras.saving.register_keras_serializable(package, name)(value)
    return main


def define_with(function: Callable[..., Any], main: types.ModuleType) -> None:
    """Add to `__main__` what a function of the notebook uses, and the function itself."""
    while hasattr(function, "func") or hasattr(function, "__func__"):  # partial, bound method
        function = getattr(function, "func", None) or function.__func__  # type: ignore[attr-defined]
    if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
        vars(main).update({name: value for name, value in function.__globals__.items()
                           if not name.startswith("__")} | {function.__name__: function})


def culprits(function: Callable[..., Any], args: tuple[Any, ...],
             kwargs: Mapping[str, Any]) -> list[str]:
    """What of a call cannot be pickled, in words."""
    found = []
    for what, value in _parts(function, args, kwargs):
        try:
            dump(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001 - whatever an object of the user's raises
            found.append(f"{what} ({type(value).__name__}): {error}")
    return found


def _parts(function: Callable[..., Any], args: tuple[Any, ...],
           kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"argument {number}", value) for number, value in enumerate(args, 1))
    yield from ((f"argument {name}", value) for name, value in kwargs.items())
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        yield from ((f"the variable {name}", value)
                    for name, value in {**used.globals, **used.nonlocals}.items())


def _is_of_main(value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == "__main__"


class _SmallFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _LARGEST_DEFINITION_BYTES:
            raise ValueError("it is too large")
        return super().write(data)
