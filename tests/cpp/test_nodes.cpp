// Memory interleaved over NUMA nodes.

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

#include "check.h"
#include "table/memory.h"

namespace fastdist::test {
namespace {

using namespace fastdist::table;

constexpr std::size_t kBytes = std::size_t{2} << 20;

// Returns the kernel's policy for the page at an address, or the thread's for null; -1 if unknown.
int policy(void* address) {
  int mode = -1;
  std::array<unsigned long, 16> mask{};
  const unsigned long flags = address == nullptr ? 0 : MPOL_F_ADDR;
  if (syscall(SYS_get_mempolicy, &mode, mask.data(), 1025UL, address, flags) != 0) return -1;
  return mode;
}

struct Mapping {
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ~Mapping() { munmap(data, kBytes); }
};

CASE(memory_comes_from_all_nodes_in_turn) {
  if (policy(nullptr) != MPOL_DEFAULT) return;  // not permitted, or set by numactl
  CHECK(nodes_allowed() != Nodes{});
  Nodes two = nodes_allowed();
  two[0] |= 3;  // the kernel ignores nodes that do not exist
  const Mapping spread_out;
  const Mapping left;
  spread(static_cast<std::byte*>(spread_out.data), kBytes, two);
  spread(static_cast<std::byte*>(left.data), kBytes, Nodes{1});
  CHECK(policy(spread_out.data) == MPOL_INTERLEAVE);
  CHECK(policy(left.data) == MPOL_DEFAULT);
}

CASE(a_choice_that_was_made_stays) {
  const unsigned long first = 1;
  if (syscall(SYS_set_mempolicy, MPOL_PREFERRED, &first, 65UL) != 0) return;
  const Mapping mapping;
  spread(static_cast<std::byte*>(mapping.data), kBytes, Nodes{3});
  const int its_own = policy(mapping.data);
  syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0UL);
  CHECK(its_own == MPOL_DEFAULT);  // falls back to the thread's policy
}

}  // namespace
}  // namespace fastdist::test
