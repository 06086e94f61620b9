// Streams and events.
//
// VIRTUAL_GPU_DELAY_US sets the longest random pause before an operation (0), so that missing waits
// are detected.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <utility>

#include "virtual_gpu/cuda/state.h"

namespace virtual_gpu {
namespace {

bool are_done(const std::vector<PointPtr>& points) {
  for (const PointPtr& point : points) {
    if (!point->is_done) return false;
  }
  return true;
}

void pause_for_a_while() {
  static const int kMost = [] {
    const char* text = std::getenv("VIRTUAL_GPU_DELAY_US");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  if (kMost <= 0) return;
  thread_local std::minstd_rand random{std::random_device{}()};
  std::this_thread::sleep_for(
      std::chrono::microseconds(random() % static_cast<unsigned>(kMost + 1)));
}

cudaError_t run_guarded(const Operation& operation, int device) {
  cudaError_t error = cudaSuccess;
  try {
    pause_for_a_while();
    if (operation.run) operation.run();
  } catch (const Failure& failure) {
    error = failure.error;
    std::fprintf(stderr, "virtual GPU %d is lost: %s\n", device, failure.what());
  } catch (const std::exception& failure) {
    error = cudaErrorLaunchFailure;
    std::fprintf(stderr, "virtual GPU %d is lost: %s\n", device, failure.what());
  }
  return error;
}

void run_stream(const std::shared_ptr<CUstream_st>& stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  for (;;) {
    s.changed.wait(lock, [&] { return !stream->queue.empty() || stream->is_destroyed; });
    if (stream->queue.empty()) return;
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    s.changed.wait(lock, [&] { return are_done(operation.waits) || s.lost != cudaSuccess; });
    if (s.lost == cudaSuccess) {
      lock.unlock();
      const cudaError_t error = run_guarded(operation, stream->device);
      operation.run = nullptr;  // destroying its captures may call the runtime
      lock.lock();
      if (s.lost == cudaSuccess) s.lost = error;
    }
    operation.end->is_done = true;
    s.changed.notify_all();
  }
}

// Returns what an operation must wait for because of the legacy default stream.
std::vector<PointPtr> implicit_waits(const State& s, const CUstream_st& stream) {
  std::vector<PointPtr> waits;
  if (!stream.is_legacy) {
    if (stream.is_blocking)
      waits.push_back(s.legacy[static_cast<std::size_t>(stream.device)]->tail);
  } else {
    for (const auto& [handle, other] : s.streams) {
      if (other->is_blocking && other->device == stream.device) waits.push_back(other->tail);
    }
  }
  std::erase(waits, nullptr);
  return waits;
}

void enqueue_now(State& s, const std::shared_ptr<CUstream_st>& stream, std::function<void()> run,
                 std::vector<PointPtr> waits) {
  for (PointPtr& point : implicit_waits(s, *stream)) waits.push_back(std::move(point));
  Operation operation{std::move(run), std::move(waits), std::make_shared<Point>()};
  stream->tail = operation.end;
  stream->queue.push_back(std::move(operation));
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(run_stream, stream).detach();
  }
  s.changed.notify_all();
}

void capture_now(Capture& capture, cudaStream_t stream, std::function<void()> run,
                 const std::shared_ptr<Chain>& chain) {
  const std::size_t index = capture.nodes.size();
  std::set<std::size_t> after = capture.tails[stream];
  if (chain) {
    const auto [last, is_first] = capture.chain_tails.try_emplace(chain.get(), index);
    if (!is_first) after.insert(std::exchange(last->second, index));
  }
  capture.nodes.push_back({std::move(run), std::move(after), chain});
  capture.tails[stream] = {index};
}

cudaError_t create(cudaStream_t* stream, unsigned flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return s.lost;
  if (device_count() == 0) return cudaErrorNoDevice;
  const bool is_blocking = (flags & cudaStreamNonBlocking) == 0;
  auto made = std::make_shared<CUstream_st>(CUstream_st{current_device(), false, is_blocking});
  *stream = made.get();
  s.streams[*stream] = std::move(made);
  return cudaSuccess;
}

// Using the default stream while a stream that waits for it is being captured invalidates the
// capture.
cudaError_t spoil_implicit(State& s, const CUstream_st& stream) {
  for (const auto& capture : s.captures) {
    for (const auto& [handle, tail] : capture->tails) {
      if (handle->is_blocking && handle->device == stream.device) capture->is_valid = false;
    }
  }
  return cudaErrorStreamCaptureImplicit;
}

cudaError_t wait_captured(State& s, const std::shared_ptr<CUstream_st>& stream,
                          const CUevent_st& event) {
  if (!s.captures.contains(event.capture)) return cudaErrorCapturedEvent;  // the capture has ended
  if (stream->is_legacy) return spoil_implicit(s, *stream);
  if (stream->capture && stream->capture != event.capture) {
    stream->capture->is_valid = event.capture->is_valid = false;
    return cudaErrorStreamCaptureMerge;
  }
  stream->capture = event.capture;
  event.capture->tails[stream.get()].insert(event.nodes.begin(), event.nodes.end());
  return cudaSuccess;
}

}  // namespace

std::shared_ptr<Chain> make_chain() { return std::make_shared<Chain>(); }

std::shared_ptr<CUstream_st> find_stream(State& s, cudaStream_t stream, int device) {
  constexpr std::uintptr_t kLegacyHandle = 1;  // cudaStreamLegacy
  if (reinterpret_cast<std::uintptr_t>(stream) <= kLegacyHandle) {
    return s.legacy[static_cast<std::size_t>(device)];
  }
  const auto found = s.streams.find(stream);
  return found == s.streams.end() ? nullptr : found->second;
}

bool is_implicit(const State& s, const CUstream_st& stream) {
  if (!stream.is_legacy) return false;
  for (const auto& capture : s.captures) {
    for (const auto& [handle, tail] : capture->tails) {
      if (handle->is_blocking && handle->device == stream.device) return true;
    }
  }
  return false;
}

cudaError_t add(State& s, const std::shared_ptr<CUstream_st>& stream, std::function<void()> run,
                const std::shared_ptr<Chain>& chain, std::vector<PointPtr> waits) {
  if (s.lost != cudaSuccess) return s.lost;
  if (is_implicit(s, *stream)) return spoil_implicit(s, *stream);
  if (stream->capture) {
    if (!stream->capture->is_valid) return cudaErrorStreamCaptureInvalidated;
    capture_now(*stream->capture, stream.get(), std::move(run), chain);
    return cudaSuccess;
  }
  if (chain && chain->tail) waits.push_back(chain->tail);
  enqueue_now(s, stream, std::move(run), std::move(waits));
  if (chain) chain->tail = stream->tail;
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, int device, std::function<void()> run,
                    const std::shared_ptr<Chain>& chain) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return s.lost;
  if (device_count() == 0) return cudaErrorNoDevice;
  const auto found = find_stream(s, stream, device);
  if (!found || found->device != device) return cudaErrorInvalidResourceHandle;
  return add(s, found, std::move(run), chain);
}

