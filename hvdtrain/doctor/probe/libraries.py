"""Do TensorFlow, Horovod, MPI and CUDA's libraries load? Tried in processes of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.doctor.facts import CudaFacts, LoadFacts, MpiFacts, PythonFacts
from hvdtrain.doctor.probe.command import ask
from hvdtrain.doctor.probe.python import package_folder
from hvdtrain.launch.facts import find_mpirun

_LOAD_LIMIT_S = 60.0
_IMPORT_LIMIT_S = 20.0

# Without TensorFlow's Python, whose import takes ten times as long.
_LOAD = """import ctypes, os, sys
tensorflow, horovod = sys.argv[1:]
names = ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]
if not os.path.exists(os.path.join(tensorflow, names[1])):
    names[1] = "python/_pywrap_tensorflow_internal.so"
for name in names:
    ctypes.CDLL(os.path.join(tensorflow, name), mode=ctypes.RTLD_GLOBAL)
print("tensorflow", flush=True)
if horovod:
    ctypes.CDLL(horovod, mode=ctypes.RTLD_GLOBAL).horovod_size
    print("horovod", flush=True)
"""
_MPI4PY = """import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().split(",")[0].splitlines()[0])
"""
_DLOPEN = """import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        continue
    print(name)
"""
#: Major version of CUDA -> the libraries that TensorFlow opens while it runs.
_CUDA = {
    12: ("libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11",
         "libcusolver.so.11", "libcusparse.so.12", "libnvJitLink.so.12", "libcupti.so.12"),
    13: ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcufft.so.12",
         "libcusolver.so.12", "libcusparse.so.12", "libnvJitLink.so.13", "libcupti.so.13"),
}


def try_loading(python: PythonFacts) -> tuple[LoadFacts | None, LoadFacts | None]:
    """Load TensorFlow's library and then Horovod's; None for one that is not there."""
    tensorflow = package_folder(python.path, "tensorflow")
    if tensorflow is None:
        return None, None
    horovod = horovod_library(python)
    said = ask([sys.executable, "-c", _LOAD, str(tensorflow), str(horovod or "")],
               limit_s=_LOAD_LIMIT_S)
    loaded = said.out.split()
    if "tensorflow" not in loaded:
        return LoadFacts(loads=False, detail=said.last_line), None
    first = LoadFacts(loads=True)
    if horovod is None:
        return first, None
    if "horovod" in loaded and said.code == 0:
        return first, LoadFacts(loads=True, detail=str(horovod))
    return first, LoadFacts(loads=False, detail=said.last_line)


def horovod_library(python: PythonFacts) -> Path | None:
    """Horovod's library for TensorFlow."""
    home = package_folder(python.path, "horovod")
    library = home / "tensorflow" / f"mpi_lib{python.ext_suffix}" if home else None
    return library if library is not None and library.is_file() else None


def look_at_mpi(python: PythonFacts) -> MpiFacts:
    """The mpirun that `hvdtrain launch` would take, and mpi4py."""
    mpi4py = None
    if "mpi4py" in python.packages:
        said = ask([sys.executable, "-c", _MPI4PY], limit_s=_IMPORT_LIMIT_S)
        detail = said.out.strip() if said.code == 0 else said.last_line
        mpi4py = LoadFacts(loads=said.code == 0, detail=detail)
    found = find_mpirun(str(Path(python.executable).parent))
    if found is None:
        return MpiFacts(mpi4py=mpi4py)
    return MpiFacts(path=found.path, flavour=found.flavour, version=found.version, mpi4py=mpi4py)


def look_at_cuda(python: PythonFacts) -> CudaFacts | None:
    """Where each library is that TensorFlow opens; None where it is no CUDA build."""
    tensorflow = package_folder(python.path, "tensorflow")
    file = tensorflow / "python" / "platform" / "build_info.py" if tensorflow else None
    if file is None or not file.is_file():
        return None
    built = build_info(file.read_text(encoding="utf-8"))
    if built.get("is_cuda_build") != "True":
        return None
    version, cudnn = built.get("cuda_version", "12"), built.get("cudnn_version", "9")
    wanted = wanted_libraries(version, cudnn)
    places = {name: in_wheels(name, python.path) for name in wanted}
    rest = [name for name, place in places.items() if not place]
    said = ask([sys.executable, "-c", _DLOPEN, *rest], limit_s=_IMPORT_LIMIT_S)
    places |= {name: "the system" for name in said.out.split() if name in rest}
    return CudaFacts(version=version, cudnn=cudnn, libraries=places)


def build_info(text: str) -> dict[str, str]:
    """The pairs in TensorFlow's `build_info.py`."""
    return {match[1]: match[2] or match[3] for match in re.finditer(
        r"""['"](\w+)['"]\s*[,:]\s*(?:['"]([^'"]*)['"]|(True|False))""", text)}


def wanted_libraries(cuda: str, cudnn: str) -> tuple[str, ...]:
    """The names of the libraries for a version of CUDA and of cuDNN."""
    major = _number(cuda, 12)
    names = _CUDA.get(major, _CUDA[max(_CUDA)] if major > max(_CUDA) else _CUDA[12])
    return (*names, f"libcudnn.so.{_number(cudnn, 9)}", "libnccl.so.2")


def in_wheels(name: str, path: Sequence[str]) -> str:
    """The library in one of NVIDIA's wheels, which TensorFlow finds by its run path."""
    for folder in path:
        for found in Path(folder).glob(f"nvidia/*/lib/{name}"):
            return str(found)
    return ""


def _number(version: str, default: int) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else default
