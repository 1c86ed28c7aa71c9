"""`build_horovod`: the key, the cache, the checks, the compilation, the installation, the test."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from hvdtrain.build_horovod.options import HOROVOD_VERSION, RECIPE, BuildOptions
from hvdtrain.build_horovod.source import (
    all_edits,
    apply_edits,
    build_tools,
    find_installer,
    get_sdist,
    install_wheel,
    unpack,
)
from hvdtrain.build_horovod.toolchain import (
    Cuda,
    Mpi,
    Target,
    check_make,
    check_path,
    check_tensorflow,
    clean_environment,
    find_compiler,
    find_cuda,
    find_mpi,
    probe_target,
)
from hvdtrain.errors import BuildError, MachineError
from hvdtrain.hosts import Host, assign_ranks, rank_variables
from hvdtrain.log import get_logger
from hvdtrain.process import FinishedProgram, run_program
from hvdtrain.rendezvous.secret import JobKey, new_secret
from hvdtrain.rendezvous.serve import gloo_variables, listen_on_all, serve
from hvdtrain.whole_file import acquire, remove_leftovers, whole_file

# Standard headers that gcc 13 no longer includes by itself (horovod/horovod#3957).
_MISSING_INCLUDES = "-include stdexcept -include string -include cstdint"
_BACKEND = ("import os, sys; sys.path.insert(0, os.getcwd()); "
            "from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])")
_TENSORFLOW_LINES = "import tensorflow as tf; print('@@' + tf.__version__)"
_FIRST_ERRORS = (r": (?:fatal )?error[: ]|^CMake Error|undefined reference|cannot find -l"
                 r"|Could NOT find|Killed|No space left|out of memory|^[\w.]*Error: ")
_BYTES_PER_JOB = 1e9  # mpi_ops.cc was measured at 982 MB
RANK_PROGRAM = Path(__file__).with_name("selftest_rank.py")
_SELF_TEST_LIMIT_S = 300.0
_PASSED = "SELF-TEST OK "


@dataclass(frozen=True, kw_only=True)
class BuildKey:
    """What a wheel was built for: all that decides whether it fits, and nothing else.

    Not paths, the compiler or the number of jobs, since a wheel is relocatable and serves every
    environment with the same key.
    `tensorflow_build` is `cpu` or `gpu`: versions can be equal, but not symbols. `mpi` is as
    `openmpi-5`, `nccl` as `2.32`, `cuda` as `12`, or `none`; `variant` is of GPU builds.
    """

    tensorflow: str
    tensorflow_build: str
    soabi: str
    machine: str
    libc: str
    mpi: str
    gloo: bool
    nccl: str = "none"
    cuda: str = "none"
    variant: str = ""
    horovod: str = HOROVOD_VERSION
    recipe: int = RECIPE

    @property
    def tag(self) -> str:
        """The wheel's local version and the name of its folder in the cache."""
        fields = json.dumps(asdict(self), sort_keys=True)
        parts = (f"tf{self.tensorflow}", "" if self.mpi == "none" else self.mpi,
                 "gloo" if self.gloo else "",
                 "cpu" if self.nccl == "none" else f"nccl{self.nccl}.cu{self.cuda}",
                 f"r{self.recipe}", f"h{hashlib.sha256(fields.encode()).hexdigest()[:8]}")
        return re.sub(r"[^a-z0-9]+", ".", ".".join(parts).lower())

    def as_json(self) -> str:
        """The key with its tag, for `--key` and for `key.json` beside the wheel."""
        return json.dumps({**asdict(self), "tag": self.tag}, indent=1, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What `build_horovod` did."""

    wheel: Path
    tag: str
    cached: bool


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is built for which environment, before anything is done."""

    target: Target
    mpi: Mpi | None
    cuda: Cuda | None
    key: BuildKey


def plan_key(options: BuildOptions, environ: Mapping[str, str]) -> Recipe:
    """Look at the target environment and name the wheel that fits it, in half a second.

    MachineError if TensorFlow, the MPI, or NCCL and CUDA are missing; BuildError for an untested
    TensorFlow without `options.force`.
    """
    env = clean_environment(environ)
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
        nccl=".".join(cuda.nccl_version.split(".")[:2]) if cuda else "none",
        cuda=str(cuda.major) if cuda else "none", variant=cuda.variant if cuda else "")
    return Recipe(target=target, mpi=mpi, cuda=cuda, key=key)


def build_horovod(options: BuildOptions, environ: Mapping[str, str]) -> BuildResult:
    """Make a Horovod wheel for the installed TensorFlow, or take it from the cache.

    MachineError comes before any download; BuildError if a later step fails.
    """
    env = clean_environment(environ)
    recipe = plan_key(options, env)
    installer = find_installer(options.python, env) if options.install else None
    slot = options.cache / "wheels" / recipe.key.tag
    wheel = _wheel_in(slot, options)
    cached = wheel is not None
    if wheel is None:
        wheel, cached = _build_once(recipe, options, slot, env)
    if cached:
        get_logger().info("a wheel that fits is in the cache: %s", wheel)
    if installer:
        install_wheel(wheel, recipe.target, installer, env)
        get_logger().info("installed %s into %s", wheel.name, recipe.target.prefix)
        if options.self_test:
            self_test(recipe.target, mpi=recipe.mpi, gloo=options.gloo, environ=env)
    return BuildResult(wheel=wheel, tag=recipe.key.tag, cached=cached)


