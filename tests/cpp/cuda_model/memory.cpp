// memory: allocations, copies, IPC and driver functions of the modelled runtime.
//
// Contract  the rules "freed", "deadlock", "pageable", "ipc" and "word" of runtime_model.h.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "machine.h"

namespace pyringar::model {

namespace {

std::byte* map(int fd, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(memory != MAP_FAILED, "no memory");
  return static_cast<std::byte*>(memory);
}

int make_file(std::size_t bytes) {
  const int fd = memfd_create("device", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "no memory");
  return fd;
}

// Return device, inode and offset of a mapping, or "" for anonymous memory.
std::string file_at(std::uintptr_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::uintptr_t offset = 0;
    char dash = 0;
    std::string rights, device, inode;
    fields >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> inode;
    if (address < begin || address >= end) continue;
    return inode == "0" ? "" : join(device, ":", inode, "+", offset + (address - begin));
  }
  return "";
}

Broken still_used(const std::string& user) {
  return {"freed", "freed memory is still used by " + user};
}

void check_unused(const Machine& machine, std::uintptr_t begin, std::size_t bytes) {
  const std::string user = machine.user_of(begin, bytes);
  if (!user.empty()) throw still_used(user);
}

// CUDA Guide, Implicit Synchronization: an allocation may wait for the device. It orders nothing.
// Memsets and device copies are on that list too. Here they wait only for their stream: kernels
// that wait for each other are on different devices, so no deadlock is missed.
cudaError_t allocate(void** memory, std::size_t bytes, bool is_host) {
  RuntimeCall call;
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  Machine& machine = call.machine();
  const int device = current_device();
  machine.drain(call.lock(), is_host ? "cudaHostAlloc" : "cudaMalloc", on_device(device));
  const std::size_t whole = std::max<std::size_t>(bytes, 1);
  const int fd = make_file(whole);
  std::byte* made = map(fd, whole);
  const auto at = reinterpret_cast<std::uintptr_t>(made);
  machine.memory[at] = {whole, is_host ? -1 : device, host().process, fd, false, 0, at};
  return *memory = made, cudaSuccess;
}

// Runtime API, cudaFree: "implicit synchronization". It waits for peers too (pytorch issue 50925).
// cudaFreeHost is undocumented: here it waits sometimes. After a fault, both free memory but fail.
cudaError_t release(void* memory, bool is_host) {
  if (memory == nullptr) return cudaSuccess;
  RuntimeCall call;
  Machine& machine = call.machine();
  if (!call.process().is_alive) return call.fault();
  const cudaError_t refused = call.check_unsafe();
  if (refused != cudaSuccess && refused != call.fault()) return refused;
  const auto found = machine.memory.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == machine.memory.end() || (found->second.device < 0) != is_host) {
    throw Broken("freed", "freed memory that is not allocated");
  }
  if (found->second.num_mapped > 0) {
    throw Broken("ipc", join("memory of process ", found->second.process, " freed while ",
                             found->second.num_mapped, " others have it open"));
  }
  if (call.fault() == cudaSuccess && (!is_host || machine.random.one_in(2))) {
    machine.drain(call.lock(), is_host ? "cudaFreeHost" : "cudaFree", on_device(kAnyDevice));
  }
  check_unused(machine, found->first, found->second.bytes);
  const Allocation allocation = found->second;
  machine.shadow.forget(allocation.canonical, allocation.bytes);
  machine.memory.erase(found);
  munmap(memory, allocation.bytes);
  ::close(allocation.fd);
  return call.fault();
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  Machine& machine = call.machine();
  StreamWork work{StreamWork::Kind::kRun, "a copy"};
  // Unknown memory is pageable host memory: read at once, written when the copy runs.
  const auto is_known = [&](const void* memory) {
    return machine.allocation_of(reinterpret_cast<std::uintptr_t>(memory)) != nullptr;
  };
  if (is_known(from)) work.accesses.push_back(access(from, bytes, Touch::kRead));
  if (is_known(to)) work.accesses.push_back(access(to, bytes, Touch::kWrite));
  if (!is_known(from)) {
    std::vector<std::byte> staged(static_cast<const std::byte*>(from),
                                  static_cast<const std::byte*>(from) + bytes);
    work.run = [=, staged = std::move(staged)] { std::memcpy(to, staged.data(), bytes); };
  } else {
    work.run = [=] { std::memcpy(to, from, bytes); };
  }
  return error(machine.enqueue(machine.state_of(stream), std::move(work)));
}

