// The state of the virtual CUDA runtime, under a single lock: it is simple, and its speed does not
// matter.
//
// A stream is a queue of operations and a thread that runs them in order. Each operation has an end
// (Point) and a list of points that it waits for: events, the default stream, chains. An event is
// the end of the last operation enqueued when it was recorded.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "virtual_gpu/cuda/work.h"

namespace virtual_gpu {

struct Point {
  bool is_done = false;
};
using PointPtr = std::shared_ptr<Point>;

struct Chain {
  PointPtr tail;
};

struct Operation {
  std::function<void()> run;
  std::vector<PointPtr> waits;
  PointPtr end;
};

struct Node {
  std::function<void()> run;
  std::set<std::size_t> after;  // nodes of the same graph
  std::shared_ptr<Chain> chain;
};

struct Capture;

struct Allocation {
  std::size_t bytes;
  int device;
};

// A capture, begun on one stream; other streams join by waiting for its events.
struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t origin;
  bool is_valid = true;
  std::vector<Node> nodes;
  std::map<cudaStream_t, std::set<std::size_t>> tails;  // of each stream in the capture
  std::map<const Chain*, std::size_t> chain_tails;
  unsigned long long id;
};

}  // namespace virtual_gpu

struct CUgraph_st {
  std::vector<virtual_gpu::Node> nodes;
};

struct CUstream_st {
  int device;
  bool is_legacy;
  bool is_blocking;  // this stream and the legacy default stream wait for each other
  std::deque<virtual_gpu::Operation> queue{};
  virtual_gpu::PointPtr tail{};
  bool is_destroyed = false;
  bool has_thread = false;
  std::shared_ptr<virtual_gpu::Capture> capture{};
};

struct CUevent_st {
  int device;
  virtual_gpu::PointPtr point{};
  std::shared_ptr<virtual_gpu::Capture> capture{};  // in which it was recorded
  std::set<std::size_t> nodes{};
};

struct CUgraphExec_st {
  std::shared_ptr<const std::vector<virtual_gpu::Node>> nodes;
  virtual_gpu::PointPtr tail{};  // end of the previous launch
};

namespace virtual_gpu {

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  cudaError_t lost = cudaSuccess;  // see Failure
  std::map<cudaStream_t, std::shared_ptr<CUstream_st>> streams;
  std::vector<std::shared_ptr<CUstream_st>> legacy;  // by device
  std::set<cudaEvent_t> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> execs;
  std::set<std::shared_ptr<Capture>> captures;
  std::map<std::uintptr_t, Allocation> allocations;
  std::set<int> contexts;  // devices on which this process has allocated memory
};

// Created by the first call and never destroyed, since the streams' threads run until the end.
[[nodiscard]] State& state();
[[nodiscard]] int device_count();
[[nodiscard]] int current_device();
// A stack of devices that are current instead of the one that was set.
void push_device(int device);
// Returns -1 if the stack is empty.
int pop_device();

// Returns the device of an address, or -1 if it is not device memory.
[[nodiscard]] int device_of_memory(const void* address);

// Every entry point returns through this function, which stores errors for cudaGetLastError.
cudaError_t remember(cudaError_t error);

// --- Functions that require the lock ---------------------------------------------------------

// Returns a stream by its handle; null and 1 are the default stream of `device`. Returns null if
// there is no such stream.
[[nodiscard]] std::shared_ptr<CUstream_st> find_stream(State& s, cudaStream_t stream, int device);
// Enqueues or captures `run`; `waits` applies only if it is not captured.
[[nodiscard]] cudaError_t add(State& s, const std::shared_ptr<CUstream_st>& stream,
                              std::function<void()> run, const std::shared_ptr<Chain>& chain,
                              std::vector<PointPtr> waits = {});
// Returns an error if this thread must not make a call that is unsafe during a capture. If the call
// invalidates the capture, also reports that on stderr.
[[nodiscard]] cudaError_t check_unsafe(State& s, const char* call);
// Returns true if the default stream is used while a stream that waits for it is being captured.
[[nodiscard]] bool is_implicit(const State& s, const CUstream_st& stream);
void wait_for(State& s, std::unique_lock<std::mutex>& lock, const PointPtr& point);
void wait_for_device(State& s, std::unique_lock<std::mutex>& lock, int device);

}  // namespace virtual_gpu
