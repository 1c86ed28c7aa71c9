// Written for hvdtrain: Horovod's CUDA helpers without device code.
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
