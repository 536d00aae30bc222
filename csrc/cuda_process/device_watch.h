// device_watch: progress of all ranks' GPUs. It detects lost and late ranks, and ends streams that
// wait for them.
//
// Units     messages, as core/staged_program.h counts them; nanoseconds.
// Contract  A rank's streams write its DeviceLine, whose words only grow (modulo 2^32). Other
//           ranks' streams wait for the first two words, and hosts for the third:
//
//             announced, reduced   as in core/staged_program.h
//             finished             the GPU has run message n, the last of a call
//
//           While this rank's GPU runs calls, a thread polls the words 20 times a second. A rank is
//           lost if its process has ended while this rank's streams wait for it. A rank is late if
//           it is furthest behind and makes no progress for the timeout, and this rank's GPU is
//           ahead of it. The failure is reported to all ranks. Each survivor repeatedly raises the
//           lost rank's words to the values that its streams wait for. `released` records what the
//           rank had finished. Calls that end with a later message have undefined results on every
//           rank. The thread makes no CUDA calls: another thread may hold CUDA's locks, or capture.
// Threads   begin() and expect_*() one at a time; all others any.
// Tests     tests/cpp/cuda_processes
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "os/stillness.h"
#include "process/peer_watch.h"

namespace pyringar {

// True if the call that ends with message `last` lacks, or will lack, a lost rank's data.
bool is_void(const Segment& segment, std::uint32_t last);

class DeviceWatch {
 public:
  // host: detects processes that have ended, and names ranks in messages.
  DeviceWatch(const Segment& segment, int rank, const PeerWatch& host);
  ~DeviceWatch();

  // Start watching a call. Called before its stream waits or writes `finished`.
  void begin(std::uint32_t last);
  void expect_announced(std::uint32_t n) { announced_.store(n, std::memory_order_release); }
  void expect_reduced(std::uint32_t n) { reduced_.store(n, std::memory_order_release); }

  bool is_idle() const;
  std::uint32_t last() const { return last_.load(std::memory_order_acquire); }
  std::uint64_t progress() const;
  // End all waits of this rank's streams, even for ranks that are neither lost nor late.
  void abort();

 private:
  void run();
  void poll();
  bool is_behind(int rank) const;
  std::int32_t lead(int rank, int other) const {
    return lead_of(segment_.device(rank), segment_.device(other));
  }
  int most_behind() const;
  std::uint64_t progress_of(int rank) const;
  void give_up(int culprit, ErrorKind kind, const std::string& why);
  void release(int rank) const;

  const Segment& segment_;
  const int rank_;
  const PeerWatch& host_;
  std::atomic<std::uint32_t> last_;
  std::atomic<std::uint32_t>
      announced_;  // last `announced` value that this rank's streams wait for
  std::atomic<std::uint32_t> reduced_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Stillness stillness_;
  bool is_sleeping_ = false;   // true: the thread sleeps until begin()
  bool releases_all_ = false;  // true: a rank is late, or this rank aborts
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace pyringar
