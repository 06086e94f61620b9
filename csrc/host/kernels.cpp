#include "host/kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/instruction_set.h"
#include "core/reduction_tree.h"
#include "host/kernels_table.h"

namespace fastdist::host {
namespace {

const Kernels& pick() {
#if defined(__x86_64__)
  const InstructionSet best = fastdist::instruction_set();
  if (best == InstructionSet::kAvx512) return avx512::kKernels;
  if (best == InstructionSet::kAvx2) return avx2::kKernels;
#endif
  return generic::kKernels;
}

const Kernels& kernels() {
  static const Kernels& picked = pick();
  return picked;
}

}  // namespace

Groups::Groups(std::size_t n, std::span<const std::uint8_t> after, std::size_t divisor) {
  if (n > kUsual) many_.resize(n);
  Group* const groups = n > kUsual ? many_.data() : usual_.data();
  const auto follow = [&](std::size_t i) {
    return static_cast<int>(after.empty() ? reductions_after(i, n) : after[i]);
  };
  std::size_t n_groups = 0;
  for (std::size_t i = 0; i < n;) {
    std::size_t sources = 1;
    int own = 0;  // reductions within the group
    if (i + 1 < n && follow(i) == 0 && follow(i + 1) >= 1) sources = 2, own = 1;
    if (i + 3 < n && own == 1 && follow(i + 1) == 1 && follow(i + 2) == 0 && follow(i + 3) >= 2) {
      sources = 4, own = 2;
    }
    i += sources;
    groups[n_groups++] = {static_cast<std::uint8_t>(sources),
                          static_cast<std::uint8_t>(follow(i - 1) - own)};
  }
  tree_ = {groups, n_groups, n, divisor == 0 ? n : divisor};
}

void reduce(DType dtype, ReduceOp op, std::byte* dst, std::byte* also,
            std::span<const std::byte* const> sources, std::size_t count,
            std::span<const std::uint8_t> after, std::size_t divisor) {
  const Groups groups(sources.size(), after, divisor);
  const ReduceFunction* const functions = kernels().reductions[static_cast<int>(dtype)];
  functions[static_cast<int>(op)](dst, also, sources.data(), groups.tree(), count);
}

void copy(std::byte* dst, const std::byte* src, std::size_t bytes, bool stream) {
  if (bytes == 0 || dst == src) return;
  // memcpy's `rep movsb` is fastest on lines that another core has just written. On Zen 3 and 4 it
  // falls from 40 to 2 GB/s if dst is up to 31 bytes behind src modulo 4096, as a numpy array
  // (offset 16 bytes) is behind the start of a page.
  const auto behind = static_cast<std::size_t>(dst - src) % 4096;
  const bool slow = behind != 0 && behind < 64;
  if (stream || slow) {
    (stream ? kernels().copy_past_caches : kernels().copy)(dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

void convert(DType dst_dtype, std::byte* dst, DType src_dtype, const std::byte* src,
             std::size_t count, float scale) {
  kernels().convert(dst_dtype, dst, src_dtype, src, count, scale);
}

double largest_magnitude(DType dtype, const std::byte* src, std::size_t count) {
  double largest = 0.0;
  const auto scan = [&](auto* values) {
    for (std::size_t i = 0; i < count; ++i) {
      const double magnitude = std::fabs(static_cast<double>(values[i]));
      if (!(magnitude <= largest)) largest = magnitude;
      if (std::isnan(largest)) return;
    }
  };
  if (dtype == DType::kFloat64) {
    scan(reinterpret_cast<const double*>(src));
  } else {
    scan(reinterpret_cast<const float*>(src));
  }
  return largest;
}

std::string_view instruction_set() { return kernels().name; }

// --- copies into memory that peers read ---------------------------------------------------------

namespace {

constexpr std::size_t kTimed = 8192;
constexpr std::size_t kLeastPastCaches = 1024;
constexpr std::ptrdiff_t kLongestPeriod = std::ptrdiff_t{2} << 20;
// How much faster than through the caches stores must be past them, since the peer then reads from
// memory. Of 4 KiB, with waiting for memory, they take twice as long where cores are near each
// other, and a fourth of the time where they are not.
constexpr double kGain = 2.0;

}  // namespace

void CopyToPeers::operator()(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept {
  until_comparison_ -= static_cast<std::ptrdiff_t>(bytes);
  if (until_comparison_ <= 0 && bytes >= kTimed) {
    compare(dst, src);
    dst += kTimed;
    src += kTimed;
    bytes -= kTimed;
  }
  copy(dst, src, bytes, past_caches_ && bytes >= kLeastPastCaches);
}

// Copies kTimed bytes, half of them each way.
void CopyToPeers::compare(std::byte* dst, const std::byte* src) noexcept {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t kHalf = kTimed / 2;
  // A core goes on before its stores have been done, but not past an exchange.
  std::atomic<bool> word{false};
  const auto wait_for_stores = [&] { word.exchange(true, std::memory_order_seq_cst); };
  wait_for_stores();
  const auto start = Clock::now();
  copy(dst, src, kHalf, false);
  wait_for_stores();
  const auto middle = Clock::now();
  copy(dst + kHalf, src + kHalf, kHalf, true);
  wait_for_stores();
  const auto end = Clock::now();
  past_caches_ = middle - start > kGain * (end - middle);
  period_ = std::min(2 * period_, kLongestPeriod);
  until_comparison_ = period_;
}

}  // namespace fastdist::host