cudaError_t fill(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  StreamWork work{StreamWork::Kind::kRun, "a memset"};
  work.accesses.push_back(access(memory, bytes, Touch::kWrite));
  work.run = [=] { std::memset(memory, value, bytes); };
  return error(call.machine().enqueue(call.machine().state_of(stream), std::move(work)));
}

// -- the driver -----------------------------------------------------------------------------------

CUresult context_state(CUdevice device, unsigned* flags, int* is_active) {
  RuntimeCall call(RuntimeCall::Touches::kNothing);
  *flags = 0;
  *is_active = static_cast<int>(call.process().contexts.count(device));
  return CUDA_SUCCESS;
}
CUresult retain_context(CUcontext* context, CUdevice device) {
  RuntimeCall call(RuntimeCall::Touches::kNothing);
  call.process().contexts.insert(device);
  *context = reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult push_context(CUcontext context) {
  host().pushed.push_back(static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}
CUresult pop_context(CUcontext*) {
  if (host().pushed.empty()) throw Broken("context", "popped an empty context stack");
  host().pushed.pop_back();
  return CUDA_SUCCESS;
}
CUresult operate(CUstream stream, CUdeviceptr word, std::uint32_t value, StreamWork::Kind kind) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  Machine& machine = call.machine();
  if (call.process().refused == Refused::kStreamMemory) return CUDA_ERROR_NOT_SUPPORTED;
  StreamWork work{kind,
                  kind == StreamWork::Kind::kWriteWord ? "a write of a word" : "a wait for a word"};
  work.word = reinterpret_cast<std::uint32_t*>(word);
  work.value = value;
  work.accesses.push_back(access(work.word, sizeof value, Touch::kFlags));
  const cudaError_t status = machine.enqueue(machine.state_of(stream), std::move(work));
  return status == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}
CUresult write_word(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) throw Broken("word", "written without a barrier");
  return operate(stream, word, value, StreamWork::Kind::kWriteWord);
}
CUresult await_word(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) throw Broken("word", "not awaited by >=");
  return operate(stream, word, value, StreamWork::Kind::kAwaitWord);
}

}  // namespace

void show_tensor(const void* memory, std::size_t bytes, int device) {
  const std::lock_guard lock(Machine::get().mutex);
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  Machine::get().memory[at] = {
      std::max<std::size_t>(bytes, 1), device, host().process, -1, true, 0, at};
}

void hide_tensor(const void* memory) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  const auto found = machine.memory.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == machine.memory.end()) return;
  const std::string user = machine.user_of(found->first, found->second.bytes);
  const bool can_report = std::uncaught_exceptions() == 0;  // false: an error unwinds the stack
  if (can_report && !user.empty()) machine.pending = still_used(user);
  machine.shadow.forget(found->first, found->second.bytes);
  machine.memory.erase(found);
}

}  // namespace pyringar::model

using namespace pyringar;
using namespace pyringar::model;

