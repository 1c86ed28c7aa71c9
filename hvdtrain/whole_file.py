"""Files that are whole or absent: written under a temporary name, synchronized, renamed.

The temporary name contains its writer: what a killed writer has left can be removed, and what
another host is writing stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.log import get_logger

_WRITER = re.compile(r"\.tmp-(?:(?P<host>.+)-)?(?P<pid>\d+)(?:\.[^.]*)?$")
_OLD_FILE_S, _OLD_FOLDER_S = 3600.0, 86400.0
"""Older files of other hosts are from killed writers. Writing below a folder does not change its
time."""
_CANNOT_SYNCHRONIZE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


@contextmanager
def whole_file(path: Path, *, suffix: str | None = None) -> Iterator[Path]:
    """Yield a name beside `path` to write a file or folder to, which becomes `path` at the end.

    After an error nothing is left, and a former `path` is unchanged. The folder must exist.
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


def acquire(lock: int, holder: str) -> None:
    """Lock an open file for this process, saying that it waits for `holder` if it must."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        get_logger().info("%s; waiting for it", holder)
        fcntl.flock(lock, fcntl.LOCK_EX)


def remove_leftovers(folder: Path, name: str = "*", *, locked: bool = False) -> None:
    """Remove what killed writers have left: those of this host, and old files of others.

    `name` is a pattern of `fnmatch`. `locked`: the caller holds a lock that every writer of this
    host holds while it writes; a killed one releases it a moment before it is seen to have ended.
    """
    for path in folder.glob(f".{name}.tmp-*"):
        writer = _WRITER.search(path.name)
        with suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > (
                _OLD_FOLDER_S if path.is_dir() else _OLD_FILE_S)
            if writer and (is_old or writer["host"] == _place()
                           and (locked or not _runs(writer["pid"]))):
                _remove(path)


def _place() -> str:
    """This host, and the namespace of its process numbers: containers have their own."""
    numbers = os.stat("/proc/self/ns/pid").st_ino
    return f"{os.uname().nodename}-{numbers}"


def _runs(pid: str) -> bool:
    """Whether a process exists that has not ended, even if nobody has waited for it."""
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
