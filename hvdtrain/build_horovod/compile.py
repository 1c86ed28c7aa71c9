"""Compiles the edited source to a wheel, and says what went wrong from the log."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.cuda import Cuda
from hvdtrain.build_horovod.gpu_source import edit_gpu_source, gpu_environment
from hvdtrain.build_horovod.key import BuildKey
from hvdtrain.build_horovod.options import BuildOptions, automatic_jobs
from hvdtrain.build_horovod.probe import Target
from hvdtrain.build_horovod.process import run, run_to_log
from hvdtrain.build_horovod.runner_source import RUNNER_EDITS
from hvdtrain.build_horovod.source import apply_edits, common_edits, unpack
from hvdtrain.build_horovod.toolchain import Compiler, Mpi
from hvdtrain.build_horovod.tools import BuildTools
from hvdtrain.errors import BuildError, MachineError
from hvdtrain.log import get_logger

# Standard headers that gcc 13 no longer includes by itself (horovod/horovod#3957).
MISSING_INCLUDES = "-include stdexcept -include string -include cstdint"

_BACKEND = ("import os, sys; sys.path.insert(0, os.getcwd()); "
            "from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])")
_TENSORFLOW_LINES = "import tensorflow as tf; print('@@' + tf.__version__)"
_FIRST_ERRORS = (r": (?:fatal )?error[: ]|^CMake Error|undefined reference|cannot find -l"
                 r"|Could NOT find|Killed|No space left|out of memory|^[\w.]*Error: ")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that one compilation uses."""

    target: Target
    key: BuildKey
    compiler: Compiler
    mpi: Mpi | None
    cuda: Cuda | None
    tools: BuildTools
    sdist: Path
    options: BuildOptions


def run_path(target: Target, mpi: Mpi | None, cuda: Cuda | None) -> list[str]:
    """Where the installed library looks for others, relative to its own folder."""
    folder = target.platlib / "horovod" / "tensorflow"
    paths = ["$ORIGIN/../../tensorflow", "$ORIGIN/../../../..", "$ORIGIN/../../../../../lib"]
    if mpi and mpi.library_dir:
        own = f"$ORIGIN/{os.path.relpath(mpi.library_dir, folder)}"
        paths += [own] if own not in paths else []
    elif mpi:
        paths.append(str(_system_library_dir(mpi)))
    if cuda:
        paths += ["$ORIGIN/../../nvidia/nccl/lib", "$ORIGIN/../../nvidia/cuda_runtime/lib"]
    return paths


def _system_library_dir(mpi: Mpi) -> Path:
    prefix = mpi.mpicxx.resolve().parents[1]
    return next((prefix / name for name in ("lib", "lib64") if any(
        (prefix / name).glob("libmpi*.so*"))), prefix / "lib")


def build_environment(plan: Plan, environ: Mapping[str, str], build: Path) -> dict[str, str]:
    """The environment of the compilation."""
    path = environ.get("PATH", "")
    if plan.mpi:
        path = f"{plan.mpi.mpicxx.parent}:{path}"
    flags = f"{environ.get('CXXFLAGS', '')} {MISSING_INCLUDES} -ffile-prefix-map={build}/=".strip()
    env = {
        **environ, "PATH": path, "CXX": str(plan.compiler.path), "CXXFLAGS": flags,
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the old gloo without it
        "MAKEFLAGS": f"-j{plan.options.jobs or automatic_jobs()}",
        "HOROVOD_CMAKE": str(plan.tools.cmake), "HOROVOD_LOCAL_VERSION": plan.key.tag,
        "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_WITH_MPI" if plan.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO" if plan.options.gloo else "HOROVOD_WITHOUT_GLOO": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": "1",
    }
    if plan.mpi:
        env["MPI_HOME"] = str(plan.mpi.mpicxx.parent.parent)
    if plan.tools.python_path:
        env["PYTHONPATH"] = str(plan.tools.python_path)
    if plan.cuda:
        env |= gpu_environment(plan.cuda, build, path=env["PATH"], compiler=plan.compiler.path)
    return env


def check_import(target: Target, env: Mapping[str, str]) -> None:
    """Import TensorFlow once as CMake will do it: it must work and print nothing.

    Raises:
        MachineError: It does not.
    """
    done = run([target.python, "-c", _TENSORFLOW_LINES], env=env, cwd=Path("/"), timeout_s=600)
    lines = done.out.splitlines()
    if done.code:
        raise MachineError(f"TensorFlow cannot be imported with {target.python}: "
                           f"{done.text.strip()[-500:]}")
    if len(lines) != 1:
        extra = next((line for line in lines if not line.startswith("@@")), "")
        raise MachineError(
            f"Something prints on standard output while TensorFlow is imported ({extra!r}), and "
            "Horovod's build reads TensorFlow's version there. Silence it: look at "
            "sitecustomize.py, .pth files and TensorFlow plugins of the environment.")


def compile_wheel(plan: Plan, *, build: Path, log: Path, environ: Mapping[str, str]) -> Path:
    """Unpack, edit and compile in the folder `build`; returns the wheel.

    Raises:
        BuildError: An edit does not fit, or the compilation fails.
    """
    source = unpack(plan.sdist, build)
    apply_edits(source, common_edits(run_path(plan.target, plan.mpi, plan.cuda),
                                     gloo=plan.options.gloo))
    apply_edits(source, RUNNER_EDITS)
    if plan.cuda:
        edit_gpu_source(source, plan.cuda)
    out = build / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    env = build_environment(plan, environ, build)
    get_logger().info("compiling with %s %s, %s; about 110 CPU seconds; log: %s",
                      plan.compiler.path, plan.compiler.version, env["MAKEFLAGS"], log)
    start = time.monotonic()
    code = run_to_log([plan.target.python, "-c", _BACKEND, out], env=env, cwd=source, log=log)
    wheels = sorted(out.glob("*.whl"))
    if code or not wheels:
        raise BuildError(failure_text(log, time.monotonic() - start))
    get_logger().info("compiled in %.0f s", time.monotonic() - start)
    return wheels[0]


def failure_text(log: Path, seconds: float) -> str:
    """What a failed compilation tells the user: the first real errors and where the log is."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.strip()[:300] for line in lines if re.search(_FIRST_ERRORS, line)][:8]
    shown = "\n".join(f"  {line}" for line in errors or lines[-8:])
    text = f"The build of Horovod failed after {seconds:.0f} s. The first errors:\n{shown}\n"
    if any("Killed" in line for line in errors):
        text += ("The machine probably ran out of memory (1 GB for each parallel compiler). "
                 "Try again with: --jobs 1\n")
    return text + f"Full log: {log}"
