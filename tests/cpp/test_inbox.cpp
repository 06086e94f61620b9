// Messages with tags, received in other orders than they were sent in, by several threads.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/inbox.h"
#include "world.h"

namespace fastdist::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kTags = 5;
constexpr std::size_t kMessages = 40;  // of each tag

std::size_t count_of(std::uint64_t tag, std::size_t i) { return (tag * 977 + i * 131) % 5000; }

std::int32_t value_of(std::uint64_t tag, std::size_t i) {
  return static_cast<std::int32_t>(tag * 100000 + i);
}

void send_all(HostCommunicator& c, int dst, unsigned seed) {
  std::vector<std::uint64_t> tags;
  for (std::uint64_t tag = 0; tag < kTags; ++tag) tags.insert(tags.end(), kMessages, tag);
  std::shuffle(tags.begin(), tags.end(), std::mt19937(seed));
  std::vector<std::size_t> sent(kTags);
  for (const std::uint64_t tag : tags) {
    const std::size_t i = sent[tag]++;
    const Array a(DType::kInt32, count_of(tag, i));
    std::fill_n(a.as<std::int32_t>(), a.count(), value_of(tag, i));
    CallOptions options = patient();
    options.tag = tag;
    c.send(a.view(), dst, options);
  }
}

void receive_one(Inbox& inbox, std::uint64_t tag, std::size_t i) {
  const Array a(DType::kInt32, count_of(tag, i));
  const auto receive = std::make_shared<Receive>(a.view(), tag, Fit::kLess);
  inbox.add(receive);
  inbox.read_until(*receive, patient());
  CHECK(receive->work()->wait(10s));
  CHECK(receive->source() == 0);
  for (std::size_t at = 0; at < a.count(); ++at) {
    CHECK(a.as<std::int32_t>()[at] == value_of(tag, i));
  }
}

CASE(a_thread_for_each_tag_receives_in_the_order_of_its_messages) {
  for (const Tuning& tuning : {tiny_tuning(), staged_tuning(), in_place_tuning()}) {
    with_threads(2, tuning, [](HostCommunicator& c) {
      for (unsigned round = 0; round < 5; ++round) {
        if (c.rank() == 0) {
          send_all(c, 1, round);
        } else {
          Inbox inbox(c, 0);
          std::vector<std::thread> readers;
          for (std::uint64_t tag = 0; tag < kTags; ++tag) {
            readers.emplace_back([&, tag] {
              for (std::size_t i = 0; i < kMessages; ++i) receive_one(inbox, tag, i);
            });
          }
          for (std::thread& reader : readers) reader.join();
        }
        c.barrier(patient());
      }
    });
  }
}

CASE(messages_that_nobody_wants_yet_are_kept) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    if (c.rank() == 0) return send_all(c, 1, 1);
    Inbox inbox(c, 0);
    for (std::uint64_t tag = kTags; tag-- > 0;) {
      for (std::size_t i = 0; i < kMessages; ++i) receive_one(inbox, tag, i);
    }
  });
}

CASE(a_receive_that_is_too_small_throws_on_both_ranks_if_it_waits) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kFloat32, c.rank() == 0 ? 4 : 3);
    if (c.rank() == 0) {
      CHECK_THROWS(ErrorCode::kMismatch, c.send(a.view(), 1, patient()));
      const Array other(DType::kFloat32, 3);
      CallOptions tagged = patient();
      tagged.tag = 7;
      c.send(other.view(), 1, tagged);
      c.send(other.view(), 1, patient());
      return;
    }
    Inbox inbox(c, 0);
    const auto wrong = std::make_shared<Receive>(a.view(), 0, Fit::kLess);
    inbox.add(wrong);
    CHECK_THROWS(ErrorCode::kMismatch, inbox.read_until(*wrong, patient()));
    // A message that was kept fails at its receiver alone.
    const Array right(DType::kFloat32, 3);
    const auto later = std::make_shared<Receive>(right.view(), 0, Fit::kLess);
    inbox.add(later);
    inbox.read_until(*later, patient());
    const Array small(DType::kFloat32, 2);
    const auto kept = std::make_shared<Receive>(small.view(), 7, Fit::kLess);
    inbox.add(kept);
    CHECK_THROWS(ErrorCode::kMismatch, kept->work()->wait(10s));
  });
}

