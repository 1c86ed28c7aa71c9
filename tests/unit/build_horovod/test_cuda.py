"""The choice between the two GPU recipes, on fabricated toolkits and wheels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.build_horovod.build import gpu_environment
from hvdtrain.build_horovod.options import BuildOptions
from hvdtrain.build_horovod.toolchain import Target, find_cuda
from hvdtrain.errors import MachineError

NCCL_HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n"


def _file(path: Path, text: str = "", *, program: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if program:
        path.chmod(0o755)
    return path


def _toolkit(home: Path, release: str) -> Path:
    _file(home / "bin" / "nvcc", f"#!/bin/sh\necho 'tools, release {release}, V'\n", program=True)
    return home


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """NVIDIA's wheels as `tensorflow[and-cuda]` brings them."""
    root = tmp_path / "nvidia"
    _file(root / "nccl" / "include" / "nccl.h", NCCL_HEADER)
    _file(root / "nccl" / "lib" / "libnccl.so.2")
    _file(root / "cuda_runtime" / "lib" / "libcudart_static.a")
    return {name: root / name for name in ("nccl", "cuda_runtime")}


@pytest.fixture
def gpu_target(make_target: Callable[..., Target], tmp_path: Path,
               wheels: dict[str, Path]) -> Target:
    """A GPU TensorFlow of CUDA 12 that ships CCCL's header."""
    tensorflow = tmp_path / "tensorflow"
    _file(tensorflow / "include/external/cuda_cccl/libcudacxx/include/nv/target")
    return make_target(tensorflow_gpu=True, cuda_version="12.5.1", nvidia=wheels,
                       tensorflow_dir=tensorflow)


def _options(tmp_path: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(python=Path("python"), cache=tmp_path, **changes)


def test_without_a_compiler_the_wheels_serve(gpu_target: Target, tmp_path: Path) -> None:
    cuda = find_cuda(gpu_target, _options(tmp_path, no_nvcc=True), {"PATH": ""})
    assert (cuda.home, cuda.variant, cuda.major) == (None, "nonvcc", 12)
    assert cuda.nccl_version == "2.32.3"
    assert any((folder / "nv" / "target").exists() for folder in cuda.includes)


def test_toolkit_of_the_same_major_is_used(gpu_target: Target, tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda-12.4", "12.4")
    cuda = find_cuda(gpu_target, _options(tmp_path), {"CUDA_HOME": str(home), "PATH": ""})
    assert (cuda.home, cuda.archs) == (home, "70,75,80,86,89,90")


def test_toolkit_of_another_major_is_passed_over(gpu_target: Target, tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda-11.8", "11.8")
    other = _toolkit(tmp_path / "cuda-12.8", "12.8")
    env = {"CUDA_HOME": str(home), "CUDA_PATH": str(other), "PATH": ""}
    assert find_cuda(gpu_target, _options(tmp_path), env).home == other


def test_given_toolkit_of_another_major_is_refused(gpu_target: Target, tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda-13.0", "13.0")
    with pytest.raises(MachineError, match=r"has nvcc 13\.0, but this TensorFlow uses CUDA 12"):
        find_cuda(gpu_target, _options(tmp_path, cuda_home=home), {"PATH": ""})


def test_missing_nccl(make_target: Callable[..., Target], tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="pip install nvidia-nccl-cu12"):
        find_cuda(make_target(), _options(tmp_path), {})


def test_missing_cccl(gpu_target: Target, tmp_path: Path,
                      make_target: Callable[..., Target]) -> None:
    target = make_target(nvidia=gpu_target.nvidia, tensorflow_dir=tmp_path / "absent")
    with pytest.raises(MachineError, match="pip install nvidia-cuda-cccl-cu12"):
        find_cuda(target, _options(tmp_path, no_nvcc=True), {})


@pytest.mark.parametrize(("release", "archs"), [
    ("12.4", "70,75,80,86,89,90"), ("12.8", "70,75,80,86,89,90,100,120"),
    ("13.0", "75,80,86,89,90,100,120")])
def test_architectures_follow_the_compiler(
        make_target: Callable[..., Target], tmp_path: Path, wheels: dict[str, Path],
        release: str, archs: str) -> None:
    home = _toolkit(tmp_path / "cuda", release)
    target = make_target(tensorflow_gpu=True, cuda_version=release, nvidia=wheels)
    assert find_cuda(target, _options(tmp_path, cuda_home=home), {"PATH": ""}).archs == archs


def test_environment_links_nccl_under_the_name_that_cmake_wants(
        gpu_target: Target, tmp_path: Path) -> None:
    cuda = find_cuda(gpu_target, _options(tmp_path, no_nvcc=True), {"PATH": ""})
    env = gpu_environment(cuda, tmp_path, path="/usr/bin", compiler=Path("/usr/bin/g++"))
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert (Path(env["HOROVOD_NCCL_LIB"]) / "libnccl.so").resolve() == cuda.nccl_library
    assert "CUDA_HOME" not in env
