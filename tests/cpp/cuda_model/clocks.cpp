#include "clocks.h"

#include "core/error.h"

namespace pyringar::model {

void Shadow::split(std::uintptr_t at) {
  auto next = ranges_.upper_bound(at);
  if (next == ranges_.begin()) return;
  auto& [begin, range] = *std::prev(next);
  if (begin == at || range.first <= at) return;
  ranges_.emplace_hint(next, at, range);
  range.first = at;
}

std::string Shadow::note(const Access& access, const Epoch& now, const Clock& clock) {
  const std::uintptr_t end = access.begin + access.bytes;
  split(access.begin);
  split(end);
  const auto is_before = [&](const Epoch& epoch) {
    return epoch.is_released || now.is_released || epoch.actor == kNobody ||
           epoch.actor == now.actor || clock.has_seen(epoch.actor, epoch.time);
  };
  const auto race_of = [&](std::uintptr_t at, const Epoch& other, const char* how) {
    return join(now.what, access.touch == Touch::kWrite ? " writes " : " reads ", access.bytes,
                " bytes, which ", other.what, " ", how, ", unordered, at byte ", at - access.begin);
  };
  std::uintptr_t at = access.begin;
  for (auto found = ranges_.lower_bound(at); at < end; ++found) {
    if (found == ranges_.end() || found->first > at) {  // first access to these bytes
      const std::uintptr_t until =
          found == ranges_.end() || found->first > end ? end : found->first;
      found = ranges_.emplace_hint(found, at, std::pair(until, Bytes{}));
    }
    Bytes& bytes = found->second.second;
    if (!is_before(bytes.written)) return race_of(at, bytes.written, "has written");
    if (access.touch == Touch::kWrite) {
      for (const Epoch& reader : bytes.read) {
        if (!is_before(reader)) return race_of(at, reader, "has read");
      }
      bytes = {now, {}};
    } else {
      std::erase_if(bytes.read, is_before);
      bytes.read.push_back(now);
    }
    at = found->second.first;
  }
  return "";
}

void Shadow::forget(std::uintptr_t begin, std::size_t bytes) {
  split(begin);
  split(begin + bytes);
  ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(begin + bytes));
}

}  // namespace pyringar::model
