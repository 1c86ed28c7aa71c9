"""Pickles of what is defined in a notebook, which no other process can import.

cloudpickle puts functions and classes of `__main__` into a pickle as code. What is added here: the
code keeps the name of its file, by which tracebacks and AutoGraph find its source; and definitions
by name, which Keras asks for when it reads a model.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

from hvdtrain.optional import require

_LARGEST_DEFINITION_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A class or function of the notebook."""

    name: str
    """In `__main__`; `PACKAGE>NAME` for one that is registered with Keras."""
    pickle: bytes


def dump(value: object, file: IO[bytes]) -> None:
    """Pickle a value; what is defined in `__main__` as code.

    Raises:
        MissingExtraError: cloudpickle is not installed.
    """
    _picklers()[0](file).dump(value)


def dump_result(value: object, file: IO[bytes]) -> None:
    """Pickle a value for the notebook, which has its own definitions; they go by their names.

    Code that came back would take the place of the notebook's, with the variables of a rank.
    """
    _picklers()[1](file).dump(value)


@cache
def _picklers() -> tuple[Any, Any]:
    base = require("cloudpickle", "hvdtrain.notebook_launcher").Pickler
    reduce = base.dispatch_table[types.CodeType]

    def reduce_code(code: types.CodeType) -> Any:
        made, arguments = reduce(code)
        return made, tuple(code.co_filename if argument == "<dynamic-code>" else argument
                           for argument in arguments)

    def by_name(self: Any, value: Any) -> Any:
        if _is_of_main(value) and getattr(sys.modules["__main__"], value.__name__, None) is value:
            return NotImplemented  # as pickle does it
        return base.reducer_override(self, value)

    table = ChainMap({types.CodeType: reduce_code}, base.dispatch_table)
    by_value = type("_ByValue", (base,), {"dispatch_table": table})
    return by_value, type("_ByName", (by_value,), {"reducer_override": by_name})


def definitions(*, everything: bool) -> list[Definition]:
    """The definitions of this notebook that Keras may ask for.

    What cannot be pickled or drags much data along is left out.

    Args:
        everything: Boolean, whether to take all of them, and not only those that are registered
            with Keras.
    """
    keras = sys.modules.get("keras")
    registered = {} if keras is None else keras.saving.get_custom_objects()
    named = [*registered.items(), *(_of_main().items() if everything else ())]
    found = {}
    for name, value in named:
        if id(value) not in found and _is_of_main(value):
            file = _SmallFile()
            try:
                dump(value, file)
            except Exception:  # noqa: S112, BLE001 - whatever a class of the user's raises
                continue
            found[id(value)] = Definition(name=name, pickle=file.getvalue())
    return list(found.values())


def keras_names() -> AbstractContextManager[object]:
    """A context in which Keras finds the definitions of this notebook by their names."""
    keras = sys.modules.get("keras")
    return nullcontext() if keras is None else keras.saving.custom_object_scope(_of_main())


def _of_main() -> dict[str, Any]:
    return {name: value for name, value in list(vars(sys.modules["__main__"]).items())
            if _is_of_main(value)}


def define(found: list[Definition]) -> types.ModuleType:
    """Be, from here on, a process whose `__main__` has these definitions. On a rank."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for definition in found:
        import keras
        value = pickle.loads(definition.pickle)  # noqa: S301 - of the process that started this one
        package, registered, name = definition.name.rpartition(">")
        if registered:
            keras.saving.register_keras_serializable(package, name)(value)
        else:  # Keras does not look into `__main__`
            keras.saving.get_custom_objects()[name] = vars(main)[name] = value
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
