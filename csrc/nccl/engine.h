// The engine for GPUs, as the bindings see it: plain C++, built everywhere. Where CUDA is not built
// (unavailable.cpp), `connect` throws.
//
// Calls are asynchronous: a method enqueues its work on CallOptions::stream and returns. What has
// been enqueued can be waited for by its Mark. Views are of memory of this rank's device.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/communicator.h"
#include "core/error.h"
#include "cuda/stream.h"
#include "nccl/abi.h"

namespace fastdist::nccl {

using cuda::StreamHandle;

inline constexpr std::size_t kDefaultBucketBytes = std::size_t{32} << 20;

// The point in a stream where a call ends.
class Mark {
 public:
  Mark() = default;
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  virtual ~Mark() = default;

  // Without waiting. Within a captured graph there is nothing to wait for: true.
  [[nodiscard]] virtual bool is_done() const = 0;
  virtual void make_wait(StreamHandle stream) const = 0;
};

// Memory that NCCL uses without a copy, for as long as this lives.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
};

// The way to the other ranks' hosts: every collective's signature is compared there before any
// work is enqueued, since NCCL cannot.
class Checker {
 public:
  Checker() = default;
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;
  virtual ~Checker() = default;

  [[nodiscard]] virtual int size() const = 0;
  // Whether `flag` is set on every rank. Every rank calls, with the same signature; ranks that
  // disagree all throw kMismatch.
  virtual bool agree(const Signature& signature, bool flag, const CallOptions&) = 0;
  // A rank that is lost, as what a call that waits for it should throw; from any thread.
  [[nodiscard]] virtual std::optional<Error> find_lost() const = 0;
};

class GpuCommunicator : public Communicator {
 public:
  [[nodiscard]] virtual int device() const noexcept = 0;
  // Throws why no call can be made any more: closed, aborted, failed.
  virtual void check_usable() const = 0;

  // all_reduce of a list through buckets; `wire`: sent as numbers of that floating dtype.
  virtual void all_reduce_fused(TensorViews in, TensorViews out, ReduceOp op,
                                std::optional<DType> wire, std::size_t bucket_bytes,
                                const CallOptions&) = 0;
  // broadcast out of place; `in` is read on the root only.
  virtual void broadcast_from(TensorViews in, TensorViews out, int root, const CallOptions&) = 0;
  // Makes several calls one: compared once, as `whole`, and launched together where NCCL can.
  virtual void as_one(const Signature& whole, const CallOptions& options,
                      const std::function<void(const CallOptions&)>& calls) = 0;

  // A stream of this communicator, for calls that shall not delay the caller's.
  [[nodiscard]] virtual StreamHandle own_stream() const noexcept = 0;
  // What is enqueued on the own stream from now on starts after what is on `stream` now.
  virtual void follow(StreamHandle stream) = 0;
  // The end of the last call, which was made on `stream`.
  [[nodiscard]] virtual std::shared_ptr<const Mark> mark(StreamHandle stream) = 0;

  // Collective: every rank asks for as much.
  [[nodiscard]] virtual std::shared_ptr<Memory> allocate(std::size_t bytes, const CallOptions&) = 0;
  // Ends what runs, here and now; peers that take part in it wait until they are aborted, too.
  virtual void abort(const std::string& why) noexcept = 0;
  virtual void close() noexcept = 0;
};

// What one rank gives to all others before they connect.
[[nodiscard]] abi::UniqueId make_unique_id();

struct Connection {
  abi::UniqueId id;
  int rank;
  int size;
  int device;
  // NCCL's way to make calls: blocking ones take less of the host's time; the others can be given
  // up at any point, also while ranks connect.
  bool blocking = true;
  Checker* checker = nullptr;  // null: calls are not compared
};

// Every rank calls.
[[nodiscard]] std::unique_ptr<GpuCommunicator> connect(const Connection& connection,
                                                       const CallOptions& options);

}  // namespace fastdist::nccl
