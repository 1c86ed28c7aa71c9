"""Files of data: found by name, read in parts and counted; and where what is made of them lies."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.cache import default_cache
from hvdtrain.data.once import once_per_host
from hvdtrain.errors import DataError

Paths: TypeAlias = str | Path | Sequence[str | Path]
"""A path, a pattern as `glob.glob` takes it, or several of them."""

OPEN_FILES = 64
"""Files that one source keeps open."""
_DIGITS = 24
"""Hex digits of a fingerprint."""


def find_files(paths: Paths) -> tuple[Path, ...]:
    """The files that are meant.

    Args:
        paths: A path, a pattern (`*`, `?`, `[...]`, `**`), or a sequence of them. What a pattern
            finds is sorted by name; a sequence keeps its order.

    Returns:
        At least one existing file.

    Raises:
        DataError: A file does not exist, a pattern finds none, or a path is a folder.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise DataError("No data files were given. Expected a path, a pattern such as "
                        "'data/*.tfrecord', or a list of them.")
    return tuple(file for one in given for file in _find(Path(one)))


def _find(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected files. Give a pattern, such as "
                        f"'{path}/*'.")
    if not glob.has_magic(str(path)):
        raise DataError(f"The data file {path} does not exist. A relative path is taken from the "
                        f"folder {Path.cwd()}.")
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = [file for file in found if file.is_file()]
    if not files:
        raise DataError(f"No file is named {path}. A relative pattern is taken from the folder "
                        f"{Path.cwd()}.")
    return files


class ByteCount:
    """A number of bytes that several threads add to."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        """Count so many bytes more."""
        with self._lock:
            self._value += number

    @property
    def value(self) -> int:
        """The bytes counted so far."""
        return self._value


class PartReader:
    """Reads parts of files, of which it keeps some open. Any thread.

    Args:
        files: The files.
        count: Counts what is read.
    """

    def __init__(self, files: Sequence[Path], count: ByteCount) -> None:
        self._files = tuple(files)
        self._count = count
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, file: int, begin: int, size: int) -> bytes:
        """Up to `size` bytes of a file; fewer only at its end.

        Args:
            file: Integer, which of the files.
            begin: Integer, offset in bytes.
            size: Integer, bytes.

        Raises:
            OSError: The file cannot be read.
        """
        with self._lock:  # so that no thread reads a file that another one closes
            descriptor = self._descriptor(file)
            parts: list[bytes] = []
            left = size
            while left and (part := os.pread(descriptor, left, begin + size - left)):
                parts.append(part)
                left -= len(part)
        self._count.add(size - left)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(self._files[file], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[file]


def cache_folder(given: str | Path | None) -> Path:
    """The folder for what is made of data files: indexes, unpacked files.

    Args:
        given: Path, or None for `$HVDTRAIN_CACHE/data`, else `$XDG_CACHE_HOME/hvdtrain/data`, else
            `~/.cache/hvdtrain/data`.
    """
    return Path(given) if given is not None else default_cache(os.environ) / "data"


def name_of(files: Sequence[Path]) -> str:
    """How messages call some files: the first one, and how many there are beside it."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def fingerprint(files: Sequence[Path], *settings: object) -> str:
    """A name for what is made of these files: another one if a file or a setting changes.

    Args:
        files: By path, size and time of the last change; their content is not read.
        settings: Whatever else decides what is made; by its `repr`.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode(
            errors="surrogateescape"))
    return digest.hexdigest()[:_DIGITS]


def cached_index(folder: Path, name: str,
                 make: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """An array of numbers, made by one process per host and kept in a file.

    Args:
        folder: Where it is kept.
        name: String, the file's name without `.npy`; see `fingerprint`.
        make: Callable that makes the array, which must not be empty.

    Returns:
        The array, memory-mapped.

    Raises:
        DataError: The file cannot be written or read. Also what `make` raises.
    """
    def work(path: Path) -> None:
        array = make()
        with path.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)

    path = once_per_host(folder / f"{name}.npy", work)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"The index {path} cannot be read ({error}). Delete it; it will be made "
                        "again.") from error
