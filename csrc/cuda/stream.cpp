#include "cuda/stream.h"

#include "cuda/check.h"

namespace fastdist::cuda {

void make_current(int device) { FASTDIST_CUDA_CHECK(cudaSetDevice(device)); }

DeviceGuard::DeviceGuard(int device) {
  FASTDIST_CUDA_CHECK(cudaGetDevice(&previous_));
  if (previous_ == device) {
    previous_ = kNothing;
  } else {
    FASTDIST_CUDA_CHECK(cudaSetDevice(device));
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ != kNothing) (void)cudaSetDevice(previous_);
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

bool is_capturing(StreamHandle stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  // The default stream while another stream is captured: the default stream is not capturing.
  if (error == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    return false;
  }
  check(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
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
