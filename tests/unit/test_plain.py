"""What ranks tell each other as bytes: values come back as they were, and code never runs."""

import json
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.collectives.plain import carried, decode, encode
from hvdtrain.errors import CollectiveError


@carried
@dataclass(frozen=True)
class Pair:
    left: int
    right: tuple[str, ...]


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("value", [
    None, True, 0, -1, 1 << 70, 0.1, float("inf"), 5e-324, "", "ü\0\n", b"", b"\0\xff",
    [], (), {}, [1, (2, [3, {"a": (4,)}])], {1: "a", (2, "b"): None}, Pair(1, ("a", "b")),
    [Pair(1, ()), {"x": Pair(2, ("z",))}], "x" * 100_000])
def test_a_value_comes_back_with_its_types(value):
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint8",
                                   "bool", "complex64", "U3", "S2", ">i4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_come_back_bit_for_bit(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back, = decode(encode([array]))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    back[...] = array  # it may be written to


def test_bfloat16_and_an_array_that_is_not_contiguous():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(12).reshape(3, 4).T.astype(ml_dtypes.bfloat16)
    back = decode(encode(array))
    assert back.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(back, array)


def test_numbers_of_numpy_become_python_s():
    assert [type(v) for v in decode(encode([np.int32(1), np.float64(2), np.bool_(True)]))] == [
        int, float, bool]


@pytest.mark.parametrize("value", [
    Path("x"), {1, 2}, object(), lambda: 0, ValueError("x"), ValueError,
    np.array([object()]), np.zeros(2, [("a", "i4")])])
def test_anything_else_is_refused_by_its_type(value):
    with pytest.raises(CollectiveError, match="it holds an? "):
        encode([value])


def test_deep_nesting_is_refused():
    value = []
    for _ in range(100):
        value = [value]
    with pytest.raises(CollectiveError, match="nested deeper"):
        encode(value)


def framed(found, blobs=b""):
    text = json.dumps(found).encode()
    return struct.pack("<Q", len(text)) + text + blobs


@pytest.mark.parametrize("data", [
    b"", b"x" * 7, struct.pack("<Q", 100) + b"1", struct.pack("<Q", 2) + b"{x", framed({"a": 1}),
    framed(["set", 1]), framed(["class", "pathlib.Path", ["a", 1]]),
    framed(["class", "test_plain.Pair", ["other", 1]]), framed(["bytes", 5], b"1234"),
    framed(["bytes", -1], b"1234"), framed(["array", "O", [1], 8], b"12345678"),
    framed(["array", "no such", [1], 8], b"12345678"),
    framed(["array", "i4", [9], 8], b"12345678"), framed([]), framed(["dict", [1]])])
def test_bytes_that_are_none_of_ours_are_refused(data):
    with pytest.raises(CollectiveError, match="cannot be read"):
        decode(data)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    data = pickle.dumps(Touch(tmp_path / "ran"))
    for sent in (data, framed(["bytes", len(data)], data), struct.pack("<Q", len(data)) + data):
        try:
            decode(sent)
        except CollectiveError:
            continue
    assert list(tmp_path.iterdir()) == []
    pickle.loads(data)
    assert [path.name for path in tmp_path.iterdir()] == ["ran"]  # what it would have done
