// The locks that a call holds while it processes its items.
#pragma once

#include <cstddef>
#include <span>

#include "table/batch.h"

namespace fastdist::table {

// A window [visited, locked) of items ordered by stripe; the locks of the items' stripes are held.
template <class Stripe>
class LockWindow {
 public:
  LockWindow(const Striping& striping, std::span<const Item> items, Stripe* stripes)
      : striping_(striping), items_(items), stripes_(stripes) {}
  LockWindow(const LockWindow&) = delete;
  LockWindow& operator=(const LockWindow&) = delete;
  ~LockWindow() {
    while (visited_ < locked_) leave([](Stripe&) {});
  }

  // Locks the stripe of the next item, unless the previous item has locked it.
  Stripe& enter() {
    Stripe& next = stripe(locked_);
    if (locked_ == visited_ || &stripe(locked_ - 1) != &next) next.mutex.lock();
    ++locked_;
    return next;
  }
  // Leaves the oldest item of the window. Calls `last_call(stripe)` before a lock is released.
  template <class Call>
  void leave(Call&& last_call) {
    Stripe& done = stripe(visited_++);
    if (visited_ < locked_ && &stripe(visited_) == &done) return;
    last_call(done);
    done.mutex.unlock();
  }

 private:
  Stripe& stripe(std::size_t i) const { return stripes_[striping_.stripe(items_[i].key)]; }

  const Striping striping_;
  std::span<const Item> items_;
  Stripe* stripes_;
  std::size_t visited_ = 0;
  std::size_t locked_ = 0;
};

}  // namespace fastdist::table
