#include "net/state.h"

#include <cstring>

namespace fastdist::net {

std::string serialize(const Waiting& waiting) {
  std::string text(reinterpret_cast<const char*>(&waiting.state), sizeof(State));
  const auto add = [&text](const auto& numbers) {
    text.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0]));
  };
  add(waiting.sent);
  add(waiting.received);
  add(waiting.awaited);
  return text + waiting.site;
}

std::optional<Waiting> parse(const std::string& text, std::size_t ranks) {
  Waiting waiting;
  const State& state = waiting.state;
  if (text.size() < sizeof(State)) return std::nullopt;
  std::memcpy(&waiting.state, text.data(), sizeof(State));
  if (state.ranks != ranks || state.awaited > kMostAwaited ||
      text.size() < sizeof(State) + 2 * ranks * sizeof(std::uint32_t) +
                        state.awaited * sizeof(std::uint64_t)) {
    return std::nullopt;
  }
  const char* at = text.data() + sizeof(State);
  const auto take = [&at](auto& numbers, std::size_t count) {
    numbers.resize(count);
    const std::size_t bytes = count * sizeof(numbers[0]);
    if (bytes != 0) std::memcpy(numbers.data(), at, bytes);
    at += bytes;
  };
  take(waiting.sent, ranks);
  take(waiting.received, ranks);
  take(waiting.awaited, state.awaited);
  waiting.site.assign(at, text.data() + text.size());
  waiting.call = unpack_signature(waiting.state.signature, waiting.state.count, waiting.state.list);
  return waiting;
}

}  // namespace fastdist::net
