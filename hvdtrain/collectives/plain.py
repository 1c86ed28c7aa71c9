"""Python values as bytes and back, without pickle: reading them cannot run code.

What ranks tell each other comes over a network. `encode` takes None, bool, int, float, str, bytes,
list, tuple, dict, numpy arrays and the dataclasses that are marked with `carried`; `decode` makes
nothing else. The form: the length of a JSON text, the text, and the bytes of all arrays.
"""

from __future__ import annotations

import dataclasses
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
    """Mark a dataclass whose fields are plain values: `encode` takes it, `decode` makes it.

    Example:
        ```python
        @carried
        @dataclass(frozen=True)
        class Report:
            name: str
        ```
    """
    _carried[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


def encode(value: object) -> bytes:
    """A value as bytes.

    Raises:
        CollectiveError: It holds something of another type, which is named.
    """
    blobs: list[bytes] = []
    try:
        text = json.dumps(_to_json(value, blobs, _DEEPEST)).encode()
    except ValueError as error:
        raise CollectiveError(f"A value cannot be sent to other ranks: {error}.") from error
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode(data: bytes) -> Any:
    """The value that was encoded.

    Raises:
        CollectiveError: The bytes are none of `encode`, or of a class that is not known here.
    """
    try:
        length, = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        if end > len(data):
            raise ValueError(f"{len(data)} bytes of {end}")
        return _from_json(json.loads(data[_LENGTH.size:end]), memoryview(data)[end:], _DEEPEST)
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
        return ["bytes", *_add(blobs, bytes(value))]
    if isinstance(value, np.ndarray):
        return ["array", _dtype_name(value.dtype), list(value.shape),
                *_add(blobs, np.ascontiguousarray(value).tobytes())]
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


def _from_json(found: Any, blobs: memoryview, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    if not isinstance(found, list):
        if isinstance(found, dict):
            raise TypeError("an object")
        return found
    kind, *items = found
    if kind == "bytes":
        return bytes(_cut(blobs, *items))
    if kind == "array":
        name, shape, *where = items
        dtype = _dtype(name)
        return np.frombuffer(_cut(blobs, *where), dtype).reshape(shape).copy()
    if kind == "class":
        name, *fields = items
        return _carried[name](**{f: _from_json(item, blobs, depth - 1) for f, item in fields})
    if kind == "dict":
        return {_from_json(key, blobs, depth - 1): _from_json(item, blobs, depth - 1)
                for key, item in items}
    values = [_from_json(item, blobs, depth - 1) for item in items]
    return {"list": list, "tuple": tuple}[kind](values)


def _add(blobs: list[bytes], data: bytes) -> tuple[int, int]:
    start = sum(map(len, blobs))
    blobs.append(data)
    return start, len(data)


def _cut(blobs: memoryview, start: int, size: int) -> memoryview:
    if not 0 <= start <= start + size <= len(blobs):
        raise ValueError(f"{size} bytes from {start} of {len(blobs)}")
    return blobs[start:start + size]


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject or dtype.fields is not None:
        raise ValueError(f"it holds an array of {dtype}")
    return dtype.name if dtype.kind == "V" else dtype.str  # bfloat16 and its like are "V2"


def _dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes
        dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.hasobject:
        raise ValueError(f"an array of {name}")
    return dtype
