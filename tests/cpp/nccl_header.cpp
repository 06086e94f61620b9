// Compares csrc/nccl/abi.h with NVIDIA's header, if installed: the test is that this file compiles.

#include <nccl.h>

#include <type_traits>

#include "nccl/abi.h"

namespace {

using fastdist::nccl::abi::Config;
using fastdist::nccl::abi::UniqueId;
namespace abi = fastdist::nccl::abi;

#define SAME_NUMBER(ours, theirs) \
  static_assert(static_cast<int>(abi::ours) == static_cast<int>(theirs))
SAME_NUMBER(kSuccess, ncclSuccess);
SAME_NUMBER(kUnhandledCudaError, ncclUnhandledCudaError);
SAME_NUMBER(kSystemError, ncclSystemError);
SAME_NUMBER(kInternalError, ncclInternalError);
SAME_NUMBER(kInvalidArgument, ncclInvalidArgument);
SAME_NUMBER(kInvalidUsage, ncclInvalidUsage);
SAME_NUMBER(kRemoteError, ncclRemoteError);
SAME_NUMBER(kInProgress, ncclInProgress);
SAME_NUMBER(kInt8, ncclInt8);
SAME_NUMBER(kUint8, ncclUint8);
SAME_NUMBER(kInt32, ncclInt32);
SAME_NUMBER(kUint32, ncclUint32);
SAME_NUMBER(kInt64, ncclInt64);
SAME_NUMBER(kUint64, ncclUint64);
SAME_NUMBER(kFloat16, ncclFloat16);
SAME_NUMBER(kFloat32, ncclFloat32);
SAME_NUMBER(kFloat64, ncclFloat64);
SAME_NUMBER(kBfloat16, ncclBfloat16);
SAME_NUMBER(kSum, ncclSum);
SAME_NUMBER(kProd, ncclProd);
SAME_NUMBER(kMax, ncclMax);
SAME_NUMBER(kMin, ncclMin);
SAME_NUMBER(kAvg, ncclAvg);
SAME_NUMBER(kSymmetricWindow, NCCL_WIN_COLL_SYMMETRIC);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
#ifdef NCCL_API_MAGIC
static_assert(Config{}.magic == NCCL_API_MAGIC);
#endif

#define SAME_PLACE(ours, theirs) \
  static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
SAME_PLACE(traffic_class, trafficClass);
SAME_PLACE(comm_name, commName);
SAME_PLACE(collnet_enable, collnetEnable);
SAME_PLACE(cta_policy, CTAPolicy);
SAME_PLACE(shrink_share, shrinkShare);
SAME_PLACE(nvls_ctas, nvlsCTAs);
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));

// Checks that two functions have equally many parameters, passed in the same way.
template <class Ours, class Theirs>
inline constexpr bool kPassedAlike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
    std::is_class_v<Ours> == std::is_class_v<Theirs>;
template <class... Ours, class... Theirs>
constexpr bool called_alike(abi::Result (*)(Ours...), ncclResult_t (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (kPassedAlike<Ours, Theirs> && ...);
  }
  return false;
}

}  // namespace

namespace fastdist::nccl::abi {

#define SAME_CALL(name, symbol, parameters) \
  static_assert(called_alike(static_cast<Result(*) parameters>(nullptr), &symbol));
// The optional functions that NCCL 2.27 lacks.
#if NCCL_VERSION_CODE >= 22807
FASTDIST_NCCL_FUNCTIONS(SAME_CALL, SAME_CALL)
#else
#define NOT_COMPARED(name, symbol, parameters)
FASTDIST_NCCL_FUNCTIONS(SAME_CALL, NOT_COMPARED)
#endif

}  // namespace fastdist::nccl::abi
