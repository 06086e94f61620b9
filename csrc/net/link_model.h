// The time that bytes take between machines, and the choices that follow from it.
#pragma once

namespace fastdist::net {

// Equal on all ranks. Measured between the communicator's machines; the slowest link counts.
struct LinkModel {
  double latency_s = 50e-6;  // of a few bytes, one way
  double bytes_per_s = 1e9;  // in one direction, while the other is in use too

  // Reductions: true if each machine sends all its sums to every other machine. Otherwise it sends
  // each machine one part, and then sends the result of its own part to all.
  [[nodiscard]] bool reduces_directly(int machines, double bytes) const noexcept {
    const double m = machines;
    const double more_bytes = bytes * ((m - 1) - 2 * (m - 1) / m);
    return more_bytes / bytes_per_s <= latency_s;
  }
  // Broadcasts: true if bytes go from machine to machine, instead of from the root to all.
  [[nodiscard]] bool broadcasts_in_chain(int machines, double bytes) const noexcept {
    return machines > 2 && bytes / bytes_per_s > latency_s;
  }
};

}  // namespace fastdist::net
