#include "nccl/communicator.h"

#include <exception>
#include <future>
#include <thread>
#include <utility>

namespace fastdist::nccl {
namespace {

std::uint64_t key_of(const abi::UniqueId& id) noexcept {
  std::uint64_t key = 0;
  for (const char c : id.bytes) key = (key ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return key;
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<Handle> handle, const Connection& connection)
    : handle_(std::move(handle)),
      rank_(connection.rank),
      size_(connection.size),
      lane_(connection.lane),
      checker_(connection.lane ? nullptr : connection.checker),
      watcher_(handle_, connection,
               recorder::open_communicator(connection.rank, connection.size, key_of(connection.id),
                                           "nccl")) {
  if (checker_ == nullptr) return;
  checker_->on_failure(
      [weak = std::weak_ptr(handle_)](const Error& error, const std::function<void()>& tell) {
        if (const auto handle = weak.lock()) handle->fail(error, tell);
      });
}

NcclCommunicator::~NcclCommunicator() {
  close();
  try {
    const cuda::DeviceGuard device(handle_->device());  // freeing must use no other GPU
    captured_.clear();
  } catch (const Error&) {  // the process is exiting, and the driver is gone
  }
}

// --- A call -----------------------------------------------------------------------------------

NcclCommunicator::Call::Call(NcclCommunicator& communicator, const Signature& signature,
                             const CallOptions& options, Compared compared)
    : c_(communicator), options_(options), outermost_(communicator.depth_ == 0) {
  if (c_.is_users_call()) {
    options.caller->may_block();
    c_.check_usable();
    if (c_.checker_ != nullptr && compared != Compared::kNever) {
      const Signature announced = announced_signature(signature, options);
      if (compared == Compared::kLater) {
        c_.checker_->compare_later(announced, options);
      } else {
        (void)c_.checker_->agree(announced, true, options);
      }
    }
  }
  if (outermost_) {
    device_.emplace(c_.device());
    use_ = c_.handle_->use();
    range_.emplace(name_of(signature.op).data());
    c_.check_usable();  // another thread may have aborted it since
    c_.capture_ = cuda::capture_of(stream_of(options));
    if (c_.capture_) {
      c_.handle_->note_capture();
    } else {
      c_.watcher_.enter(announced_signature(signature, options), options);
      entered_ = true;
    }
  }
  ++c_.depth_;
}

NcclCommunicator::Call::~Call() {
  --c_.depth_;
  if (outermost_) c_.is_group_ = false;
  if (entered_) c_.watcher_.withdraw();
}

void NcclCommunicator::Call::end() {
  if (!outermost_) return;
  if (c_.capture_) {
    c_.last_.reset();  // `mark` creates one on demand
    return;
  }
  c_.last_ = std::make_shared<EventMark>(c_.events_, stream_of(options_), false);
  c_.watcher_.enqueued(c_.last_);
  entered_ = false;
}

NcclCommunicator::Group::Group(NcclCommunicator& communicator) : c_(communicator) {
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
}

NcclCommunicator::OutsideGroups::OutsideGroups(NcclCommunicator& communicator)
    : c_(communicator), depth_(std::exchange(communicator.group_depth_, 0)) {
  for (int i = 0; i < depth_; ++i) c_.handle_->check(functions().group_end(), "ncclGroupEnd");
}

NcclCommunicator::OutsideGroups::~OutsideGroups() {
  for (int i = 0; i < depth_; ++i) (void)functions().group_start();
  c_.group_depth_ = depth_;
}

Scratch& NcclCommunicator::captured_scratch() {
  std::shared_ptr<Scratch>& captured = captured_[*capture_];
  if (!captured) {
    captured = std::make_shared<Scratch>(true);
    handle_->hold_until_end(captured);  // NCCL ends when no graph with its calls is left
  }
  return *captured;
}

void NcclCommunicator::as_one(const Signature& whole, const CallOptions& options,
                              const std::function<void(const CallOptions&)>& calls) {
  Call call(*this, whole, options);
  Group group(*this);
  end_after(call, group, [&] { calls(options); });
}

void NcclCommunicator::as_group(const CallOptions& options, const std::function<void()>& calls) {
  Call call(*this, {.op = Op::kGroup}, options, Call::Compared::kNever);
  Group group(*this);
  is_group_ = true;  // until `call` ends
  end_after(call, group, calls);
}

void NcclCommunicator::end_after(Call& call, Group& group, const std::function<void()>& calls) {
  std::exception_ptr error;
  try {
    calls();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    group.end();
    call.end();
  } catch (...) {
    if (!error) throw;
  }
  if (error) std::rethrow_exception(error);
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

std::shared_ptr<Mark> NcclCommunicator::record(StreamHandle stream) {
  const cuda::DeviceGuard device(handle_->device());
  if (cuda::capture_of(stream)) {
    throw Error(ErrorCode::kState,
                "the first send or receive between two ranks cannot be captured, since it connects "
                "them: make one before the capture");
  }
  return std::make_shared<EventMark>(events_, stream, false);
}

// --- Memory, closing --------------------------------------------------------------------------

// All ranks wait for each other while NCCL creates a window, so this is a collective, but not in a
// stream.
std::shared_ptr<std::byte> NcclCommunicator::allocate(std::size_t bytes,
                                                      const CallOptions& options) {
  const Call call(*this, {.op = Op::kEmpty, .count = bytes}, options, Call::Compared::kNever);
  const auto memory = std::make_shared<NcclMemory>(handle_, bytes, options, checker_);
  // The caller may drop the memory while a call uses it, and NCCL does not wait.
  return {memory->data(), [memory](std::byte*) { memory->wait_for_device(); }};
}

void NcclCommunicator::share_failures(GpuCommunicator& other) {
  Handle::share_failures(handle_, dynamic_cast<NcclCommunicator&>(other).handle_);
}

// Drains first: NCCL's own destruction would wait without a timeout and could not be aborted.
void NcclCommunicator::close() noexcept {
  watcher_.drain();
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  while (checker_ != nullptr && handle_->is_usable() && !checker_->settle(kBetweenLooks)) continue;
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

struct Abort {
  void operator()(abi::Comm comm) const noexcept { (void)functions().abort(comm); }
};
using Connected = std::unique_ptr<ncclComm, Abort>;

Connected connect_blocking(const Connection& connection) {
  constexpr int kBlocksOfLane = 8;  // so that the kernels of many lanes run at the same time
  cuda::make_current(connection.device);
  const cuda::RelaxedCapture relaxed;
  abi::Comm comm = nullptr;
  abi::Config config;
  config.blocking = 1;
  int rank = connection.rank;
  int size = connection.size;
  if (connection.lane) {
    rank = connection.rank == connection.lane->sender ? 0 : 1;
    size = 2;
    config.max_ctas = kBlocksOfLane;
  }
  const abi::Result result = functions().init_rank(&comm, size, connection.id, rank, &config);
  if (result == abi::kInProgress) {  // the environment overrules the configuration
    (void)functions().abort(comm);
    throw Error(ErrorCode::kUnsupported,
                "fastdist needs NCCL's blocking communicators: unset NCCL_COMM_BLOCKING");
  }
  if (result != abi::kSuccess) throw to_error(result, "ncclCommInitRank", nullptr);
  return Connected(comm);
}

// Connects in a thread, because NCCL offers no other way to give up. What is connected after that
// is aborted with the thread's state.
abi::Comm connect_ranks(const Connection& connection, const CallOptions& options) {
  std::packaged_task<Connected()> attempt([connection] { return connect_blocking(connection); });
  auto connected = attempt.get_future();
  std::thread(std::move(attempt)).detach();
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  while (connected.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    if (std::chrono::steady_clock::now() > deadline) {
      refuse(ErrorCode::kTimeout, "NCCL has not connected the ranks in time: rank ",
             connection.rank, " of ", connection.size, " is waiting for other ranks");
    }
    options.caller->check_interrupt();
  }
  return connected.get().release();
}

}  // namespace

std::unique_ptr<GpuCommunicator> connect(const Connection& connection, const CallOptions& options) {
  options.caller->may_block();
  const cuda::DeviceGuard device(connection.device);
  const cuda::RelaxedCapture relaxed;  // connecting allocates streams and memory
  cuda::load_packing_kernels();
  auto handle = std::make_shared<Handle>(connect_ranks(connection, options), connection.device);
  return std::make_unique<NcclCommunicator>(std::move(handle), connection);
}

}  // namespace fastdist::nccl
