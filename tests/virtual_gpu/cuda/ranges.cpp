#include <nvtx3/nvToolsExt.h>

#include <map>
#include <string>
#include <vector>

namespace {

thread_local std::vector<std::string> open;
thread_local std::map<std::string, int> ended;

}  // namespace

nvtxDomainHandle_t nvtxDomainCreateA(const char*) { return nullptr; }

int nvtxDomainRangePushEx(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  open.emplace_back(attributes->message.ascii);
  return static_cast<int>(open.size());
}

int nvtxDomainRangePop(nvtxDomainHandle_t) {
  ++ended[open.back()];
  open.pop_back();
  return static_cast<int>(open.size());
}

int virtual_gpu_ranges(const char* name) { return open.empty() ? ended[name] : -1; }
