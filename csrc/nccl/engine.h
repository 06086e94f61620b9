// The interface of the GPU engine for the bindings: plain C++, built everywhere. In builds without
// CUDA (unavailable.cpp), `connect` throws.
//
// Calls are asynchronous: a method enqueues its work on CallOptions::stream and returns. A Mark
// waits for enqueued work. Views must refer to memory on this rank's device.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/communicator.h"
#include "core/error.h"
#include "cuda/stream.h"
#include "nccl/abi.h"

namespace fastdist::nccl {

using cuda::StreamHandle;

inline constexpr std::size_t kDefaultBucketBytes = std::size_t{32} << 20;

// The end of a call in a stream.
class Mark : public NonCopyable {
 public:
  virtual ~Mark() = default;

  // Does not block. Returns true for calls in a captured graph, which have no end to wait for.
  [[nodiscard]] virtual bool is_done() const = 0;
  // Returns true while the memory of the call's arrays must not be reused. In a capture, that is
  // until the capture ends, since another branch of the graph could use freed memory.
  [[nodiscard]] virtual bool uses_arrays() const = 0;
  virtual void make_wait(StreamHandle stream) const = 0;
};

// Compares the signatures of all collectives through the ranks' hosts, since NCCL does not.
class Checker : public NonCopyable {
 public:
  virtual ~Checker() = default;

  // Returns true if `flag` is set on every rank. Every rank must call, with the same signature; on
  // a mismatch all ranks throw kMismatch.
  virtual bool agree(const Signature& signature, bool flag, const CallOptions&) = 0;
  // Compares a call after this function has returned, so that no call waits for the slowest rank.
  // On a mismatch, or if a rank is late or lost, the function given to `on_failure` gets the error
  // on every rank, once. If that is the communicator's first failure, the function must call
  // `tell` before any call can see the failure.
  virtual void compare_later(const Signature& signature, const CallOptions&) = 0;
  // Must be called before calls are compared.
  using Fail = std::function<void(const Error& error, const std::function<void()>& tell)>;
  virtual void on_failure(Fail fail) = 0;
  // Waits until all calls are compared. Returns false if `limit` passes first.
  virtual bool settle(std::chrono::nanoseconds limit) noexcept = 0;
  // Returns a rank that has died or failed. Thread-safe.
  [[nodiscard]] virtual std::optional<int> find_lost() const = 0;
};

class GpuCommunicator : public Communicator {
 public:
  [[nodiscard]] virtual int device() const noexcept = 0;
  // Throws if no more calls can be made: the communicator is closed, was aborted or has failed.
  virtual void check_usable() const = 0;

  // all_reduce of a list through buckets. `wire`: the floating dtype in which values are sent.
  virtual void all_reduce_fused(TensorViews in, TensorViews out, ReduceOp op,
                                std::optional<DType> wire, std::size_t bucket_bytes,
                                const CallOptions&) = 0;
  // `in` is read on the root only.
  virtual void broadcast(TensorViews in, TensorViews out, int root, const CallOptions&) = 0;
  // Makes several calls one collective: compared once, as `whole`, and launched together if
  // possible.
  virtual void as_one(const Signature& whole, const CallOptions& options,
                      const std::function<void(const CallOptions&)>& calls) = 0;

  // Launches all calls that `calls` makes together. Sends and receives do not wait for each other.
  virtual void as_group(const CallOptions& options, const std::function<void()>& calls) = 0;

  // The communicator's own stream, for calls that must not delay the caller's stream.
  [[nodiscard]] virtual StreamHandle own_stream() const noexcept = 0;
  // Makes later work on the own stream wait for the work that is on `stream` now.
  virtual void follow(StreamHandle stream) = 0;
  // Returns the end of the last call, which was made on `stream`.
  [[nodiscard]] virtual std::shared_ptr<const Mark> mark(StreamHandle stream) = 0;

  // Returns the point that the work on `stream` has reached.
  [[nodiscard]] virtual std::shared_ptr<Mark> record(StreamHandle stream) = 0;

  // Returns memory that NCCL can use without a copy. Every rank must call, with the same `bytes`.
  [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(std::size_t bytes,
                                                            const CallOptions&) = 0;
  // From now on a failure of one communicator is a failure of both.
  virtual void share_failures(GpuCommunicator& other) = 0;
  // Aborts pending calls of this rank; peers in the same calls wait until they are aborted too.
  virtual void abort(const std::string& why) noexcept = 0;
  virtual void close() noexcept = 0;
};

// Returns an id that one rank must distribute to all others before they connect.
[[nodiscard]] abi::UniqueId make_unique_id();

// A communicator in which `sender` sends and `receiver` receives, and nothing else is called.
struct Lane {
  int sender;
  int receiver;
};

struct Connection {
  abi::UniqueId id;
  int rank;
  int size;  // number of all ranks, even if only the two of a lane connect
  int device;
  Checker* checker = nullptr;  // null: calls are not compared
  std::optional<Lane> lane;
};

// Every rank must call, or the two ranks of a lane.
[[nodiscard]] std::unique_ptr<GpuCommunicator> connect(const Connection& connection,
                                                       const CallOptions& options);

}  // namespace fastdist::nccl
