"""A call of a function by ranks, as files: the function with its arguments, and what came of it.

They lie in a folder that only this user can enter. Pickles are read by ranks that the notebook has
started itself, and by the notebook from its own rank 0; none comes over a network.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from hvdtrain.notebook.pickles import Definition, dump, dump_result

_CONTEXT, _CALL, _DEFINITIONS, _RESULT = ("context.json", "call.pickle", "definitions.pickle",
                                          "result.pickle")
_OF_TENSORFLOW = (b"tensorflow", b"keras")
_KERAS_MODEL = (b"_unpickle_model",)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a rank must know before it reads the call."""

    path: Sequence[str]
    """`sys.path` of the notebook."""
    sources: Mapping[str, str]
    """The text of code that lies in no file, such as cells, by the name of its file."""


class CallFolder:
    """The files of one call.

    Args:
        path: The folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_call(self, call: Call, context: Context) -> None:
        """Write what the ranks are to do. In the notebook."""
        self._write(_CONTEXT, json.dumps(asdict(context)).encode())
        with self._open(_CALL) as file:
            dump(call, file)

    def holds_model(self) -> bool:
        """Whether the call brings a Keras model."""
        return self._finds(_KERAS_MODEL)

    def write_definitions(self, found: list[Definition]) -> None:
        """Write what of the notebook Keras may ask for. In the notebook."""
        self._write(_DEFINITIONS, pickle.dumps(found))

    def read_context(self) -> Context:
        """What to know before the call is read. On a rank."""
        return Context(**json.loads((self.path / _CONTEXT).read_bytes()))

    def brings_tensorflow(self) -> bool:
        """Whether reading the call imports TensorFlow, and may run something of it. On a rank."""
        return self._finds(_OF_TENSORFLOW)

    def read_definitions(self) -> list[Definition]:
        """What of the notebook Keras may ask for. On a rank."""
        found: list[Definition] = self._read(_DEFINITIONS)
        return found

    def read_call(self) -> Call:
        """What to do. On a rank."""
        call: Call = self._read(_CALL)
        return call

    def write_result(self, value: object) -> None:
        """Write what the function gave. On the chief."""
        with self._open(_RESULT) as file:
            dump_result(value, file)

    def has_result(self) -> bool:
        """Whether the function has returned on the chief. In the notebook."""
        return (self.path / _RESULT).exists()

    def read_result(self) -> Any:
        """What the function gave on the chief. In the notebook."""
        return self._read(_RESULT)

    def write_failure(self, rank: int, traceback: str) -> None:
        """Write why a rank fails."""
        self._write(f"failure.{rank}", traceback.encode("utf-8", "replace"))

    def read_failure(self, rank: int) -> str:
        """Why a rank has failed; "" where it could not tell. In the notebook."""
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

    def _write(self, name: str, data: bytes) -> None:
        with self._open(name) as file:
            file.write(data)

    def _open(self, name: str) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return os.fdopen(os.open(self.path / name, flags, 0o600), "wb")
