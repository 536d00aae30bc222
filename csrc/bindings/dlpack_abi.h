// dlpack_abi: the few C structures through which torch (2.11 and up) shows a tensor to a library
// that knows none of its headers.
//
// Floor     bindings
// Contract  DLPack 1.x: the layout of these structures, and of the function table that a tensor
//           type offers as __dlpack_c_exchange_api__, is stable within the major version.
//           dltensor_from_py_object borrows: it is valid while the tensor lives and is not resized.
// Source    the DLPack specification, version 1.3
// Tests     tests/test_arguments.py
#pragma once

#include <cstdint>

namespace pyringar::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4 };

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* object, Tensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

}  // namespace pyringar::dlpack
