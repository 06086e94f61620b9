// The part of NVTX that fastdist uses. It counts ranges instead of telling a profiler.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

#define NVTX_VERSION 3
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE sizeof(nvtxEventAttributes_t)
#define NVTX_MESSAGE_TYPE_ASCII 1

struct nvtxDomainRegistration_st;
using nvtxDomainHandle_t = nvtxDomainRegistration_st*;

struct nvtxEventAttributes_t {
  std::uint16_t version;
  std::uint16_t size;
  std::int32_t messageType;
  union {
    const char* ascii;
  } message;
};

VIRTUAL_GPU_EXPORT nvtxDomainHandle_t nvtxDomainCreateA(const char* name);
VIRTUAL_GPU_EXPORT int nvtxDomainRangePushEx(nvtxDomainHandle_t domain,
                                             const nvtxEventAttributes_t* attributes);
VIRTUAL_GPU_EXPORT int nvtxDomainRangePop(nvtxDomainHandle_t domain);

// Returns how many ranges of a name this thread has ended; -1 if one of the thread has not ended.
VIRTUAL_GPU_EXPORT int virtual_gpu_ranges(const char* name);
