"""`build_horovod`: the key, the cache, the checks, the compilation, the installation, the test."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.compile import Plan, check_import, compile_wheel
from hvdtrain.build_horovod.cuda import Cuda, find_cuda
from hvdtrain.build_horovod.key import BuildKey
from hvdtrain.build_horovod.options import BuildOptions, BuildResult
from hvdtrain.build_horovod.probe import Target, check_path, check_tensorflow, probe_target
from hvdtrain.build_horovod.process import clean_environment
from hvdtrain.build_horovod.selftest import self_test
from hvdtrain.build_horovod.source import get_sdist
from hvdtrain.build_horovod.toolchain import Mpi, check_make, find_compiler, find_mpi
from hvdtrain.build_horovod.tools import build_tools, find_installer, install_wheel
from hvdtrain.errors import MachineError
from hvdtrain.log import get_logger
from hvdtrain.whole_file import remove_leftovers, whole_file


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is built for whom, before anything was done."""

    target: Target
    mpi: Mpi | None
    cuda: Cuda | None
    key: BuildKey


def plan_key(options: BuildOptions, *, environ: Mapping[str, str] | None = None) -> Recipe:
    """Look at the target environment and name the wheel that fits it. Half a second.

    Raises:
        MachineError: TensorFlow, the MPI, or NCCL and CUDA are missing.
        BuildError: TensorFlow is a version that was never tried, without `options.force`.
    """
    env = clean_environment(os.environ if environ is None else environ)
    target = probe_target(options.python, env)
    check_tensorflow(target, force=options.force)
    gpu = target.tensorflow_gpu if options.gpu is None else options.gpu
    if gpu and not target.tensorflow_gpu:
        raise MachineError(
            f"--gpu was asked for, but TensorFlow {target.tensorflow} "
            f"({target.tensorflow_dist}) is a CPU build, and a GPU Horovod does not load in it. "
            "Install a GPU build with: pip install 'hvdtrain[gpu]'")
    mpi = find_mpi(target, wanted=options.mpi, environ=env)
    cuda = find_cuda(target, options, env) if gpu else None
    key = BuildKey(
        tensorflow=target.tensorflow or "", soabi=target.soabi, machine=target.machine,
        tensorflow_build="gpu" if target.tensorflow_gpu else "cpu", libc=target.libc,
        mpi=mpi.label if mpi else "none", gloo=options.gloo,
        nccl=".".join(cuda.nccl.version.split(".")[:2]) if cuda else "none",
        cuda=str(cuda.major) if cuda else "none", variant=cuda.variant if cuda else "")
    return Recipe(target=target, mpi=mpi, cuda=cuda, key=key)


def build_horovod(options: BuildOptions, *,
                  environ: Mapping[str, str] | None = None) -> BuildResult:
    """Make a Horovod wheel for the TensorFlow that is installed, or take it from the cache.

    Args:
        options: `BuildOptions`.
        environ: Mapping, the environment variables; None: those of this process.

    Returns:
        `BuildResult`.

    Raises:
        MachineError: The machine lacks something; nothing was downloaded yet.
        BuildError: Download, edit, compilation, installation or self-test failed.
    """
    start = time.monotonic()
    env = clean_environment(os.environ if environ is None else environ)
    recipe = plan_key(options, environ=env)
    installer = find_installer(options.python, env) if options.install else None
    slot = options.cache / "wheels" / recipe.key.tag
    wheel = None if options.force else _wheel_in(slot)
    cached = wheel is not None
    if wheel is None:
        wheel, cached = _build_once(recipe, options, slot, env)
    if cached:
        get_logger().info("a wheel that fits is in the cache: %s", wheel)
    tested: tuple[str, ...] = ()
    if installer:
        install_wheel(wheel, recipe.target, installer, env)
        get_logger().info("installed %s into %s", wheel.name, recipe.target.prefix)
        if options.self_test:
            tested = self_test(recipe.target, mpi=recipe.mpi, gloo=options.gloo, environ=env)
    return BuildResult(wheel=wheel, tag=recipe.key.tag, cached=cached, installed=options.install,
                       tested=tested, seconds=time.monotonic() - start)


def _wheel_in(slot: Path) -> Path | None:
    return next(iter(sorted(slot.glob("horovod-*.whl"))), None)


def _build_once(recipe: Recipe, options: BuildOptions, slot: Path,
                env: dict[str, str]) -> tuple[Path, bool]:
    """Check the machine, then compile under a lock: of many processes, one compiles.

    Returns the wheel, and whether another process had made it meanwhile.
    """
    compiler = find_compiler(env)
    check_make(env)
    check_path(recipe.target)
    options.cache.mkdir(parents=True, exist_ok=True)
    slot.mkdir(parents=True, exist_ok=True)
    with _lock(slot.with_suffix(slot.suffix + ".lock")):
        made = None if options.force else _wheel_in(slot)
        if made is not None:
            return made, True
        check_import(recipe.target, env)
        plan = Plan(target=recipe.target, key=recipe.key, compiler=compiler, mpi=recipe.mpi,
                    cuda=recipe.cuda, tools=build_tools(recipe.target, options.cache, env),
                    sdist=get_sdist(options.cache, options.sdist, recipe.target.python, env),
                    options=options)
        return _compile(plan, slot, env), False


def _compile(plan: Plan, slot: Path, env: dict[str, str]) -> Path:
    log = slot / "build.log"
    with _build_folder(plan.options.keep_build) as build:
        made = compile_wheel(plan, build=build, log=log, environ=env)
        wheel = slot / made.name
        remove_leftovers(slot, locked=True)
        with whole_file(wheel) as temporary:
            shutil.copyfile(made, temporary)
    (slot / "key.json").write_text(plan.key.as_json() + "\n")
    get_logger().info("built %s (%.2f MB)", wheel, wheel.stat().st_size / 1e6)
    return wheel


@contextmanager
def _build_folder(keep: Path | None) -> Iterator[Path]:
    """A folder without a space in its path; removed afterwards unless it is the user's."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        folder = keep.resolve()
    else:
        folder = Path(tempfile.mkdtemp(prefix="hvdtrain-build-")).resolve()
    try:
        if re.search(r"\s", str(folder)):
            raise MachineError(f"The build folder {folder} has a space in its path, and CMake's "
                               "search for MPI cannot build there. Set TMPDIR to another folder.")
        yield folder
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock file; the lock ends with the process that holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("another process is building this wheel; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


