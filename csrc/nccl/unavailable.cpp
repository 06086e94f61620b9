// The GPU engine in builds without CUDA.

#include "core/error.h"
#include "cuda/devices.h"
#include "nccl/engine.h"

namespace fastdist::nccl {

abi::UniqueId make_unique_id() { throw Error(ErrorCode::kUnsupported, cuda::why_unusable()); }

std::unique_ptr<GpuCommunicator> connect(const Connection&, const CallOptions&) {
  throw Error(ErrorCode::kUnsupported, cuda::why_unusable());
}

}  // namespace fastdist::nccl
