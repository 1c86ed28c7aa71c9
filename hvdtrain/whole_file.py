"""Files that are whole or not there: written under a temporary name, synchronized, renamed.

The temporary name tells who writes it, so that what a killed writer has left can be removed, and
what another host is writing stays.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WRITER = re.compile(r"\.tmp-(?:(?P<host>.+)-)?(?P<pid>\d+)(?:\.[^.]*)?$")
_OLD_FILE_S, _OLD_FOLDER_S = 3600.0, 86400.0
"""What another host has not touched for so long is of a killed writer. The time of a folder does
not change with what is written below it."""
_CANNOT_SYNCHRONIZE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


@contextmanager
def whole_file(path: Path, *, suffix: str | None = None) -> Iterator[Path]:
    """Give a name beside `path` to write a file or folder to, which becomes `path` at the end.

    After an error nothing is left, and a former `path` is as it was. The folder must exist.

    Args:
        path: What is to be made.
        suffix: String, the end of the name; defaults to that of `path`.
    """
    temporary = path.with_name(f".{path.name}.tmp-{_place()}-{os.getpid()}"
                               f"{path.suffix if suffix is None else suffix}")
    try:
        yield temporary
        if temporary.is_file():
            _synchronize(temporary)
        os.replace(temporary, path)
        try:
            _synchronize(path.parent)
        except OSError as error:
            if error.errno not in _CANNOT_SYNCHRONIZE:  # a file system without it
                raise
    finally:
        _remove(temporary)


def remove_leftovers(folder: Path, name: str = "*", *, locked: bool = False) -> None:
    """Remove what killed writers have left: those of this host, and what is old of others.

    Args:
        folder: Where `whole_file` was used; it need not exist.
        name: String, a pattern of `fnmatch` for the names of the files.
        locked: Boolean, whether the caller holds a lock that every writer of this host holds while
            it writes. A killed one lets go of it a moment before it is seen to have ended.
    """
    for path in folder.glob(f".{name}.tmp-*"):
        with suppress(OSError):
            if _is_left_over(path, locked=locked):
                _remove(path)


def _place() -> str:
    """This host, and the process numbers that count here: those of containers are their own."""
    numbers = os.stat("/proc/self/ns/pid").st_ino
    return f"{os.uname().nodename}-{numbers}"


def _is_left_over(path: Path, *, locked: bool) -> bool:
    writer = _WRITER.search(path.name)
    if writer is None:
        return False
    if writer["host"] == _place() and (locked or not _runs(writer["pid"])):
        return True
    limit_s = _OLD_FOLDER_S if path.is_dir() else _OLD_FILE_S
    return time.time() - path.stat().st_mtime > limit_s


def _runs(pid: str) -> bool:
    """Whether a process is there that has not ended, though nobody may have waited for it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
