"""Edits: they fit the lines they were written for, and refuse any other source."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from hvdtrain.build_horovod.source import (
    SDIST_NAME,
    Edit,
    all_edits,
    apply_edits,
    get_sdist,
    read_edits,
    unpack,
)
from hvdtrain.build_horovod.toolchain import Cuda
from hvdtrain.errors import BuildError

TOP = """include(CheckLanguage)
check_language(CUDA)
# GPU Operations
macro(ADD_CUDA)
    find_package(CUDAToolkit REQUIRED)
    include_directories(SYSTEM ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
endmacro()
add_subdirectory(third_party/gloo)
"""
TENSORFLOW = """list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
"""
MPI_OPS = """// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU
  auto a = stream_executor::gpu::AsGpuStreamValue(context->stream());
  auto b = stream_executor::gpu::AsGpuStreamValue(context->stream());
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The lines of Horovod that the edits touch."""
    files = {
        "CMakeLists.txt": TOP, "horovod/tensorflow/CMakeLists.txt": TENSORFLOW,
        "horovod/tensorflow/mpi_ops.cc": MPI_OPS,
        "horovod/common/gloo/gloo_controller.cc": "  global_ranks_.reserve(size_);\n",
        "horovod/common/ops/cuda/CMakeLists.txt": "set(CMAKE_CUDA_STANDARD 11)\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_common_edits_change_what_they_name(source: Path) -> None:
    apply_edits(source, read_edits("common", "gloo", run_path="$ORIGIN/a;$ORIGIN/b"))
    top = (source / "CMakeLists.txt").read_text()
    assert 'set(CMAKE_INSTALL_RPATH "$ORIGIN/a;$ORIGIN/b")' in top
    assert "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)" in top
    assert "xla" not in (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    controller = (source / "horovod/common/gloo/gloo_controller.cc").read_text()
    assert controller == "  global_ranks_.assign(size_, 0);\n"


def test_without_gloo_its_files_are_left_alone(source: Path) -> None:
    apply_edits(source, read_edits("common", run_path="$ORIGIN"))
    assert "reserve" in (source / "horovod/common/gloo/gloo_controller.cc").read_text()


@pytest.mark.parametrize("edit", [
    *read_edits("common", "gloo", "stream", "runner", run_path="$ORIGIN"),
], ids=lambda edit: edit.name)
def test_edit_refuses_a_foreign_source(tmp_path: Path, edit: Edit) -> None:
    path = tmp_path / edit.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("something else\n")
    with pytest.raises(BuildError, match=f"The edit '{edit.name}' found nothing to change"):
        apply_edits(tmp_path, [edit])
    assert path.read_text() == "something else\n"


def test_edit_refuses_to_run_twice(source: Path) -> None:
    edits = read_edits("common", "gloo", run_path="$ORIGIN")
    apply_edits(source, edits)
    with pytest.raises(BuildError, match="found nothing to change"):
        apply_edits(source, edits)


def test_edit_refuses_a_missing_file(tmp_path: Path) -> None:
    edit = Edit(name="e", reason="r", file="absent.cc", pattern="a", replacement="b")
    with pytest.raises(BuildError, match=r"absent\.cc"):
        apply_edits(tmp_path, [edit])


def _cuda(home: Path | None) -> Cuda:
    return Cuda(nccl_include=Path("/n/include"), nccl_library=Path("/n/lib/libnccl.so.2"),
                nccl_version="2.32.3", major=12, home=home, archs="80",
                includes=(Path("/c/include"),), static_runtime=Path("/c/lib/libcudart_static.a"))


def _gpu_edits(cuda: Cuda) -> list[Edit]:
    """Those beside the edits of every build."""
    return all_edits([], gloo=True, cuda=cuda)[len(all_edits([], gloo=True, cuda=None)):]


def test_gpu_edits_without_nvcc(source: Path) -> None:
    cuda = _cuda(None)
    apply_edits(source, _gpu_edits(cuda), cuda=cuda)
    top = (source / "CMakeLists.txt").read_text()
    assert "check_language" not in top
    assert "CUDAToolkit" not in top
    assert '-Wl,--whole-archive "/c/lib/libcudart_static.a" -Wl,--no-whole-archive' in top
    ops = (source / "horovod/tensorflow/mpi_ops.cc").read_text()
    assert "AsGpuStreamValue" not in ops
    assert ops.count("HvdTrainGpuStream(context") == 2
    kernels = (source / "horovod/common/ops/cuda/CMakeLists.txt").read_text()
    assert "nokernels.cc" in kernels
    assert (source / "horovod/common/ops/cuda/nokernels.cc").is_file()


def test_gpu_edits_with_nvcc(source: Path) -> None:
    cuda = _cuda(Path("/cuda"))
    apply_edits(source, _gpu_edits(cuda), cuda=cuda)
    top = (source / "CMakeLists.txt").read_text()
    assert "check_language(CUDA)" in top
    assert '"${CUDA_cudart_static_LIBRARY}"' in top
    kernels = (source / "horovod/common/ops/cuda/CMakeLists.txt").read_text()
    assert kernels == "set(CMAKE_CUDA_STANDARD 17)\n"


def test_edits_have_names_and_reasons() -> None:
    edits = all_edits(["$ORIGIN"], gloo=True, cuda=_cuda(None))
    assert len({edit.name for edit in edits}) == len(edits)
    assert all(edit.reason for edit in edits)


def test_cached_archive_with_another_digest_is_deleted(tmp_path: Path) -> None:
    archive = tmp_path / SDIST_NAME
    archive.write_bytes(b"not Horovod")
    with pytest.raises(BuildError, match="was expected; it was deleted"):
        get_sdist(tmp_path, None, Path("python"), {})
    assert not archive.exists()


def test_given_archive_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"none\.tar\.gz does not exist"):
        get_sdist(tmp_path, tmp_path / "none.tar.gz", Path("python"), {})


def test_archive_of_something_else(tmp_path: Path) -> None:
    archive = tmp_path / "other.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo("other-1.0/setup.py")
        tar.addfile(info, io.BytesIO(b""))
    with pytest.raises(BuildError, match=r"holds no horovod-0\.28\.1"):
        unpack(archive, tmp_path / "out")
