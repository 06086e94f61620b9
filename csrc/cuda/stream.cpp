#include "cuda/stream.h"

#include "cuda/check.h"
#include "cuda/driver.h"

namespace fastdist::cuda {

void make_current(int device) { FASTDIST_CUDA_CHECK(cudaSetDevice(device)); }

DeviceGuard::DeviceGuard(int device) {
  int current = 0;
  FASTDIST_CUDA_CHECK(cudaGetDevice(&current));
  is_pushed_ = current != device;
  if (is_pushed_) push_context(device);
}

DeviceGuard::~DeviceGuard() {
  if (is_pushed_) pop_context();
}

RelaxedCapture::RelaxedCapture() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  FASTDIST_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  previous_ = static_cast<int>(mode);
}

RelaxedCapture::~RelaxedCapture() {
  auto mode = static_cast<cudaStreamCaptureMode>(previous_);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

Event::Event() {
  cudaEvent_t event = nullptr;
  FASTDIST_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  event_.reset(event);
}

// CUDA frees the event only once the device is done with it, so pending waits stay valid.
void Destroy::operator()(CUevent_st* event) const noexcept { (void)cudaEventDestroy(event); }

void Event::record(StreamHandle stream) const {
  FASTDIST_CUDA_CHECK(cudaEventRecord(event_.get(), stream));
}

void Event::make_wait(StreamHandle stream) const {
  FASTDIST_CUDA_CHECK(cudaStreamWaitEvent(stream, event_.get(), 0));
}

bool Event::is_done() const {
  const RelaxedCapture relaxed;  // a query must not invalidate a capture of any thread
  const cudaError_t error = cudaEventQuery(event_.get());
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(error, "cudaEventQuery");
  return true;
}

void Event::synchronize() const {
  const RelaxedCapture relaxed;
  FASTDIST_CUDA_CHECK(cudaEventSynchronize(event_.get()));
}

Stream::Stream() {
  // The highest priority: other streams' work waits for the result.
  int least = 0;
  int greatest = 0;
  FASTDIST_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  StreamHandle stream = nullptr;
  FASTDIST_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  stream_.reset(stream);
}

void Destroy::operator()(StreamHandle stream) const noexcept { (void)cudaStreamDestroy(stream); }

DeviceBuffer::DeviceBuffer(std::size_t bytes) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  FASTDIST_CUDA_CHECK(cudaMalloc(&data, bytes));
  data_.reset(static_cast<std::byte*>(data));
}

void Destroy::operator()(std::byte* memory) const noexcept {
  auto mode = cudaStreamCaptureModeRelaxed;  // do not invalidate another thread's capture
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  (void)cudaFree(memory);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace fastdist::cuda
