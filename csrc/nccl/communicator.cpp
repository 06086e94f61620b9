#include "nccl/communicator.h"

#include <memory>
#include <utility>
#include <vector>

#include "cuda/check.h"

namespace fastdist::nccl {

NcclCommunicator::NcclCommunicator(std::shared_ptr<Handle> handle, int rank, int size,
                                   Checker* checker)
    : handle_(std::move(handle)),
      rank_(rank),
      size_(size),
      checker_(checker),
      watcher_(handle_, rank, checker) {}

NcclCommunicator::~NcclCommunicator() { close(); }

// --- A call -----------------------------------------------------------------------------------

NcclCommunicator::Call::Call(NcclCommunicator& communicator, const Signature& signature,
                             const CallOptions& options, Compared compared)
    : c_(communicator), options_(options), outermost_(communicator.depth_ == 0) {
  if (outermost_) {
    options.caller->may_block();
    c_.check_usable();
    const Signature announced = announced_signature(signature, options);
    if (compared == Compared::kYes && c_.checker_ != nullptr) {
      c_.checker_->agree(announced, true, options);
    }
    device_.emplace(c_.device());
    c_.capturing_ = cuda::is_capturing(stream_of(options));
    if (c_.capturing_) {
      if (!c_.handle_->is_captured()) c_.handle_->hold_until_end(c_.captured_);
      c_.handle_->note_capture();
    } else {
      c_.watcher_.enter(announced, options);
      entered_ = true;
    }
  }
  ++c_.depth_;
}

NcclCommunicator::Call::~Call() {
  --c_.depth_;
  if (entered_) c_.watcher_.withdraw();
}

void NcclCommunicator::Call::end() {
  if (!outermost_) return;
  if (c_.capturing_) {
    c_.last_.reset();  // `mark` creates one on demand
    return;
  }
  c_.last_ = std::make_shared<EventMark>(c_.events_, stream_of(options_), false);
  c_.watcher_.enqueued(c_.last_);
  entered_ = false;
}

NcclCommunicator::Group::Group(NcclCommunicator& communicator, const CallOptions& options)
    : c_(communicator), options_(options) {
  c_.handle_->check(functions().group_start(), "ncclGroupStart");
  ++c_.group_depth_;
}

// After an exception the group must be closed, or this thread's next calls would join it.
NcclCommunicator::Group::~Group() {
  if (!open_) return;
  --c_.group_depth_;
  (void)functions().group_end();
}

void NcclCommunicator::Group::end() {
  open_ = false;
  --c_.group_depth_;
  c_.handle_->check(functions().group_end(), "ncclGroupEnd");
  if (c_.group_depth_ == 0) c_.handle_->settle(options_, "ncclGroupEnd");
}

NcclCommunicator::OutsideGroups::OutsideGroups(NcclCommunicator& communicator,
                                               const CallOptions& options)
    : c_(communicator), depth_(std::exchange(communicator.group_depth_, 0)) {
  for (int i = 0; i < depth_; ++i) c_.handle_->check(functions().group_end(), "ncclGroupEnd");
  if (depth_ != 0) c_.handle_->settle(options, "ncclGroupEnd");
}

NcclCommunicator::OutsideGroups::~OutsideGroups() {
  for (int i = 0; i < depth_; ++i) (void)functions().group_start();
  c_.group_depth_ = depth_;
}

void NcclCommunicator::as_one(const Signature& whole, const CallOptions& options,
                              const std::function<void(const CallOptions&)>& calls) {
  Call call(*this, whole, options);
  Group group(*this, options);
  calls(options);
  group.end();
  call.end();
}

bool NcclCommunicator::agree(const Signature& signature, const CallOptions& options, bool flag) {
  if (checker_ == nullptr || depth_ != 0) return false;
  options.caller->may_block();
  check_usable();
  return checker_->agree(announced_signature(signature, options), flag, options);
}

Signature NcclCommunicator::announced_signature(const Signature& signature,
                                                const CallOptions& options) {
  Signature result = options.whole != nullptr ? *options.whole : signature;
  result.on_gpu = true;
  return result;
}

void NcclCommunicator::follow(StreamHandle stream) {
  check_usable();
  const cuda::DeviceGuard device(handle_->device());
  followed_.record(stream);
  followed_.make_wait(own_.get());
}

std::shared_ptr<const Mark> NcclCommunicator::mark(StreamHandle stream) {
  if (last_) return last_;
  const cuda::DeviceGuard device(handle_->device());
  return std::make_shared<EventMark>(events_, stream, true);
}

// --- Memory, closing --------------------------------------------------------------------------

// All ranks wait for each other while NCCL creates a window, so this is a collective, but not in a
// stream.
std::shared_ptr<Memory> NcclCommunicator::allocate(std::size_t bytes, const CallOptions& options) {
  const Call call(*this, {.op = Op::kEmpty, .count = bytes}, options);
  const auto memory = std::make_shared<NcclMemory>(handle_, bytes, options);
  // The caller may drop the memory while a call uses it, and NCCL does not wait.
  return {memory.get(), [memory](Memory*) { memory->wait_for_device(); }};
}

// Drains first: NCCL's own destruction would wait without a timeout and could not be aborted.
void NcclCommunicator::close() noexcept {
  watcher_.drain();
  eager_.forget_buckets();
  handle_->close();
}

void NcclCommunicator::abort(const std::string& why) noexcept {
  handle_->fail({ErrorCode::kState, why});
}

// --- Connecting -------------------------------------------------------------------------------

abi::UniqueId make_unique_id() {
  abi::UniqueId id{};
  const abi::Result result = functions().get_unique_id(&id);
  if (result != abi::kSuccess) throw to_error(result, "ncclGetUniqueId", nullptr);
  return id;
}

namespace {

// A blocking connection attempt, in its own thread because NCCL offers no other way to abort it. If
// the caller has given up, a late success is aborted immediately.
struct Attempt {
  std::mutex mutex;
  std::condition_variable ended;
  bool is_done = false;
  bool is_given_up = false;
  abi::Comm comm = nullptr;
  abi::Result result = abi::kInProgress;
  std::string error;
};

void attempt_in_thread(const std::shared_ptr<Attempt>& attempt, const Connection& connection) {
  std::thread([attempt, connection] {
    abi::Comm comm = nullptr;
    abi::Result result = abi::kSystemError;
    std::string error;
    try {
      cuda::make_current(connection.device);
      const cuda::RelaxedCapture relaxed;
      abi::Config config;
      config.blocking = 1;
      result =
          functions().init_rank(&comm, connection.size, connection.id, connection.rank, &config);
      if (result != abi::kSuccess) error = to_error(result, "ncclCommInitRank", nullptr).what();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    const std::lock_guard lock(attempt->mutex);
    if (attempt->is_given_up && result == abi::kSuccess) (void)functions().abort(comm);
    attempt->comm = comm;
    attempt->result = result;
    attempt->error = error;
    attempt->is_done = true;
    attempt->ended.notify_all();
  }).detach();
}

abi::Comm connect_blocking(const Connection& connection, const CallOptions& options) {
  const auto attempt = std::make_shared<Attempt>();
  attempt_in_thread(attempt, connection);
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  std::unique_lock lock(attempt->mutex);
  try {
    while (!attempt->ended.wait_for(lock, std::chrono::milliseconds(50),
                                    [&] { return attempt->is_done; })) {
      if (std::chrono::steady_clock::now() > deadline) {
        throw Error(ErrorCode::kTimeout, "NCCL has not connected the ranks in time: rank " +
                                             std::to_string(connection.rank) + " of " +
                                             std::to_string(connection.size) +
                                             " is waiting for other ranks");
      }
      options.caller->check_interrupt();
    }
  } catch (...) {
    attempt->is_given_up = true;
    throw;
  }
  if (attempt->result == abi::kSuccess) return attempt->comm;
  throw Error(ErrorCode::kState, attempt->error);
}

abi::Comm connect_polling(const Connection& connection) {
  abi::Config config;
  config.blocking = 0;
  abi::Comm comm = nullptr;
  const abi::Result result =
      functions().init_rank(&comm, connection.size, connection.id, connection.rank, &config);
  if (result != abi::kSuccess && result != abi::kInProgress) {
    throw to_error(result, "ncclCommInitRank", comm);
  }
  return comm;
}

}  // namespace

std::unique_ptr<GpuCommunicator> connect(const Connection& connection, const CallOptions& options) {
  options.caller->may_block();
  const cuda::DeviceGuard device(connection.device);
  const cuda::RelaxedCapture relaxed;  // connecting allocates streams and memory
  const abi::Comm comm =
      connection.blocking ? connect_blocking(connection, options) : connect_polling(connection);
  auto handle = std::make_shared<Handle>(comm, connection.device, connection.blocking);
  handle->settle(options, "ncclCommInitRank");
  return std::make_unique<NcclCommunicator>(std::move(handle), connection.rank, connection.size,
                                            connection.checker);
}

}  // namespace fastdist::nccl
