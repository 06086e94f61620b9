// The messages from one rank, matched with receives by their tags: a message that no receive wants
// yet is kept, so that tags may be received in another order than they were sent in.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/work.h"

namespace fastdist {

// Set in the tags of messages that carry objects.
inline constexpr std::uint64_t kObjectTag = std::uint64_t{1} << 63;

// Says which messages `rank` waits for, from `source`, and which it was sent instead.
[[nodiscard]] std::string describe_wait(int rank, std::uint64_t tag, const std::string& source,
                                        const std::set<std::uint64_t>& kept);

// What a message must be for the array that receives it.
enum class Fit : bool {
  kSame,  // of its size and dtype
  kLess,  // at most as many bytes, of any dtype
};

// A receive of one array, which ends once: with a message, or with an error.
class Receive {
 public:
  Receive(TensorView out, std::uint64_t tag, Fit fit) : out_(out), tag_(tag), fit_(fit) {}

  [[nodiscard]] TensorView out() const noexcept { return out_; }
  [[nodiscard]] std::uint64_t tag() const noexcept { return tag_; }
  [[nodiscard]] Fit fit() const noexcept { return fit_; }
  // Ended by `finish`; waiting throws its error.
  [[nodiscard]] const std::shared_ptr<Work>& work() const noexcept { return work_; }
  [[nodiscard]] bool is_done() const { return work_->is_done(); }
  // The rank whose message it was.
  [[nodiscard]] int source() const noexcept { return source_; }

  // Returns true to the one caller that may end this receive.
  [[nodiscard]] bool claim() noexcept { return !is_claimed_.exchange(true); }
  [[nodiscard]] bool is_claimed() const noexcept { return is_claimed_; }
  void finish(int source, std::exception_ptr error) noexcept;
  // Ends the receive with the present exception, unless a message has come for it, whose reader
  // then ends it. Waits for that. Must be called in a catch block.
  void withdraw() noexcept;

 private:
  TensorView out_;
  std::uint64_t tag_;
  Fit fit_;
  std::atomic<bool> is_claimed_{false};
  std::atomic<int> source_{-1};
  std::exception_ptr error_;
  std::shared_ptr<Work> work_ = std::make_shared<Work>([this] {
    if (error_) std::rethrow_exception(error_);
  });
};

// The receives of messages from one rank. All messages of that rank must be received through it.
// Thread-safe: of several threads that wait for messages of the rank, one reads for all.
class Inbox {
 public:
  Inbox(BlockingCommunicator& communicator, int source)
      : communicator_(communicator), source_(source) {}

  // Receives the next message with this tag, of the array's size and dtype.
  void receive(TensorView out, std::uint64_t tag, const CallOptions& options);
  // Adds a receive. Ends it if its message has come. It may be added to several inboxes.
  void add(const std::shared_ptr<Receive>& receive);
  // Waits until a receive that was added has ended. Throws its error.
  void read_until(Receive& receive, const CallOptions& options);
  // Reads a message if one has come and no other thread reads. Returns true if one was read.
  bool read_if_any(const CallOptions& options);
  // Takes a message that this rank sends to itself.
  void put(TensorView message, std::uint64_t tag);
  // Adds the tags of messages that were kept to `tags`.
  void add_kept(std::set<std::uint64_t>& tags);
  // Returns the number of the next receive, for the records of calls.
  [[nodiscard]] std::uint64_t next_number() noexcept { return ++number_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Kept {
    Message message;
    std::vector<std::byte> data;
  };
  // The right to read, unless another thread has it. Throws in a signal handler whose thread has.
  class Reading : NonCopyable {
   public:
    explicit Reading(Inbox& inbox);
    ~Reading();
    [[nodiscard]] explicit operator bool() const noexcept { return has_begun_; }

   private:
    Inbox& inbox_;
    bool has_begun_;
  };

  void wait_for(const Receive& receive, const CallOptions& options);
  // Waits for the next message; `receive` is the one that waits.
  [[nodiscard]] Message await(TensorView out, std::uint64_t tag, const CallOptions& options);
  // Reads a message into the receive that wants it, or keeps it.
  void read(const Message& next, const CallOptions& options);
  void put(Kept kept);
  // Returns and claims the first receive of this tag. Needs mutex_.
  [[nodiscard]] std::shared_ptr<Receive> take(std::uint64_t tag);
  // Must be called when the lists have changed. Needs mutex_.
  void note_lists() noexcept { is_plain_ = receives_.empty() && kept_.empty(); }
  void fill(Receive& receive, const Kept& kept) const noexcept;
  // Returns what a wait for this tag that fails should say: the tags of messages that were kept.
  [[nodiscard]] std::string other_tags(std::uint64_t tag);

  inline static thread_local const char this_thread = 0;  // its address identifies a thread

  BlockingCommunicator& communicator_;
  int source_;
  std::atomic<std::uint64_t> number_{0};
  std::atomic<const char*> reader_{nullptr};  // the thread that reads
  std::mutex mutex_;                          // guards the lists
  std::list<std::shared_ptr<Receive>> receives_;
  std::deque<Kept> kept_;
  std::atomic<bool> is_plain_{true};  // both lists are empty
};

}  // namespace fastdist
