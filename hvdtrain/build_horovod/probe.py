"""What the target environment holds: read from its metadata and files, TensorFlow not imported.

Reads `tensorflow/python/platform/build_info.py` as text. Importing TensorFlow only to ask for
its version was measured at 7 CPU seconds, and at 94 s from a cold disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.build_horovod.process import run
from hvdtrain.errors import BuildError, MachineError

TESTED_MINORS = ((2, 16), (2, 17), (2, 18), (2, 19), (2, 20), (2, 21))

_SCRIPT = r"""
import importlib.metadata as md, importlib.util, json, platform, sys, sysconfig
def folder(name):
    try: spec = importlib.util.find_spec(name)
    except ImportError: spec = None
    return next(iter(spec.submodule_search_locations or []), None) if spec else None
versions = {}
for dist in md.distributions():
    name = (dist.metadata["Name"] or "").lower().replace("_", "-")
    versions.setdefault(name, dist.version)
nvidia = ("nccl", "cuda_runtime", "cuda_nvcc", "cuda_cccl")
print("@@" + json.dumps(dict(
    soabi=sysconfig.get_config_var("SOABI"), machine=platform.machine(),
    libc="-".join(platform.libc_ver()), prefix=sys.prefix, versions=versions,
    **{k: sysconfig.get_path(k) for k in ("scripts", "platlib", "data")},
    tensorflow=folder("tensorflow"), nvidia={n: folder("nvidia." + n) for n in nvidia})))
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The environment that Horovod is built for."""

    python: Path
    soabi: str
    """E.g. `cpython-311-x86_64-linux-gnu`."""
    machine: str
    libc: str
    prefix: Path
    scripts: Path
    platlib: Path
    data: Path
    versions: Mapping[str, str]
    """Installed distributions: lower-case name with dashes to version."""
    tensorflow_dir: Path | None
    tensorflow_dist: str | None
    """Name of the distribution, e.g. `tensorflow-cpu`."""
    tensorflow: str | None
    """Version of TensorFlow."""
    tensorflow_gpu: bool
    cuda_version: str | None
    """The CUDA that TensorFlow was built with, e.g. `12.5.1`."""
    nvidia: Mapping[str, Path]
    """Folders of NVIDIA's wheels: `nccl`, `cuda_runtime`, `cuda_nvcc`, `cuda_cccl`."""


def probe_target(python: Path, environ: Mapping[str, str]) -> Target:
    """Ask an interpreter what is installed beside it.

    Raises:
        MachineError: The interpreter does not run.
    """
    done = run([python, "-c", _SCRIPT], env=environ, cwd=Path("/"), timeout_s=120)
    line = next((text for text in done.out.splitlines() if text.startswith("@@")), None)
    if done.code or line is None:
        raise MachineError(f"The interpreter {python} does not run: {done.text.strip()[-500:]}")
    return _target(python, json.loads(line[2:]))


def _target(python: Path, raw: dict[str, Any]) -> Target:
    versions: dict[str, str] = raw["versions"]
    dist = tensorflow_distribution(versions)
    directory = Path(raw["tensorflow"]) if raw["tensorflow"] else None
    info = read_build_info(directory) if directory else BuildInfo()
    return Target(
        python=python, soabi=raw["soabi"], machine=raw["machine"], libc=raw["libc"],
        prefix=Path(raw["prefix"]), scripts=Path(raw["scripts"]), platlib=Path(raw["platlib"]),
        data=Path(raw["data"]), versions=versions, tensorflow_dir=directory,
        tensorflow_dist=dist, tensorflow=versions.get(dist) if dist else None,
        tensorflow_gpu=info.is_cuda, cuda_version=info.cuda_version,
        nvidia={name: Path(path) for name, path in raw["nvidia"].items() if path})


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """What TensorFlow says about its own build."""

    is_cuda: bool = False
    cuda_version: str | None = None


def read_build_info(tensorflow_dir: Path) -> BuildInfo:
    """Read `build_info.py` of a TensorFlow as text; a missing file means a CPU build."""
    try:
        text = (tensorflow_dir / "python" / "platform" / "build_info.py").read_text()
    except OSError:
        return BuildInfo()
    version = re.search(r"'cuda_version'[,:]\s*'([\d.]+)'", text)
    return BuildInfo(is_cuda=bool(re.search(r"'is_cuda_build'[,:]\s*True", text)),
                     cuda_version=version.group(1) if version else None)


def tensorflow_distribution(versions: Mapping[str, str]) -> str | None:
    """The name of the installed distribution that holds TensorFlow."""
    known = ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws", "intel-tensorflow",
             "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
    return next((name for name in known if name in versions), None)


def check_tensorflow(target: Target, *, force: bool) -> None:
    """Refuse an environment without TensorFlow, or with one that was never tried.

    Raises:
        MachineError: No TensorFlow, or a path with a space in it.
        BuildError: A TensorFlow outside 2.16 to 2.21, without `force`.
    """
    first, last = (".".join(map(str, minor)) for minor in (TESTED_MINORS[0], TESTED_MINORS[-1]))
    if not target.tensorflow or target.tensorflow_dir is None:
        raise MachineError(
            f"TensorFlow is not installed for {target.python}, and Horovod is compiled against "
            "it. Install it first with: pip install 'hvdtrain[cpu]'   (or 'hvdtrain[gpu]')")
    match = re.match(r"(\d+)\.(\d+)", target.tensorflow)
    minor = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if minor not in TESTED_MINORS and not force:
        raise BuildError(
            f"TensorFlow {target.tensorflow} is installed, but this recipe was tried with "
            f"TensorFlow {first} to {last} only. Install one of these, or try it anyway with: "
            "hvdtrain build-horovod --force")


def check_path(target: Target) -> None:
    """Refuse to compile in an environment whose path has a space: CMake's MPI search breaks.

    Raises:
        MachineError: There is a space.
    """
    if re.search(r"\s", f"{target.prefix}{target.platlib}{target.python}"):
        raise MachineError(
            f"The path of the environment has a space in it ({target.prefix}), and CMake's "
            "search for MPI cannot build there. Build in an environment without a space that has "
            "the same TensorFlow and the same cache folder; the wheel then installs here, too.")
