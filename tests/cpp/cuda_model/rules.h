// rules: what programs for the rules of the model are made of.
//
// Tests     *rules_test.cpp
#pragma once

#include <cuda.h>

#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/args.h"
#include "cuda/kernels.h"
#include "cuda/table.h"
#include "runtime_model.h"

namespace pyringar::model {

struct Rule {
  const char* name;
  void (*check)();
  Options options = {};
};
extern const std::vector<Rule> kCaptureRules;
extern const std::vector<Rule> kDeviceRules;

inline constexpr std::size_t kBytes = 256;

inline void is(cudaError_t status, cudaError_t wanted) {
  CHECK(status == wanted, "error ", static_cast<int>(status), ", expected ",
        static_cast<int>(wanted));
}
inline void ok(cudaError_t status) { is(status, cudaSuccess); }

// The program must break this rule, and the message say so. What is left of it goes.
template <typename Program>
void breaks(const std::string& rule, const std::string& words, Program&& program) {
  try {
    program();
    run_to_end();
  } catch (const Broken& broken) {
    const std::string text = broken.what();
    CHECK(broken.rule == rule && text.find(words) != std::string::npos, text);
    drop_work();
    return;
  }
  CHECK(false, "nobody noticed: ", rule, ", ", words);
}

template <typename Program>
void on_thread(Program&& program) {
  std::thread(program).join();
}

inline cudaStream_t stream_on(int device, unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  ok(cudaSetDevice(device));
  ok(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

struct Event {
  explicit Event(int device = 0, unsigned flags = cudaEventDisableTiming) {
    ok(cudaSetDevice(device));
    ok(cudaEventCreateWithFlags(&event, flags));
  }
  ~Event() { cudaEventDestroy(event); }
  cudaEvent_t event = nullptr;
};

inline void order(cudaStream_t before, cudaStream_t after, int device = 0) {
  const Event event(device);
  ok(cudaEventRecord(event.event, before));
  ok(cudaStreamWaitEvent(after, event.event, 0));
}

// Whatever can begin does.
inline void let_run() {
  for (int i = 0; i < 50; ++i) ok(cudaEventQuery(Event().event));
}

struct Memory {
  explicit Memory(int device = 0) {
    ok(cudaSetDevice(device));
    ok(cudaMalloc(&data, kBytes));
  }
  ~Memory() {
    if (data != nullptr) cudaFree(data);
  }
  operator void*() const { return data; }
  char first() const { return *static_cast<char*>(data); }
  void* data = nullptr;
};

inline void set(void* memory, int value, cudaStream_t stream) {
  ok(cudaMemsetAsync(memory, value, kBytes, stream));
}

// A plain kernel and one whose blocks wait for others', of the engine's.
inline const void* plain_kernel() {
  return cuda::kernel_function(DType::kFloat32, Fold{}, cuda::KernelKind::kFusedSmall);
}
inline const void* waiting_kernel() {
  return cuda::kernel_function(DType::kFloat32, Fold{}, cuda::KernelKind::kRing);
}
inline cudaError_t load(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}
inline cudaError_t launch_plain(cudaStream_t stream, const void* from, void* to) {
  cuda::SmallTable table;
  cuda::TableBuilder<cuda::SmallTable> builder(table, 4, 1, 1, 1);
  const void* sources[] = {from};
  void* destinations[] = {to};
  builder.add(sources, destinations, kBytes / 4);
  void* arguments[] = {&table};
  return cudaLaunchKernel(plain_kernel(), dim3(1), dim3(4), arguments, 0, stream);
}

// Waits for a message that never comes.
struct Waiting {
  explicit Waiting(int num_blocks = 1) : blocks(static_cast<unsigned>(num_blocks)) {
    for (void** memory : {&ports, &words}) ok(cudaMalloc(memory, 65536));
    std::memset(words, 0, 65536);
    auto* flags = static_cast<std::uint32_t*>(words);
    auto* bytes = static_cast<std::byte*>(words);
    *static_cast<cuda::RingPorts*>(ports) = {bytes + 32768, flags,        flags + 2048,
                                             bytes + 32768, flags + 4096, flags + 6144,
                                             flags + 2048,  -1,           -1};
    args.ports = static_cast<cuda::RingPorts*>(ports);
    args.numel = 64;
    args.piece_elems = 64;
    args.num_slots = 3;
    args.slot_bytes = 256;
    args.world_size = 2;
    args.num_channels = num_blocks;
    args.patience = {std::uint64_t{1'000'000'000}, flags + 8000,
                     reinterpret_cast<cuda::Failure*>(flags + 8032), -1};
    args.rank[0] = 0;
    args.input[0] = input.data;
    args.output[0] = output.data;
    ok(load(waiting_kernel()));
  }
  ~Waiting() {
    for (void* memory : {ports, words}) cudaFree(memory);
  }
  cudaError_t launch(cudaStream_t stream) {
    void* arguments[] = {&args};
    return cudaLaunchCooperativeKernel(waiting_kernel(), dim3(blocks), dim3(4), arguments, 0,
                                       stream);
  }
  void run(cudaStream_t stream) {
    ok(launch(stream));
    let_run();
  }
  const unsigned blocks;
  Memory input;
  Memory output;
  void* ports = nullptr;
  void* words = nullptr;
  cuda::RingArgs args{};
};

// A function of the driver's.
template <typename Function>
Function driver_call(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  ok(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  return reinterpret_cast<Function>(entry);
}

// Words in the host's memory, registered.
class Words {
 public:
  Words() : words_(64) { ok(cudaHostRegister(words_.data(), kBytes, cudaHostRegisterMapped)); }
  ~Words() { cudaHostUnregister(words_.data()); }
  std::uint32_t& first() { return words_[0]; }
  void write(cudaStream_t stream, std::uint32_t value,
             unsigned flags = CU_STREAM_WRITE_VALUE_DEFAULT) const {
    call("cuStreamWriteValue32", stream, value, flags);
  }
  void await(cudaStream_t stream, std::uint32_t value,
             unsigned flags = CU_STREAM_WAIT_VALUE_GEQ) const {
    call("cuStreamWaitValue32", stream, value, flags);
  }

 private:
  void call(const char* name, cudaStream_t stream, std::uint32_t value, unsigned flags) const {
    using Call = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    const auto at = reinterpret_cast<CUdeviceptr>(words_.data());
    CHECK(driver_call<Call>(name)(stream, at, value, flags) == CUDA_SUCCESS, name);
  }

  std::vector<std::uint32_t> words_;
};

}  // namespace pyringar::model
