"""The GPU variant: CUDA and NCCL from the toolkit or from NVIDIA's wheels, and its edits.

Two recipes. With an nvcc whose major version is TensorFlow's, Horovod's own kernels are
compiled. Without one, its three kernels are replaced by checked copies of the CUDA runtime, which
needs no CUDA compiler and no list of architectures; scaling factors on GPU tensors are then
refused at run time. Both take the CUDA runtime from a static library that stands first on the
link line, because TensorFlow exports stubs of the same names.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.options import BuildOptions
from hvdtrain.build_horovod.probe import Target
from hvdtrain.build_horovod.process import run
from hvdtrain.errors import MachineError

_NO_NCCL = ("No NCCL was found ({looked}).\n"
            "  as a wheel:  pip install nvidia-nccl-cu12   ('tensorflow[and-cuda]' brings it)\n"
            "  elsewhere:   --nccl-home DIR (with include/nccl.h and lib/libnccl.so.2)")


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """The NCCL to link with."""

    include: Path
    library: Path
    version: str
    """Major, minor and patch."""


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """What a GPU build uses."""

    nccl: Nccl
    major: int
    """Major version of CUDA, TensorFlow's."""
    home: Path | None
    """Toolkit with nvcc; None: the recipe without nvcc."""
    archs: str
    includes: tuple[Path, ...] = ()
    """Recipe without nvcc: header folders."""
    static_runtime: Path | None = None
    """Recipe without nvcc: `libcudart_static.a`."""

    @property
    def variant(self) -> str:
        """The part of the cache key that tells the recipes apart."""
        return f"nvcc-{self.archs}" if self.home else "nonvcc"


def find_cuda(target: Target, options: BuildOptions, environ: Mapping[str, str]) -> Cuda:
    """Choose the recipe and find what it needs.

    Raises:
        MachineError: NCCL, or headers and runtime of CUDA, are missing.
    """
    nccl = find_nccl(target, options.nccl_home)
    major = int((target.cuda_version or "12").split(".")[0])
    if not options.no_nvcc:
        home, version = find_toolkit(options.cuda_home, environ, major=major)
        if home:
            archs = options.cuda_archs or default_archs(version)
            return Cuda(nccl=nccl, major=major, home=home, archs=archs)
    return Cuda(nccl=nccl, major=major, home=None, archs="",
                includes=_headers(target), static_runtime=_static_runtime(target))


def find_nccl(target: Target, nccl_home: Path | None) -> Nccl:
    """NCCL below `nccl_home`, else from NVIDIA's wheel.

    Raises:
        MachineError: Header or library is missing.
    """
    folders = [nccl_home] if nccl_home else [
        folder for name, folder in target.nvidia.items() if name == "nccl"]
    for folder in folders:
        header = folder / "include" / "nccl.h"
        library = next((path for part in ("lib", "lib64") for name in ("libnccl.so.2",
                        "libnccl.so") if (path := folder / part / name).exists()), None)
        if header.is_file() and library:
            return Nccl(include=header.parent, library=library,
                        version=nccl_version(header.read_text()))
    looked = f"in {folders[0]}" if folders else "the wheel nvidia-nccl-cu12 is not installed"
    raise MachineError(_NO_NCCL.format(looked=looked))


def nccl_version(header: str) -> str:
    """The version in the text of `nccl.h`, e.g. `2.32.3`."""
    found = (re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header)
             for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(match.group(1) if match else "0" for match in found)


def find_toolkit(given: Path | None, environ: Mapping[str, str], *,
                 major: int) -> tuple[Path | None, tuple[int, int]]:
    """A CUDA toolkit whose nvcc has the major version `major`, and that version.

    Raises:
        MachineError: `given` has no nvcc, or one of another major version.
    """
    candidates = [given] if given else [
        Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    if not given:
        inside = shutil.which("nvcc", path=environ.get("PATH", ""))
        candidates += [Path(inside).resolve().parents[1]] if inside else []
        candidates.append(Path("/usr/local/cuda"))
    for home in candidates:
        version = nvcc_version(home / "bin" / "nvcc", environ)
        if version and version[0] == major:
            return home.resolve(), version
        if given:
            found = f"nvcc {version[0]}.{version[1]}" if version else "no bin/nvcc"
            raise MachineError(
                f"--cuda-home {given} has {found}, but this TensorFlow uses CUDA {major}. Name a "
                f"toolkit of CUDA {major}, or build without a CUDA compiler: --no-nvcc")
    return None, (0, 0)


def nvcc_version(nvcc: Path, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Major and minor version of an nvcc; None when it does not run."""
    done = run([nvcc, "--version"], env=environ, timeout_s=60)
    match = re.search(r"release (\d+)\.(\d+)", done.out)
    return (int(match.group(1)), int(match.group(2))) if match else None


def default_archs(version: tuple[int, int]) -> str:
    """Compute capabilities that an nvcc of this version compiles for."""
    if version[0] >= 13:
        return "75,80,86,89,90,100,120"
    return "70,75,80,86,89,90" + (",100,120" if version >= (12, 8) else "")


def _headers(target: Target) -> tuple[Path, ...]:
    """Header folders of CUDA in wheels; TensorFlow's GPU wheel ships CCCL's `nv/target`.

    Raises:
        MachineError: `nv/target` is nowhere.
    """
    folders = [target.nvidia[name] / "include" for name in
               ("cuda_runtime", "cuda_nvcc", "cuda_cccl") if name in target.nvidia]
    if target.tensorflow_dir:
        external = target.tensorflow_dir / "include" / "external" / "cuda_cccl"
        folders += [path.parents[1] for path in external.glob("*/include/nv/target")]
    if not any((folder / "nv" / "target").exists() for folder in folders):
        raise MachineError("CUDA's header nv/target was not found. Install it with: "
                           "pip install nvidia-cuda-cccl-cu12")
    return tuple(folders)


def _static_runtime(target: Target) -> Path:
    folder = target.nvidia.get("cuda_runtime")
    library = folder / "lib" / "libcudart_static.a" if folder else None
    if library is None or not library.exists():
        raise MachineError(
            "No nvcc of TensorFlow's CUDA was found, and the recipe without nvcc needs the wheel "
            "of the CUDA runtime. Install it with: pip install nvidia-cuda-runtime-cu12   "
            "('tensorflow[and-cuda]' brings it), or load your cluster's CUDA module.")
    return library
