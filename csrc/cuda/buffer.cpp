#include "cuda/buffer.h"

#include "cuda/check.h"
#include "cuda/stream.h"

namespace fastdist::cuda {

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  FASTDIST_CUDA_CHECK(cudaMalloc(&data, bytes));
  data_ = static_cast<std::byte*>(data);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  auto mode = cudaStreamCaptureModeRelaxed;  // do not invalidate another thread's capture
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  (void)cudaFree(data_);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace fastdist::cuda
