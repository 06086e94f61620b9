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

Event::Event() { FASTDIST_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }

// CUDA frees the event only once the device is done with it, so pending waits stay valid.
Event::~Event() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

void Event::record(StreamHandle stream) const {
  FASTDIST_CUDA_CHECK(cudaEventRecord(event_, stream));
}

void Event::make_wait(StreamHandle stream) const {
  FASTDIST_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
}

bool Event::is_done() const {
  const RelaxedCapture relaxed;  // a query must not invalidate a capture of any thread
  const cudaError_t error = cudaEventQuery(event_);
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(error, "cudaEventQuery");
  return true;
}

void Event::synchronize() const {
  const RelaxedCapture relaxed;
  FASTDIST_CUDA_CHECK(cudaEventSynchronize(event_));
}

Stream::Stream() {
  // The highest priority: other streams' work waits for the result.
  int least = 0;
  int greatest = 0;
  FASTDIST_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  FASTDIST_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
}

Stream::~Stream() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

}  // namespace fastdist::cuda
