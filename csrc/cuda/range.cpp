#include "cuda/range.h"

#include <nvtx3/nvToolsExt.h>

namespace fastdist::cuda {
namespace {

nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("fastdist");
  return made;
}

}  // namespace

Range::Range(const char* name) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  (void)nvtxDomainRangePushEx(domain(), &attributes);
}

Range::~Range() { (void)nvtxDomainRangePop(domain()); }

}  // namespace fastdist::cuda
