// The parts of NCCL's C ABI (2.27 and newer) that fastdist calls. They are declared here rather
// than included, because NCCL is found at run time in whatever version the process has loaded.
// Source: docs.nvidia.com/deeplearning/nccl. tests/cpp/nccl_header.cpp compares this file with
// nccl.h.
#pragma once

#include <array>
#include <climits>
#include <cstddef>

struct ncclComm;
struct CUstream_st;

namespace fastdist::nccl::abi {

using Comm = ncclComm*;
using Stream = CUstream_st*;
using Window = struct OpaqueWindow*;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct UniqueId {
  std::array<char, 128> bytes;
};

// The layout of 2.27. Newer versions append fields, and use `size` to detect that they are missing.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xCAFEBEEF;
  unsigned version = 22700;
  int blocking = INT_MIN;  // INT_MIN and null mean NCCL's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;
  const char* comm_name = nullptr;
  int collnet_enable = INT_MIN;
  int cta_policy = INT_MIN;
  int shrink_share = INT_MIN;
  int nvls_ctas = INT_MIN;
};

inline constexpr int kSymmetricWindow = 1;

// All functions: the name here, the name in NCCL, and the parameters. Optional functions are null
// if the library is too old to have them.
#define FASTDIST_NCCL_FUNCTIONS(REQUIRED, OPTIONAL)                                              \
  REQUIRED(get_version, ncclGetVersion, (int*))                                                  \
  REQUIRED(get_unique_id, ncclGetUniqueId, (UniqueId*))                                          \
  REQUIRED(init_rank, ncclCommInitRankConfig, (Comm*, int, UniqueId, int, Config*))              \
  REQUIRED(destroy, ncclCommDestroy, (Comm))                                                     \
  REQUIRED(abort, ncclCommAbort, (Comm))                                                         \
  REQUIRED(get_async_error, ncclCommGetAsyncError, (Comm, Result*))                              \
  REQUIRED(mem_alloc, ncclMemAlloc, (void**, std::size_t))                                       \
  REQUIRED(mem_free, ncclMemFree, (void*))                                                       \
  REQUIRED(register_memory, ncclCommRegister, (Comm, void*, std::size_t, void**))                \
  REQUIRED(deregister_memory, ncclCommDeregister, (Comm, void*))                                 \
  REQUIRED(all_reduce, ncclAllReduce,                                                            \
           (const void*, void*, std::size_t, DataType, RedOp, Comm, Stream))                     \
  REQUIRED(reduce, ncclReduce,                                                                   \
           (const void*, void*, std::size_t, DataType, RedOp, int, Comm, Stream))                \
  REQUIRED(broadcast, ncclBroadcast,                                                             \
           (const void*, void*, std::size_t, DataType, int, Comm, Stream))                       \
  REQUIRED(all_gather, ncclAllGather, (const void*, void*, std::size_t, DataType, Comm, Stream)) \
  REQUIRED(reduce_scatter, ncclReduceScatter,                                                    \
           (const void*, void*, std::size_t, DataType, RedOp, Comm, Stream))                     \
  REQUIRED(send, ncclSend, (const void*, std::size_t, DataType, int, Comm, Stream))              \
  REQUIRED(recv, ncclRecv, (void*, std::size_t, DataType, int, Comm, Stream))                    \
  REQUIRED(group_start, ncclGroupStart, ())                                                      \
  REQUIRED(group_end, ncclGroupEnd, ())                                                          \
  OPTIONAL(window_register, ncclCommWindowRegister, (Comm, void*, std::size_t, Window*, int))    \
  OPTIONAL(window_deregister, ncclCommWindowDeregister, (Comm, Window))                          \
  OPTIONAL(all_to_all, ncclAlltoAll, (const void*, void*, std::size_t, DataType, Comm, Stream))  \
  OPTIONAL(gather, ncclGather, (const void*, void*, std::size_t, DataType, int, Comm, Stream))   \
  OPTIONAL(scatter, ncclScatter, (const void*, void*, std::size_t, DataType, int, Comm, Stream))

#define FASTDIST_NCCL_MEMBER(name, symbol, parameters) Result(*name) parameters = nullptr;
struct Functions {
  FASTDIST_NCCL_FUNCTIONS(FASTDIST_NCCL_MEMBER, FASTDIST_NCCL_MEMBER)
  const char* (*error_text)(Result) = nullptr;     // ncclGetErrorString
  const char* (*last_error_text)(Comm) = nullptr;  // ncclGetLastError
};
#undef FASTDIST_NCCL_MEMBER

}  // namespace fastdist::nccl::abi
