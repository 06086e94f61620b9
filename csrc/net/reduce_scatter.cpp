// reduce_scatter between machines: on every machine, one rank reduces the machine's inputs for a
// destination and sends it the partial results.

#include <algorithm>
#include <vector>

#include "host/kernels.h"
#include "net/communicator.h"

namespace fastdist::net {
namespace {

constexpr std::size_t kBytesAtOnce = std::size_t{2} << 20;

}  // namespace

void NetCommunicator::reduce_scatter(TensorView in, TensorView out, ReduceOp op,
                                     const CallOptions& options) {
  const auto signature = signature_of({.op = Op::kReduceScatter, .reduce_op = op}, {&in, 1});
  run(signature, options, {}, nullptr, [&] {
    const DType wide = dtype_of_sums(in.dtype);
    const std::size_t item = size_of(in.dtype);
    const std::size_t wide_item = size_of(wide);
    const std::size_t chunk = kBytesAtOnce / places_.size() / item + 1;
    const int here = machine_of(rank_);
    for (std::size_t begin = 0; begin < out.count; begin += chunk) {
      const std::size_t count = std::min(chunk, out.count - begin);
      const std::size_t bytes = count * wide_item;  // of a partial result
      const std::size_t sent = here_.size() * bytes;
      std::byte* const own = own_[0].of(*inner_, places_.size() * sent);
      std::byte* const received = parts_[0].of(*inner_, all_partials() * bytes);
      for (int m = 0; m < machines(); ++m) {
        if (m == here) continue;
        post_receive(partner(m), received + first_partial(m) * bytes,
                     (first_partial(m + 1) - first_partial(m)) * bytes);
      }
      std::byte* mine = nullptr;
      // Begin with the next machine, so that not all send to the same one at the same time.
      std::size_t next = 0;
      for (int m = 0; m <= here; ++m) next += ranks_of(m).size();
      for (std::size_t j = 0; j < order_.size(); ++j) {
        const std::size_t i = (next + j) % order_.size();
        const int q = order_[i];
        const int worker = local_of(q) % width();
        std::byte* source = in.data + (static_cast<std::size_t>(q) * out.count + begin) * item;
        if (wide != in.dtype) {
          std::byte* const packed = packed_.of(*inner_, bytes);
          host::convert(wide, packed, in.dtype, source, count, 1.0F);
          source = packed;
        }
        std::byte* const target = own + i * sent;
        const bool is_worker = worker == local_of(rank_);
        const TensorView from{source, count, wide};
        if (here_.size() == 1) {
          const TensorView to{target, count, wide};
          inside(2, [&](const CallOptions& o) {
            inner_->reduce({&from, 1}, is_worker ? TensorViews{&to, 1} : TensorViews{}, summed(op),
                           worker, o);
          });
        } else {
          const std::size_t all = static_cast<std::size_t>(width()) * count;
          std::byte* const gathered = gathered_.of(*inner_, all * wide_item);
          const TensorView to{gathered, all, wide};
          inside(2, [&](const CallOptions& o) { inner_->gather(from, to, worker, o); });
          if (is_worker) reduce_here(gathered, bytes, wide, summed(op), target, 1, count);
        }
        if (q == rank_) mine = target;
        if (!is_worker || is_here(q)) continue;
        post_send(q, target, sent);
        progress();
      }
      std::vector<const std::byte*> sources;
      await_all_received();
      for (const std::size_t number : partials_) {
        const bool is_own = number >= first_partial(here) && number < first_partial(here + 1);
        sources.push_back(is_own ? mine + (number - first_partial(here)) * bytes
                                 : received + number * bytes);
      }
      std::byte* const sums = results_[0].of(*inner_, bytes);
      host::reduce(wide, op, sums, nullptr, sources, count, after_, places_.size());
      narrow(wide, sums, in.dtype, out.data + begin * item, count);
      await_all_sent();
    }
  });
}

}  // namespace fastdist::net