void wait_for(const std::shared_ptr<Chain>& chain) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  wait_for(s, lock, PointPtr(chain->tail));
}

void wait_for(State& s, std::unique_lock<std::mutex>& lock, const PointPtr& point) {
  if (point) s.changed.wait(lock, [&] { return point->is_done || s.lost != cudaSuccess; });
}

void wait_for_device(State& s, std::unique_lock<std::mutex>& lock, int device) {
  std::vector<PointPtr> tails{s.legacy[static_cast<std::size_t>(device)]->tail};
  for (const auto& [handle, stream] : s.streams) {
    if (stream->device == device) tails.push_back(stream->tail);
  }
  for (const PointPtr& tail : tails) wait_for(s, lock, tail);
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return remember(create(stream, flags));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return remember(create(stream, flags));
}

// Enqueued work still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.streams.find(stream);
  if (found == s.streams.end()) return remember(cudaErrorInvalidResourceHandle);
  if (found->second->capture) found->second->capture->is_valid = false;
  found->second->is_destroyed = true;
  s.streams.erase(found);
  s.changed.notify_all();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess)
    return remember(error);
  const auto found = find_stream(s, stream, current_device());
  if (!found) return remember(cudaErrorInvalidResourceHandle);
  if (found->capture) {
    found->capture->is_valid = false;
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  wait_for(s, lock, found->tail);
  return remember(s.lost);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess)
    return remember(error);
  const auto found = find_stream(s, stream, current_device());
  if (!found) return remember(cudaErrorInvalidResourceHandle);
  if (found->capture) return remember(cudaErrorStreamCaptureUnsupported);
  if (s.lost != cudaSuccess) return remember(s.lost);
  return remember(!found->tail || found->tail->is_done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize() {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (device_count() == 0) return remember(cudaErrorNoDevice);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess)
    return remember(error);
  // Fails in every capture mode: the device has a stream that cannot be waited for.
  for (const auto& [handle, stream] : s.streams) {
    if (!stream->capture || stream->device != current_device()) continue;
    stream->capture->is_valid = false;
    std::fprintf(stderr, "virtual GPU: %s of a device with a stream in capture\n", __func__);
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  wait_for_device(s, lock, current_device());
  return remember(s.lost);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  if (device_count() == 0) return remember(cudaErrorNoDevice);
  *event = new CUevent_st{current_device()};
  s.events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.events.erase(event) == 0) return remember(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  const auto found = find_stream(s, stream, current_device());
  if (!found || !s.events.contains(event) || found->device != event->device) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (found->capture) {
    if (!found->capture->is_valid) return remember(cudaErrorStreamCaptureInvalidated);
    event->capture = found->capture;
    event->nodes = found->capture->tails[found.get()];
    event->point = nullptr;
    return cudaSuccess;
  }
  // A separate operation: on the default stream it ends after all streams that wait for it.
  const cudaError_t error = add(s, found, nullptr, nullptr);
  if (error != cudaSuccess) return remember(error);
  event->capture = nullptr;
  event->nodes.clear();
  event->point = found->tail;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  const auto found = find_stream(s, stream, current_device());
  if (!found || !s.events.contains(event)) return remember(cudaErrorInvalidResourceHandle);
  if (event->capture) return remember(wait_captured(s, found, *event));
  if (!event->point) return cudaSuccess;
  if (found->capture) {
    found->capture->is_valid = false;
    return remember(cudaErrorStreamCaptureIsolation);
  }
  return remember(add(s, found, nullptr, nullptr, {event->point}));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess)
    return remember(error);
  if (!s.events.contains(event)) return remember(cudaErrorInvalidResourceHandle);
  if (s.lost != cudaSuccess) return remember(s.lost);
  if (event->capture) {
    event->capture->is_valid = false;
    return remember(cudaErrorCapturedEvent);
  }
  return remember(!event->point || event->point->is_done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess)
    return remember(error);
  if (!s.events.contains(event)) return remember(cudaErrorInvalidResourceHandle);
  if (event->capture) return remember(cudaErrorCapturedEvent);
  wait_for(s, lock, PointPtr(event->point));
  return remember(s.lost);
}
