"""A call of a function by ranks, as files: the function with its arguments, and the result.

They are in a folder that only this user can enter: ranks read pickles of the notebook, and the
notebook those of its rank 0; none comes over a network. Other processes cannot import definitions
of a notebook, so cloudpickle stores those of `__main__` as code. Added here: code keeps its file
name, by which tracebacks and AutoGraph find the source, and definitions by name, which Keras needs
to read a model.
"""

from __future__ import annotations

import inspect
import io
import json
import linecache
import mmap
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeAlias

from hvdtrain.errors import LaunchError, MissingExtraError
from hvdtrain.optional import require

_CONTEXT, _CALL, _DEFINITIONS, _RESULT = ("context.json", "call.pickle", "definitions.pickle",
                                          "result.pickle")
_OF_TENSORFLOW = (b"tensorflow", b"keras")
_KERAS_MODEL = (b"_unpickle_model",)
_LARGEST_DEFINITION_BYTES = 1 << 20


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""A function with its arguments."""


@dataclass(frozen=True)
class CallFolder:
    """The files of one call, in an existing folder."""

    path: Path

    def write_call(self, call: Call, sources: Mapping[str, str]) -> None:
        """Write what the ranks need. In the notebook.

        `sources` maps file names to the text of code without a file, such as cells. LaunchError
        where something of the call cannot be sent.
        """
        try:
            (self.path / _CONTEXT).write_text(json.dumps({"path": sys.path, "sources": sources}))
            with (self.path / _CALL).open("wb") as file:
                _dump(call, file)
            definitions = _definitions(everything=self._finds(_KERAS_MODEL))
            (self.path / _DEFINITIONS).write_bytes(pickle.dumps(definitions))
        except MissingExtraError:
            raise
        except Exception as error:
            found = _culprits(call) or [str(error)]
            raise LaunchError(
                f"{getattr(call[0], '__name__', 'The function')} cannot be sent to the ranks "
                f"because of {'; '.join(found).rstrip('.')}. Make it within the function, on each "
                "rank.") from error

    def read_call(self, pin: Callable[[], None]) -> Call:
        """Define the notebook's definitions in `__main__`, and read the call. On a rank.

        Modules and the text of cells are then found as in the notebook. `pin` is called before
        anything of TensorFlow is imported, and may be run.
        """
        context = json.loads((self.path / _CONTEXT).read_bytes())
        sys.path[:] = context["path"]
        for name, text in context["sources"].items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        definitions = self._read(_DEFINITIONS)
        if definitions or self._finds(_OF_TENSORFLOW):
            pin()
        main = _define(definitions)
        call: Call = self._read(_CALL)
        function: Any = call[0]
        while hasattr(function, "func") or hasattr(function, "__func__"):  # partial, bound method
            function = getattr(function, "func", None) or function.__func__
        if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
            vars(main).update({name: value for name, value in function.__globals__.items()
                               if not name.startswith("__")} | {function.__name__: function})
        return call

    def write_result(self, value: object) -> None:
        """Write the result, with the notebook's definitions by name. On the chief."""
        # As code they would replace those of the notebook, with the variables of a rank.
        with (self.path / _RESULT).open("wb") as file:
            _picklers()[1](file).dump(value)

    def has_result(self) -> bool:
        """Whether the function has returned on the chief. In the notebook."""
        return (self.path / _RESULT).exists()

    def read_result(self) -> Any:
        """The function's result on the chief. In the notebook."""
        keras = sys.modules.get("keras")
        names: AbstractContextManager[object] = (
            nullcontext() if keras is None else keras.saving.custom_object_scope(_of_main()))
        with names:
            return self._read(_RESULT)

    def write_failure(self, rank: int, traceback: str) -> None:
        """Write why a rank fails."""
        (self.path / f"failure.{rank}").write_text(traceback, "utf-8", "replace")

    def read_failure(self, rank: int) -> str:
        """Why a rank has failed; "" if it could not write it. In the notebook."""
        try:
            return (self.path / f"failure.{rank}").read_text("utf-8")
        except FileNotFoundError:
            return ""

    def _finds(self, words: Sequence[bytes]) -> bool:
        with (self.path / _CALL).open("rb") as file, mmap.mmap(
                file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(word) >= 0 for word in words)

    def _read(self, name: str) -> Any:
        with (self.path / name).open("rb") as file:
            return pickle.load(file)  # noqa: S301 - of this process' parent, or its child


def _culprits(call: Call) -> list[str]:
    """The parts of a call that cannot be pickled, in words."""
    function, args, kwargs = call
    parts = {f"argument {name}": value for name, value in [*enumerate(args, 1), *kwargs.items()]}
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        parts |= {f"the variable {name}": value
                  for name, value in {**used.globals, **used.nonlocals}.items()}
    found = []
    for what, value in parts.items():
        try:
            _dump(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001 - whatever an object of the user's raises
            found.append(f"{what} ({type(value).__name__}): {error}")
    return found


def _dump(value: object, file: IO[bytes]) -> None:
    """Pickle a value; definitions of `__main__` as code."""
    _picklers()[0](file).dump(value)


@cache
def _picklers() -> tuple[Any, Any]:
    """For the way to the ranks, and back."""
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


def _definitions(*, everything: bool) -> list[tuple[str, bytes]]:
    """The notebook's definitions that Keras may ask for: those registered with it, or all.

    Their names, `PACKAGE>NAME` if registered, and pickles. Those that cannot be pickled, or refer
    to much data, are left out.
    """
    keras = sys.modules.get("keras")
    registered = {} if keras is None else keras.saving.get_custom_objects()
    found = {}
    for name, value in [*registered.items(), *(_of_main().items() if everything else ())]:
        if id(value) not in found and _is_of_main(value):
            file = _SmallFile()
            try:
                _dump(value, file)
            except Exception:  # noqa: S112, BLE001 - whatever a class of the user's raises
                continue
            found[id(value)] = name, file.getvalue()
    return list(found.values())


def _define(found: list[tuple[str, bytes]]) -> types.ModuleType:
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for full_name, data in found:
        import keras
        value = pickle.loads(data)  # noqa: S301 - of the process that started this one
        package, registered, name = full_name.rpartition(">")
        if registered:
            keras.saving.register_keras_serializable(package, name)(value)
        else:  # Keras does not look into `__main__`
            keras.saving.get_custom_objects()[name] = vars(main)[name] = value
    return main


def _of_main() -> dict[str, Any]:
    return {name: value for name, value in list(vars(sys.modules["__main__"]).items())
            if _is_of_main(value)}


def _is_of_main(value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == "__main__"


class _SmallFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _LARGEST_DEFINITION_BYTES:
            raise ValueError("it is too large")
        return super().write(data)