def _wheel_in(slot: Path, options: BuildOptions) -> Path | None:
    return None if options.force else min(slot.glob("horovod-*.whl"), default=None)


def _build_once(recipe: Recipe, options: BuildOptions, slot: Path,
                env: dict[str, str]) -> tuple[Path, bool]:
    """Check the machine, then compile; or take the wheel that another process made meanwhile."""
    compiler = find_compiler(env)
    check_make(env)
    check_path(recipe.target)
    slot.mkdir(parents=True, exist_ok=True)
    with slot.with_suffix(slot.suffix + ".lock").open("w") as lock:
        acquire(lock.fileno(), "another process is building this wheel")
        if made := _wheel_in(slot, options):
            return made, True
        check_import(recipe.target, env)
        tools = build_tools(recipe.target, options.cache, env)
        sdist = get_sdist(options.cache, options.sdist, recipe.target.python, env)
        if options.keep_build is not None:
            options.keep_build.mkdir(parents=True, exist_ok=True)
        with (nullcontext(options.keep_build) if options.keep_build is not None else
              TemporaryDirectory(prefix="hvdtrain-build-", ignore_cleanup_errors=True)) as folder:
            build = Path(folder).resolve()
            if re.search(r"\s", str(build)):
                raise MachineError(
                    f"The build folder {build} has a space in its path, and CMake's search for "
                    "MPI cannot build there. Set TMPDIR to another folder.")
            built = compile_wheel(
                recipe, options, sdist=sdist, build=build, log=slot / "build.log",
                env=build_environment(recipe, options, compiler, env | tools, build))
            wheel = slot / built.name
            remove_leftovers(slot, locked=True)
            with whole_file(wheel) as temporary:
                shutil.copyfile(built, temporary)
    (slot / "key.json").write_text(recipe.key.as_json() + "\n")
    get_logger().info("built %s (%.2f MB)", wheel, wheel.stat().st_size / 1e6)
    return wheel, False


def check_import(target: Target, env: Mapping[str, str]) -> None:
    """Import TensorFlow once as CMake will do it: it must work and print nothing."""
    done = run_program([target.python, "-c", _TENSORFLOW_LINES], env=env, cwd=Path("/"),
                       limit_s=600)
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


def run_path(target: Target, mpi: Mpi | None, cuda: Cuda | None) -> list[str]:
    """Folders in which the installed library looks for others, relative to its own."""
    folder = target.platlib / "horovod" / "tensorflow"
    paths = ["$ORIGIN/../../tensorflow", "$ORIGIN/../../../..", "$ORIGIN/../../../../../lib"]
    if mpi and mpi.library_dir:
        own = f"$ORIGIN/{os.path.relpath(mpi.library_dir, folder)}"
        paths += [own] if own not in paths else []
    elif mpi:
        prefix = mpi.mpicxx.resolve().parents[1]
        paths.append(str(next((prefix / name for name in ("lib", "lib64") if any(
            (prefix / name).glob("libmpi*.so*"))), prefix / "lib")))
    if cuda:
        paths += ["$ORIGIN/../../nvidia/nccl/lib", "$ORIGIN/../../nvidia/cuda_runtime/lib"]
    return paths


def build_environment(recipe: Recipe, options: BuildOptions, compiler: Path,
                      environ: Mapping[str, str], build: Path) -> dict[str, str]:
    """The environment of a compilation in the folder `build`."""
    import psutil
    mpi, path = recipe.mpi, environ.get("PATH", "")
    if mpi:
        path = f"{mpi.mpicxx.parent}:{path}"
    jobs = max(1, min(len(os.sched_getaffinity(0)),
                      int(psutil.virtual_memory().available / _BYTES_PER_JOB)))
    flags = f"{environ.get('CXXFLAGS', '')} {_MISSING_INCLUDES} -ffile-prefix-map={build}/="
    env = {
        **environ, "PATH": path, "CXX": str(compiler), "CXXFLAGS": flags.strip(),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the old gloo without it
        "MAKEFLAGS": f"-j{options.jobs or jobs}",
        "HOROVOD_LOCAL_VERSION": recipe.key.tag,
        "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO" if options.gloo else "HOROVOD_WITHOUT_GLOO": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": "1",
    }
    if mpi:
        env["MPI_HOME"] = str(mpi.mpicxx.parent.parent)
    if recipe.cuda:
        env |= gpu_environment(recipe.cuda, build, path=path, compiler=compiler)
    return env


