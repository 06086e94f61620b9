// A range of host time that NVIDIA's profilers show by its name (NVTX), around the ranges of NCCL.
#pragma once

#include <nvtx3/nvToolsExt.h>

#include "core/noncopyable.h"

namespace fastdist::cuda {

// Ranges of one thread must end in the reverse order of their beginnings.
class Range : NonCopyable {
 public:
  explicit Range(const char* name) noexcept {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    (void)nvtxDomainRangePushEx(domain(), &attributes);
  }
  ~Range() { (void)nvtxDomainRangePop(domain()); }

 private:
  static nvtxDomainHandle_t domain() noexcept {
    static const nvtxDomainHandle_t made = nvtxDomainCreateA("fastdist");
    return made;
  }
};

}  // namespace fastdist::cuda
