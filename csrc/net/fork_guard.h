// Closes connections in forked children.
//
// A connection lasts as long as any process holds it. Without this, peers would not notice that a
// rank has died while one of its children lives, such as a worker that loads data.
#pragma once

namespace fastdist::net {

// Makes `fd` refer to /dev/null in every child that is forked until `unguard`.
void guard_from_forks(int fd);
void unguard_from_forks(int fd) noexcept;

}  // namespace fastdist::net