CASE(a_receive_without_tag_leaves_messages_with_tags_to_others) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    if (c.rank() == 0) return send_all(c, 1, 2);
    Inbox inbox(c, 0);
    const auto receive_plain = [&](std::size_t i) {
      const Array a(DType::kInt32, count_of(0, i));
      inbox.receive(a.view(), 0, patient());
      for (std::size_t at = 0; at < a.count(); ++at) {
        CHECK(a.as<std::int32_t>()[at] == value_of(0, i));
      }
    };
    for (std::size_t i = 0; i < kMessages / 2; ++i) receive_plain(i);
    std::vector<std::thread> readers;
    for (std::uint64_t tag = 1; tag < kTags; ++tag) {
      readers.emplace_back([&, tag] {
        for (std::size_t i = 0; i < kMessages; ++i) receive_one(inbox, tag, i);
      });
    }
    for (std::size_t i = kMessages / 2; i < kMessages; ++i) receive_plain(i);
    for (std::thread& reader : readers) reader.join();
  });
}

CASE(a_message_that_was_kept_must_have_the_size_and_dtype_of_its_receive) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kFloat32, 4);
    if (c.rank() == 0) {
      CallOptions tagged = patient();
      tagged.tag = 3;
      c.send(a.view(), 1, tagged);
      c.send(a.view(), 1, patient());
      return;
    }
    Inbox inbox(c, 0);
    inbox.receive(a.view(), 0, patient());
    const Array small(DType::kFloat32, 3);
    CHECK_THROWS(ErrorCode::kMismatch, inbox.receive(small.view(), 3, patient()));
  });
}

CASE(a_receive_takes_fewer_bytes_of_another_dtype) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    CallOptions tagged = patient();
    tagged.tag = 7;
    if (c.rank() == 0) {
      const Array a(DType::kFloat32, 2);
      a.as<float>()[0] = a.as<float>()[1] = 5;
      c.send(a.view(), 1, tagged);
      return c.send(a.view(), 1, patient());
    }
    Inbox inbox(c, 0);
    for (const std::uint64_t tag :
         {std::uint64_t{0}, std::uint64_t{7}}) {  // the second message was kept
      const Array a(DType::kUInt8, 12);
      std::memset(a.view().data, 0, 12);
      const auto receive = std::make_shared<Receive>(a.view(), tag, Fit::kLess);
      inbox.add(receive);
      inbox.read_until(*receive, patient());
      CHECK(receive->work()->wait(10s));
      const std::array<float, 3> expected{5, 5, 0};
      CHECK(std::memcmp(a.view().data, expected.data(), 12) == 0);
    }
  });
}

CASE(a_receive_in_several_inboxes_takes_one_message) {
  with_threads(3, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kInt32, 1);
    a.as<std::int32_t>()[0] = c.rank();
    if (c.rank() != 2) return c.send(a.view(), 2, patient());
    Inbox first(c, 0);
    Inbox second(c, 1);
    std::vector<std::int32_t> received;
    for (int i = 0; i < 2; ++i) {
      const auto any = std::make_shared<Receive>(a.view(), 0, Fit::kLess);
      first.add(any);
      second.add(any);
      while (!any->is_done()) {
        if (!first.read_if_any(patient())) (void)second.read_if_any(patient());
      }
      CHECK(any->source() == a.as<std::int32_t>()[0]);
      received.push_back(any->source());
    }
    std::sort(received.begin(), received.end());
    CHECK(received == (std::vector<std::int32_t>{0, 1}));
  });
}

}  // namespace
}  // namespace fastdist::test
