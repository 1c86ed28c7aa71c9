"""The edits and the settings of a GPU build."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.build_horovod.cuda import Cuda
from hvdtrain.build_horovod.source import Edit, apply_edits

KERNELS_WITHOUT_NVCC = r"""// Written for hvdtrain: Horovod's CUDA helpers without device code.
#include "cuda_kernels.h"
#include <stdexcept>
#include <string>
namespace horovod {
namespace common {
namespace {
void Check(cudaError_t code, const char* what) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}
void Refuse(double factor) {
  if (factor != 1.0)
    throw std::logic_error(
        "This Horovod was built without nvcc: scaling factors (gradient_predivide_factor, "
        "prescale, postscale) do not work on GPU tensors. Scale in TensorFlow instead.");
}
} // namespace
void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int count, cudaStream_t stream) {
  for (int i = 0; i < count; ++i)
    Check(cudaMemcpyAsync(params.out[i], params.in[i], params.sizes[i],
                          cudaMemcpyDeviceToDevice, stream), "fused copy");
}
void ScaleBufferCudaImpl(const void*, void*, const int64_t, double factor, DataType,
                         cudaStream_t) {
  Refuse(factor);
}
void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams& params, int count, double factor, DataType,
                                    cudaStream_t stream) {
  Refuse(factor);
  BatchedD2DMemcpyCudaImpl(params, count, stream);
}
} // namespace common
} // namespace horovod
"""

_KERNEL_TARGETS = """add_library(horovod_cuda_kernels STATIC nokernels.cc)
add_library(compatible_horovod_cuda_kernels STATIC nokernels.cc)
target_compile_definitions(horovod_cuda_kernels PRIVATE _GLIBCXX_USE_CXX11_ABI=1)
target_compile_definitions(compatible_horovod_cuda_kernels PRIVATE _GLIBCXX_USE_CXX11_ABI=0)
"""

_STREAM_HANDLE = """#endif // TENSORFLOW_VERSION >= 2011000000
static inline GpuStreamHandle HvdTrainGpuStream(stream_executor::Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
"""

_KERNEL_FOLDER = "horovod/common/ops/cuda"
_TOOLKIT_INCLUDES = r"include_directories\(SYSTEM \$\{CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES\}\)"

STREAM_EDITS = (
    Edit(name="stream-declaration",
         reason="TensorFlow 2.21 no longer exports AsGpuStreamValue; it links, then fails to load",
         file="horovod/tensorflow/mpi_ops.cc",
         pattern=r"// Forward declaration of AsGpuStreamValue\n(?:.*\n){5}", replacement=""),
    Edit(name="stream-handle", reason="the public handle instead, there since TensorFlow 2.15",
         file="horovod/tensorflow/mpi_ops.cc",
         pattern=r"#endif // TENSORFLOW_VERSION >= 2011000000\n(?=#endif // HAVE_GPU)",
         replacement=_STREAM_HANDLE),
    Edit(name="stream-calls", reason="as above", every=True,
         file="horovod/tensorflow/mpi_ops.cc",
         pattern=r"stream_executor::gpu::AsGpuStreamValue\(", replacement="HvdTrainGpuStream("),
)


def _runtime_first(library: str) -> str:
    return (f'list(APPEND LINKER_LIBS -Wl,--whole-archive "{library}" -Wl,--no-whole-archive '
            "rt dl pthread)")


def gpu_edits(cuda: Cuda) -> tuple[Edit, ...]:
    """The edits beside those of every build."""
    if cuda.home:
        return (
            *STREAM_EDITS,
            Edit(name="cuda-standard", reason="the host compiler's headers need C++17 (gcc 14)",
                 file=f"{_KERNEL_FOLDER}/CMakeLists.txt",
                 pattern=r"set\(CMAKE_CUDA_STANDARD 11\)",
                 replacement="set(CMAKE_CUDA_STANDARD 17)"),
            Edit(name="static-runtime-first",
                 reason="TensorFlow's stubs of the CUDA runtime must not win",
                 file="CMakeLists.txt", pattern=_TOOLKIT_INCLUDES,
                 replacement="include_directories(SYSTEM "
                 "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})\n    "
                 + _runtime_first("${CUDA_cudart_static_LIBRARY}")),
        )
    includes = " ".join(f'"{folder}"' for folder in cuda.includes)
    return (
        *STREAM_EDITS,
        Edit(name="kernels-without-nvcc", reason="no CUDA compiler",
             file=f"{_KERNEL_FOLDER}/CMakeLists.txt", pattern=r"\A[\s\S]*\Z",
             replacement=_KERNEL_TARGETS),
        Edit(name="no-cuda-language", reason="no CUDA compiler", file="CMakeLists.txt",
             pattern=r"include\(CheckLanguage\)\n[\s\S]*?(?=macro\(ADD_CUDA\))", replacement="\n"),
        Edit(name="static-runtime-first",
             reason="headers and runtime of NVIDIA's wheels; TensorFlow's stubs must not win",
             file="CMakeLists.txt",
             pattern=r"find_package\(CUDAToolkit REQUIRED\)\n\s*" + _TOOLKIT_INCLUDES,
             replacement=f"include_directories(SYSTEM {includes})\n    "
             + _runtime_first(str(cuda.static_runtime))),
    )


def edit_gpu_source(source: Path, cuda: Cuda) -> None:
    """Apply the GPU edits to the unpacked source; see `hvdtrain.build_horovod.source`."""
    if cuda.home is None:
        (source / _KERNEL_FOLDER / "nokernels.cc").write_text(KERNELS_WITHOUT_NVCC)
    apply_edits(source, gpu_edits(cuda))


def gpu_environment(cuda: Cuda, build: Path, *, path: str, compiler: Path) -> dict[str, str]:
    """The variables of a GPU build; links NCCL below `build` under the name CMake wants."""
    links = build / "nccl-link"
    links.mkdir(exist_ok=True)
    link = links / "libnccl.so"
    link.unlink(missing_ok=True)
    link.symlink_to(cuda.nccl.library)
    env = {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL",
           "HOROVOD_NCCL_INCLUDE": str(cuda.nccl.include), "HOROVOD_NCCL_LIB": str(links),
           "HOROVOD_NCCL_LINK": "SHARED"}
    if cuda.home:
        home = str(cuda.home)
        env |= {"HOROVOD_CUDA_HOME": home, "CUDA_HOME": home, "CUDAToolkit_ROOT": home,
                "PATH": f"{cuda.home / 'bin'}:{path}", "CUDAHOSTCXX": str(compiler),
                "HOROVOD_BUILD_CUDA_CC_LIST": cuda.archs}
    return env
