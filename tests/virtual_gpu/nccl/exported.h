// The library's exported functions: those of csrc/nccl/abi.h, by NCCL's names.
#pragma once

#include "nccl/abi.h"

namespace virtual_nccl::exported {

using namespace fastdist::nccl::abi;

#define VIRTUAL_NCCL_DECLARE(name, symbol, parameters) \
  extern "C" __attribute__((visibility("default"))) Result symbol parameters;
FASTDIST_NCCL_FUNCTIONS(VIRTUAL_NCCL_DECLARE, VIRTUAL_NCCL_DECLARE)
#undef VIRTUAL_NCCL_DECLARE
extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(Result result);
extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(Comm comm);

}  // namespace virtual_nccl::exported
