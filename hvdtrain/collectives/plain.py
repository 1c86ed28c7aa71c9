"""Python values as bytes and back, without pickle: decoding what a network sent cannot run code.

`encode` takes None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and dataclasses
marked by `carried`. Format: the length of a JSON text, the text, and the bytes of all arrays in
the order of the text.
"""

from __future__ import annotations

import dataclasses
import io
import json
import struct
from typing import Any, TypeVar

import numpy as np

from hvdtrain.errors import CollectiveError

_LENGTH = struct.Struct("<Q")
_DEEPEST = 64
_carried: dict[str, type[Any]] = {}

C = TypeVar("C", bound=type)


def carried(cls: C) -> C:
    """Decorate a dataclass whose fields are plain values: `encode` accepts it."""
    _carried[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


def encode(value: object) -> bytes:
    """A value as bytes; the error names the type of an unsupported value in it."""
    blobs: list[bytes] = []
    try:
        text = json.dumps(_to_json(value, blobs, _DEEPEST)).encode()
    except ValueError as error:
        raise CollectiveError(f"A value cannot be sent to other ranks: {error}.") from error
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode(data: bytes) -> Any:
    """The value that was encoded, or `CollectiveError`."""
    try:
        blobs = io.BytesIO(data)
        length, = _LENGTH.unpack(blobs.read(_LENGTH.size))
        return _from_json(json.loads(_take(blobs, length)), blobs, _DEEPEST)
    except (ValueError, TypeError, LookupError, AttributeError, struct.error,
            RecursionError) as error:
        raise CollectiveError(
            f"A rank sent what cannot be read ({type(error).__name__}: {error}). Expected a value "
            "of this version of hvdtrain. Do all ranks run the same one?") from error


def _to_json(value: Any, blobs: list[bytes], depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"it is nested deeper than {_DEEPEST}")
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        blobs.append(bytes(value))
        return ["bytes", len(value)]
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        if dtype.hasobject or dtype.fields is not None:
            raise ValueError(f"it holds an array of {dtype}")
        blobs.append(value.tobytes())
        return ["array", name_of_dtype(dtype), list(value.shape), value.nbytes]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple",
                *(_to_json(item, blobs, depth - 1) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([_to_json(key, blobs, depth - 1), _to_json(item, blobs, depth - 1)]
                          for key, item in value.items())]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _carried:
        return ["class", name, *([f.name, _to_json(getattr(value, f.name), blobs, depth - 1)]
                                 for f in dataclasses.fields(value))]
    raise ValueError(f"it holds a {name}. Expected None, bool, int, float, str, bytes, list, "
                     "tuple, dict or numpy arrays")


def _from_json(found: Any, blobs: io.BytesIO, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    if isinstance(found, dict):
        raise TypeError("an object")
    if not isinstance(found, list):
        return found
    kind, *items = found
    if kind == "bytes":
        return _take(blobs, *items)
    if kind == "array":
        name, shape, size = items
        return np.frombuffer(_take(blobs, size), dtype_named(name)).reshape(shape).copy()
    if kind == "class":
        name, *fields = items
        return _carried[name](**{f: _from_json(item, blobs, depth - 1) for f, item in fields})
    if kind == "dict":
        return {_from_json(key, blobs, depth - 1): _from_json(item, blobs, depth - 1)
                for key, item in items}
    values = [_from_json(item, blobs, depth - 1) for item in items]
    return {"list": list, "tuple": tuple}[kind](values)


def _take(blobs: io.BytesIO, size: int) -> bytes:
    found = blobs.read(size)
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes of {size}")
    return found


def name_of_dtype(dtype: np.dtype[Any]) -> str:
    """The name by which `dtype_named` finds a dtype without objects."""
    return dtype.name if dtype.kind == "V" else dtype.str  # bfloat16 and its like are "V2"


def dtype_named(name: str) -> np.dtype[Any]:
    """A dtype by the name that `name_of_dtype` gave it; ValueError for one with objects."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes
        dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.hasobject:
        raise ValueError(f"an array of {name}")
    return dtype
