// Everything that the virtual CUDA runtime knows, under one lock: what it does is simple, and how
// fast it is does not matter.
//
// A stream is a queue of operations and a thread that runs them in order. Each operation has an end
// (Point), and a list of points that it waits for: events, the default stream, chains. So an event
// is the end of what was enqueued last when it was recorded.
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

// A capture, from its beginning on one stream; others join by waiting for its events.
struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t origin;
  bool is_valid = true;
  std::vector<Node> nodes;
  std::map<cudaStream_t, std::set<std::size_t>> tails;  // of each stream in it
  std::map<const Chain*, std::size_t> chain_tails;
};

struct Allocation {
  std::size_t bytes;
  int device;
};

}  // namespace virtual_gpu

struct CUstream_st {
  int device;
  bool is_legacy;
  bool is_blocking;  // waits for the legacy default stream, and it for this one
  std::deque<virtual_gpu::Operation> queue{};
  virtual_gpu::PointPtr tail{};
  bool is_destroyed = false;
  bool has_thread = false;
  std::shared_ptr<virtual_gpu::Capture> capture{};
};

struct CUevent_st {
  int device;
  virtual_gpu::PointPtr point{};
  std::shared_ptr<virtual_gpu::Capture> capture{};  // recorded in it
  std::set<std::size_t> nodes{};
};

struct CUgraph_st {
  std::vector<virtual_gpu::Node> nodes;
};

struct CUgraphExec_st {
  std::shared_ptr<const std::vector<virtual_gpu::Node>> nodes;
  virtual_gpu::PointPtr tail;  // the launch before
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
  std::set<int> contexts;  // devices of which this process has taken memory
};

// Made by the first call, never destroyed: streams' threads outlive everything.
[[nodiscard]] State& state();
[[nodiscard]] int device_count();
[[nodiscard]] int current_device();

// What every entry of the runtime returns through: remembers errors for cudaGetLastError.
cudaError_t remember(cudaError_t error);

// --- With the lock in hand -------------------------------------------------------------------

// The stream, by its handle: null and 1 are the default one of `device`. Null pointer: no such
// stream.
[[nodiscard]] std::shared_ptr<CUstream_st> find_stream(State& s, cudaStream_t stream, int device);
// Enqueues or captures; `waits` is for what is not captured.
[[nodiscard]] cudaError_t add(State& s, const std::shared_ptr<CUstream_st>& stream,
                              std::function<void()> run, const std::shared_ptr<Chain>& chain,
                              std::vector<PointPtr> waits = {});
// Why this thread may not make a call that might spoil a capture; spoils it where it does, and says
// so on stderr.
[[nodiscard]] cudaError_t check_unsafe(State& s, const char* call);
// The error of a default stream that is used while a stream that waits for it is being captured.
[[nodiscard]] bool is_implicit(const State& s, const CUstream_st& stream);
void wait_for(State& s, std::unique_lock<std::mutex>& lock, const PointPtr& point);
void wait_for_device(State& s, std::unique_lock<std::mutex>& lock, int device);

}  // namespace virtual_gpu
