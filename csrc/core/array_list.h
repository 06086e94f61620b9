// Views several arrays of one dtype as one run of bytes, so that lists are fused without copying.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/types.h"

namespace fastdist {

class ArrayList {
 public:
  // A part of the run that lies within one array.
  struct Piece {
    std::size_t array;   // the index of that array
    std::size_t at;      // offset in that array
    std::size_t run_at;  // offset in the run
    std::size_t bytes;
    std::byte* data;
  };

  explicit ArrayList(TensorViews arrays) : arrays_(arrays) {
    if (arrays.size() == 1) {
      bytes_ = arrays[0].bytes();
      return;
    }
    ends_.reserve(arrays.size());
    for (const TensorView& a : arrays) ends_.push_back(bytes_ += a.bytes());
  }

  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] TensorViews arrays() const noexcept { return arrays_; }

  // Calls f(piece) for each piece of [begin, end), in order.
  void for_each_piece(std::size_t begin, std::size_t end, auto&& f) const {
    if (begin >= end) return;
    if (arrays_.size() == 1) {
      f(Piece{0, begin, begin, end - begin, arrays_[0].data + begin});
      return;
    }
    auto it = std::upper_bound(ends_.begin(), ends_.end(), begin);
    for (std::size_t at = begin; at < end; ++it) {
      const auto i = static_cast<std::size_t>(it - ends_.begin());
      const std::size_t start = i == 0 ? 0 : ends_[i - 1];
      const std::size_t stop = std::min(end, *it);
      if (stop > at) f(Piece{i, at - start, at, stop - at, arrays_[i].data + (at - start)});
      at = stop;
    }
  }

 private:
  TensorViews arrays_;
  std::vector<std::size_t> ends_;  // end of each array in the run; empty for a single array
  std::size_t bytes_ = 0;
};

// Calls f(inputs, outputs) for the arrays of each dtype. `out` may be empty.
void for_each_dtype(TensorViews in, TensorViews out, auto&& f) {
  const bool one = std::all_of(in.begin(), in.end(),
                               [&](const TensorView& a) { return a.dtype == in[0].dtype; });
  if (one) return f(in, out);
  for (int d = 0; d < kDTypeCount; ++d) {
    std::vector<TensorView> some_in, some_out;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].dtype != static_cast<DType>(d)) continue;
      some_in.push_back(in[i]);
      if (!out.empty()) some_out.push_back(out[i]);
    }
    if (!some_in.empty()) f(TensorViews(some_in), TensorViews(some_out));
  }
}

}  // namespace fastdist