def gpu_environment(cuda: Cuda, build: Path, *, path: str, compiler: Path) -> dict[str, str]:
    """The variables of a GPU build; links NCCL below `build` under the name CMake expects."""
    links = build / "nccl-link"
    links.mkdir(exist_ok=True)
    link = links / "libnccl.so"
    link.unlink(missing_ok=True)
    link.symlink_to(cuda.nccl_library)
    env = {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL",
           "HOROVOD_NCCL_INCLUDE": str(cuda.nccl_include), "HOROVOD_NCCL_LIB": str(links),
           "HOROVOD_NCCL_LINK": "SHARED"}
    if cuda.home:
        home = str(cuda.home)
        env |= {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home, "CUDAToolkit_ROOT": home,
                "PATH": f"{cuda.home / 'bin'}:{path}", "CUDAHOSTCXX": str(compiler),
                "HOROVOD_BUILD_CUDA_CC_LIST": cuda.archs}
    return env


def compile_wheel(recipe: Recipe, options: BuildOptions, *, sdist: Path, build: Path, log: Path,
                  env: Mapping[str, str]) -> Path:
    """Unpack, edit and compile in the folder `build`; returns the wheel."""
    source = unpack(sdist, build)
    paths = run_path(recipe.target, recipe.mpi, recipe.cuda)
    apply_edits(source, all_edits(paths, gloo=options.gloo, cuda=recipe.cuda), cuda=recipe.cuda)
    out = build / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    get_logger().info("compiling with %s, %s; about 110 CPU seconds; log: %s", env["CXX"],
                      env["MAKEFLAGS"], log)
    start = time.monotonic()
    with log.open("w") as stream:
        code = subprocess.run(
            [str(recipe.target.python), "-c", _BACKEND, str(out)], env=dict(env), cwd=source,
            stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            check=False).returncode
    wheels = sorted(out.glob("*.whl"))
    if code or not wheels:
        raise BuildError(failure_text(log, time.monotonic() - start))
    get_logger().info("compiled in %.0f s", time.monotonic() - start)
    return wheels[0]


def failure_text(log: Path, seconds: float) -> str:
    """The message of a failed compilation: the first real errors and the path of the log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.strip()[:300] for line in lines if re.search(_FIRST_ERRORS, line)][:8]
    shown = "\n".join(f"  {line}" for line in errors or lines[-8:])
    text = f"The build of Horovod failed after {seconds:.0f} s. The first errors:\n{shown}\n"
    if any("Killed" in line for line in errors):
        text += ("The machine probably ran out of memory (1 GB for each parallel compiler). "
                 "Try again with: --jobs 1\n")
    return text + f"Full log: {log}"


def self_test(target: Target, *, mpi: Mpi | None, gloo: bool,
              environ: Mapping[str, str]) -> None:
    """Two ranks in the target environment, over each collective that was built, check values."""
    env = {**environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    command = [str(target.python), "-P", str(RANK_PROGRAM)]
    if gloo:
        _judge("gloo", run_gloo_ranks(command, env=env))
    if mpi:
        options = ["-np", "2"]
        if mpi.kind == "openmpi":
            options += ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
        env = {"HOME": gettempdir(), **env, "HOROVOD_CONTROLLER": "mpi",
               "HOROVOD_CPU_OPERATIONS": "mpi", "OMPI_MCA_mpi_yield_when_idle": "1"}
        _judge("mpi", [run_program([mpi.mpirun, *options, *command], env=env,
                                   limit_s=_SELF_TEST_LIMIT_S)])


def _judge(name: str, ranks: Sequence[FinishedProgram]) -> None:
    passed = [line.removeprefix(_PASSED) for rank in ranks for line in rank.out.splitlines()
              if line.startswith(_PASSED)]
    if any(rank.code for rank in ranks) or not passed:
        said = "\n".join(f"  rank {index}: exit code {rank.code}: "
                         f"{' | '.join(rank.text.strip().splitlines()[-4:])}"
                         for index, rank in enumerate(ranks))
        raise BuildError(
            f"Horovod was built and installed, but its self-test over {name} failed:\n{said}\n"
            "Build it anew with: hvdtrain build-horovod --force --install")
    get_logger().info("self-test over %s: 2 ranks, values as expected (%s)", name, passed[0])


def run_gloo_ranks(command: Sequence[str], *, env: Mapping[str, str],
                   limit_s: float = _SELF_TEST_LIMIT_S) -> list[FinishedProgram]:
    """Two ranks of a command on this host over Gloo; code 124 for one killed after `limit_s`."""
    key = JobKey(new_secret())
    server = serve(listen_on_all(["127.0.0.1"]), hosts=["localhost"], slots=[2], key=key)
    shared = {**env, **gloo_variables(address="127.0.0.1", port=server.port, interface="lo",
                                      key=key)}
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(
                lambda slot: run_program(
                    command, env={**shared, **rank_variables(slot, 2)}, limit_s=limit_s),
                assign_ranks((Host("localhost", 2),), 2)))
    finally:
        server.close()
