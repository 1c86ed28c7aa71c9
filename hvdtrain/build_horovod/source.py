"""Horovod's source: the archive through pip, unpacked, and the edits that it needs.

Each edit has a name and a reason, and fails when it finds nothing to change: on another source
than the one it was written for, the build stops instead of producing something else.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.key import HOROVOD_VERSION
from hvdtrain.build_horovod.tools import download_sdist
from hvdtrain.errors import BuildError

SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_NO_DEBUG = ('string(REGEX REPLACE "(^| )-g( |$)" " " CMAKE_{0}_FLAGS_RELWITHDEBINFO '
             '"${{CMAKE_{0}_FLAGS_RELWITHDEBINFO}}")')


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change to one file of Horovod's source."""

    name: str
    reason: str
    file: str
    pattern: str
    """A regular expression; `^` and `$` match at lines."""
    replacement: str
    """The new text, taken literally."""
    every: bool = False
    """Change every match; else the first one."""


def plain(text: str) -> Callable[[re.Match[str]], str]:
    """A replacement that is taken as it is, without backslash escapes."""
    return lambda _match: text


def apply_edit(source: Path, edit: Edit) -> None:
    """Change one file.

    Raises:
        BuildError: The file is missing, or nothing in it matches.
    """
    path = source / edit.file
    text = path.read_text() if path.is_file() else ""
    new, count = re.subn(edit.pattern, plain(edit.replacement), text,
                         count=0 if edit.every else 1, flags=re.MULTILINE)
    if count == 0 or new == text:
        raise BuildError(
            f"The edit '{edit.name}' found nothing to change in {edit.file}. It was written for "
            f"Horovod {HOROVOD_VERSION} as published; use that source (leave out --sdist).")
    path.write_text(new)


def apply_edits(source: Path, edits: Iterable[Edit]) -> None:
    """Change the unpacked source; see `apply_edit`."""
    for edit in edits:
        apply_edit(source, edit)


def common_edits(run_path: Iterable[str], *, gloo: bool) -> tuple[Edit, ...]:
    """The edits of every build.

    Args:
        run_path: Folders where the library looks for MPI and NCCL, relative to `$ORIGIN`.
        gloo: Boolean, whether Gloo is built.
    """
    edits = [
        Edit(name="xla",
             reason="its headers are not in TensorFlow's wheel from 2.19 on; empty on CPU",
             file="horovod/tensorflow/CMakeLists.txt",
             pattern=r"^.*xla_mpi_ops\.cc.*\n", replacement=""),
        Edit(name="run-path",
             reason="a wheel that works in any environment, and 1.7 MB instead of 54",
             file="CMakeLists.txt", pattern=r"^# GPU Operations$",
             replacement=_link_settings(run_path)),
    ]
    if gloo:
        edits += [
            Edit(name="gloo-once",
                 reason="gloo is compiled twice, and only the C++17 copy is linked",
                 file="CMakeLists.txt", pattern=r"add_subdirectory\(third_party/gloo\)",
                 replacement="add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)"),
            Edit(name="gloo-stall-check",
                 reason="reserve() leaves the list of ranks empty, so that no stall is ever seen",
                 file="horovod/common/gloo/gloo_controller.cc",
                 pattern=r"global_ranks_\.reserve\(size_\);",
                 replacement="global_ranks_.assign(size_, 0);"),
        ]
    return tuple(edits)


def _link_settings(run_path: Iterable[str]) -> str:
    lines = ["set(CMAKE_SKIP_BUILD_RPATH FALSE)",
             "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)",
             f'set(CMAKE_INSTALL_RPATH "{";".join(run_path)}")',
             *(_NO_DEBUG.format(language) for language in ("C", "CXX", "CUDA")),
             'set(CMAKE_SHARED_LINKER_FLAGS "${CMAKE_SHARED_LINKER_FLAGS} -s")',
             "# GPU Operations"]
    return "\n".join(lines)


def get_sdist(cache: Path, given: Path | None, python: Path, env: dict[str, str]) -> Path:
    """The source archive: the one given, else from the cache, else through pip.

    Raises:
        BuildError: It cannot be downloaded, or it is not the archive that is known.
    """
    if given is not None:
        if not given.is_file():
            raise BuildError(f"The source archive {given} does not exist.")
        return given
    path = cache / SDIST_NAME
    if not path.is_file():
        download_sdist(path, python=python, env=env)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        path.unlink()
        raise BuildError(
            f"The downloaded {SDIST_NAME} has the SHA-256 {digest}, but {SDIST_SHA256} was "
            "expected; it was deleted. Try again, or name an archive that you trust: --sdist.")
    return path


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the archive; returns the source folder.

    Raises:
        BuildError: It is not an archive of this Horovod.
    """
    try:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise BuildError(f"{sdist} cannot be unpacked: {error}") from error
    source = folder / f"horovod-{HOROVOD_VERSION}"
    if not (source / "setup.py").is_file():
        raise BuildError(f"{sdist} holds no horovod-{HOROVOD_VERSION}/setup.py. Use the source "
                         f"archive of Horovod {HOROVOD_VERSION}.")
    return source
