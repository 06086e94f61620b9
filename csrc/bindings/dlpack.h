// The parts of DLPack's C ABI (version 1) that fastdist reads. Source: dmlc.github.io/dlpack.
#pragma once

#include <cstdint>

namespace fastdist::bindings::dlpack {

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaHost = 3;
inline constexpr std::uint64_t kReadOnly = 1;

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ManagedTensorVersioned {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// The functions that `type(array).__dlpack_c_exchange_api__` points to; they make no Python
// objects.
struct ExchangeApi {
  Version version;
  const void* previous;
  int (*allocate)(Tensor*, void**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, ManagedTensorVersioned**);
  int (*managed_to_object)(ManagedTensorVersioned*, void**);
  int (*tensor_from_object)(void* object, Tensor* out);  // may be null
  int (*current_stream)(std::int32_t, std::int32_t, void**);
};

}  // namespace fastdist::bindings::dlpack
