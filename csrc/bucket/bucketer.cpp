// bucketer: see the header.
//
// Floor     bucket
// Tests     tests/test_bucketing.py

#include "bucket/bucketer.h"

#include <algorithm>
#include <chrono>
#include <numeric>

namespace pyringar {

namespace {

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

Bucketer::Bucketer(int world_size, std::vector<BucketItem> items, std::size_t first_cap_bytes,
                   std::size_t cap_bytes)
    : world_size_(world_size),
      items_(std::move(items)),
      first_cap_bytes_(first_cap_bytes),
      cap_bytes_(cap_bytes) {
  // Backward meets parameters last to first, more or less: good enough for the first step.
  std::vector<int> order(items_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  plan(order);
}

std::size_t Bucketer::at(int rank, int param) const {
  return static_cast<std::size_t>(rank) * items_.size() + static_cast<std::size_t>(param);
}

std::size_t Bucketer::bytes_of(int bucket) const {
  std::size_t bytes = 0;
  for (const int param : buckets_[static_cast<std::size_t>(bucket)]) {
    bytes += items_[static_cast<std::size_t>(param)].bytes;
  }
  return bytes;
}

void Bucketer::plan(const std::vector<int>& order) {
  buckets_ = plan_buckets(items_, order, first_cap_bytes_, cap_bytes_);
  bucket_of_.assign(items_.size(), 0);
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (const int param : buckets_[bucket]) {
      bucket_of_[static_cast<std::size_t>(param)] = static_cast<int>(bucket);
    }
  }
  reset();
}

void Bucketer::reset() {
  missing_.resize(buckets_.size());
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    missing_[bucket] = world_size_ * static_cast<int>(buckets_[bucket].size());
  }
  ranks_ready_.assign(items_.size(), 0);
  marked_by_.assign(items_.size() * static_cast<std::size_t>(world_size_), 0);
  times_.assign(buckets_.size(), {});
  ready_.clear();
  running_.clear();
  begin_ns_ = 0;
  next_turn_ = 0;
  is_turn_taken_ = false;
}

void Bucketer::break_off(std::int64_t spared_pass) {
  const bool is_spared_running = running_.erase(spared_pass) > 0;
  broken_.merge(running_);
  running_.clear();
  if (is_spared_running) running_.insert(spared_pass);
  reset();
}

int Bucketer::take_turn(bool has_sent) {
  if (has_sent) is_turn_taken_ = false;
  const bool is_next =
      !is_turn_taken_ && next_turn_ + 1 < buckets_.size() && missing_[next_turn_] == 0;
  if (!is_next) return -1;
  is_turn_taken_ = true;
  return static_cast<int>(next_turn_++);
}

Mark Bucketer::mark(int rank, int param, std::int64_t pass) {
  const auto bucket = static_cast<std::size_t>(bucket_of(param));
  std::int64_t& by = marked_by_[at(rank, param)];
  if (by != 0 && by != pass && running_.count(by) > 0) return Mark::kStillRuns;
  if (is_launched(static_cast<int>(bucket))) return Mark::kAfterLaunch;
  if (by != 0) return Mark::kAgain;
  by = pass;
  if (begin_ns_ == 0) begin_ns_ = now_ns();
  if (++ranks_ready_[static_cast<std::size_t>(param)] == world_size_) ready_.push_back(param);
  if (--missing_[bucket] > 0) return Mark::kCounted;
  times_[bucket].ready_ns = now_ns();
  times_[bucket].pass = pass;
  return Mark::kComplete;
}

void Bucketer::launched(int bucket) {
  times_[static_cast<std::size_t>(bucket)].launched_ns = now_ns();
}

bool Bucketer::has_launched(std::int64_t pass) const {
  return std::any_of(times_.begin(), times_.end(),
                     [&](const BucketTimes& t) { return t.pass == pass && t.launched_ns != 0; });
}

std::vector<int> Bucketer::ready_order() const {
  std::vector<int> order = ready_;
  std::vector<bool> is_there(items_.size());
  for (const int param : order) is_there[static_cast<std::size_t>(param)] = true;
  for (int param = num_params() - 1; param >= 0; --param) {
    if (!is_there[static_cast<std::size_t>(param)]) order.push_back(param);
  }
  return order;
}

}  // namespace pyringar
