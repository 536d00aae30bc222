// device_watch: how far the GPUs of all ranks are, which rank is lost or late there, and how
// streams that wait for it come to an end.
//
// Units     messages, as core/staged_program.h counts them; nanoseconds.
// Contract  The words of a rank's DeviceLine only grow (modulo 2^32). The rank's streams write
//           them; other ranks' streams wait for the first two, hosts for the third:
//
//             announced, reduced   as core/staged_program.h says
//             finished             it is done with n, the last message of a call
//
//           While calls of this rank are on its GPU, a thread looks at the words 20 times a second.
//           A rank is lost if its process has ended while this rank's streams wait for it. It is
//           late if it is furthest behind and has not moved for the timeout while this rank's GPU
//           was further. Then all ranks are told, and each survivor raises the words of that rank
//           to what its own streams wait for, repeatedly. `released` keeps what the rank had
//           finished by then: calls that end with a later message are void on every rank.
//           The thread makes no CUDA calls: another thread may hold CUDA's locks while a stream
//           waits, or capture.
// Threads   begin() and expect_*() one at a time; all else any.
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

// Whether the call whose last message is `last` ended, or will end, without all of its data.
bool is_void(const Segment& segment, std::uint32_t last);

class DeviceWatch {
 public:
  // host: who is gone, and what is said of a rank.
  DeviceWatch(const Segment& segment, int rank, const PeerWatch& host);
  ~DeviceWatch();

  // A call of this rank, before its stream is asked to wait, or to write `finished`.
  void begin(std::uint32_t last);
  void expect_announced(std::uint32_t n) { announced_.store(n, std::memory_order_release); }
  void expect_reduced(std::uint32_t n) { reduced_.store(n, std::memory_order_release); }

  bool is_idle() const;
  std::uint32_t last() const { return last_.load(std::memory_order_acquire); }
  std::uint64_t progress() const;
  // Releases the streams at once, for all ranks that they wait for.
  void abort();

 private:
  void run();
  void look();
  bool is_behind(int rank) const;
  std::int32_t lead(int rank, int other) const {
    return lead_of(segment_.device(rank), segment_.device(other));
  }
  int most_behind() const;
  std::uint64_t mark_of(int rank) const;
  void give_up(int culprit, ErrorKind kind, const std::string& why);
  void release(int rank) const;

  const Segment& segment_;
  const int rank_;
  const PeerWatch& host_;
  std::atomic<std::uint32_t> last_;
  std::atomic<std::uint32_t> announced_;  // what the streams wait for
  std::atomic<std::uint32_t> reduced_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  Stillness stillness_;
  bool is_asleep_ = false;     // until begin()
  bool releases_all_ = false;  // some rank is late, or this one aborts
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace pyringar
