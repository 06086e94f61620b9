// The version of this library; one library is built per version (CMakeLists.txt).

#include "virtual_gpu/nccl/comm.h"

namespace virtual_nccl {

int version() { return VIRTUAL_NCCL_VERSION; }

}  // namespace virtual_nccl