extern "C" {

// Records the host's copies of device-visible memory (linked with --wrap=memcpy).
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  Machine& machine = Machine::get();
  if (!machine.mutex.is_mine()) {
    const std::lock_guard lock(machine.mutex);
    const auto is_pinned = [&](const void* memory) {
      const auto* found = machine.allocation_of(reinterpret_cast<std::uintptr_t>(memory));
      return found != nullptr && found->second.device < 0;
    };
    try {
      if (is_pinned(from)) machine.note_host(from, bytes, Touch::kRead, "the host's memcpy");
      if (is_pinned(to)) machine.note_host(to, bytes, Touch::kWrite, "the host's memcpy");
    } catch (const Broken& broken) {  // callers of memcpy expect no exception
      machine.pending = broken;
    }
  }
  return __real_memcpy(to, from, bytes);
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(memory, bytes, false); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes, true);
}
cudaError_t cudaFree(void* memory) { return release(memory, false); }
cudaError_t cudaFreeHost(void* memory) { return release(memory, true); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  RuntimeCall call;
  return *free = *total = std::size_t{1} << 30, call.fault();
}
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  RuntimeCall call;
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  if (call.process().refused == Refused::kRegistration) return error(cudaErrorNotSupported);
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  Allocation made{bytes, -1, host().process, -2, false, 0, at};
  // A backing file identifies the memory: processes map it at different addresses.
  made.file = file_at(at);
  for (const auto& [other, registered] : call.machine().memory) {
    if (!made.file.empty() && registered.file == made.file) made.canonical = registered.canonical;
  }
  call.machine().memory[at] = std::move(made);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  RuntimeCall call;
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  Machine& machine = call.machine();
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  const auto found = machine.memory.find(at);
  if (found == machine.memory.end() || found->second.fd != -2) {
    return error(cudaErrorHostMemoryNotRegistered);
  }
  check_unused(machine, at, found->second.bytes);
  machine.memory.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* memory, unsigned) {
  RuntimeCall call;
  return *device = memory, call.fault();
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  return fill(memory, value, bytes, stream);
}

// -- other processes ------------------------------------------------------------------------------

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  const auto found = call.machine().memory.find(at);
  const bool is_there = found != call.machine().memory.end() && found->second.device >= 0;
  if (!is_there || found->second.is_tensor) return error(cudaErrorInvalidValue);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &at, sizeof at);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags) {
  RuntimeCall call;
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  Machine& machine = call.machine();
  std::uintptr_t at = 0;
  std::memcpy(&at, &handle, sizeof at);
  const auto found = machine.memory.find(at);
  const int process = host().process;
  const Opening opening = machine.openings.try_emplace(process, Opening::kWorks).first->second;
  if (found == machine.memory.end() || found->second.process == process ||
      opening == Opening::kIsRefused) {
    return error(cudaErrorInvalidValue);
  }
  found->second.num_mapped += 1;
  if ((flags & cudaIpcMemLazyEnablePeerAccess) != 0) {
    call.process().reached.insert({current_device(), found->second.device});
  }
  const bool is_other = opening == Opening::kGivesOtherMemory;
  const int fd = is_other ? make_file(found->second.bytes) : dup(found->second.fd);
  std::byte* mapped = map(fd, found->second.bytes);
  *memory = mapped;
  Allocation own = found->second;
  own.process = process;
  own.fd = fd;
  own.num_mapped = 0;
  if (is_other) own.canonical = reinterpret_cast<std::uintptr_t>(mapped);
  own.opened_from = at;
  machine.memory[reinterpret_cast<std::uintptr_t>(mapped)] = own;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  RuntimeCall call;
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  Machine& machine = call.machine();
  const auto found = machine.memory.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == machine.memory.end() || found->second.opened_from == 0) {
    throw Broken("ipc", "closed memory that was not opened");
  }
  check_unused(machine, found->first, found->second.bytes);
  close_opened(machine, found->first);
  return cudaSuccess;
}

// -- the driver -----------------------------------------------------------------------------------

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::string_view name = symbol;
  *entry = name == "cuDevicePrimaryCtxGetState" ? reinterpret_cast<void*>(&context_state)
           : name == "cuDevicePrimaryCtxRetain" ? reinterpret_cast<void*>(&retain_context)
           : name == "cuCtxPushCurrent"         ? reinterpret_cast<void*>(&push_context)
           : name == "cuCtxPopCurrent"          ? reinterpret_cast<void*>(&pop_context)
           : name == "cuStreamWriteValue32"     ? reinterpret_cast<void*>(&write_word)
           : name == "cuStreamWaitValue32"      ? reinterpret_cast<void*>(&await_word)
                                                : nullptr;
  *found = *entry == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return *entry == nullptr ? cudaErrorSymbolNotFound : cudaSuccess;
}

}  // extern "C"
