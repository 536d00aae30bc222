// recording: see recording.h.

#include "recording.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/ring_program.h"

namespace pyringar::model {

std::size_t Recording::word(const std::string& place, const std::string& part, int owner) {
  for (std::size_t at = 0; at < words_.size(); ++at) {
    if (words_[at].place == place && words_[at].part == part) return at;
  }
  words_.push_back({place, part, owner});
  words_.back().values.push_back({});
  return words_.size() - 1;
}

std::size_t Recording::counter(const std::string& place, int owner, std::uint32_t start) {
  const std::size_t at = word(place, "", owner);
  if (words_[at].counts.empty()) words_[at].counts.push_back(start);
  return at;
}

std::size_t Recording::read(int rank, std::size_t word, std::uint32_t message, Stage stage) {
  Source source{word, {message, stage}, kNever, 0, rank};
  if (words_[word].owner == rank) {
    source.own_seen = words_[word].values.size() - 1;
  } else {
    source.event = events_.size();
    events_.push_back({Action::kRead, rank, word});
    events_.back().meant = source.meant;
  }
  sources_.push_back(source);
  return sources_.size() - 1;
}

void Recording::write(int rank, std::size_t word, std::uint32_t message, Stage stage,
                      const Sum& sum) {
  Word& target = words_[word];
  if (target.owner != rank && target.owner != kNobody) {
    complain(join("rank ", rank, " writes ", target.place));
  }
  events_.push_back({Action::kWrite, rank, word});
  events_.back().version = target.values.size();
  target.writes.push_back(events_.size() - 1);
  target.values.push_back({message, stage});
  pending_.push_back({word, target.values.size() - 1, sum, false});
  data_.resize(events_.size());
  for (const std::size_t source : sum.reads) {
    if (sources_[source].event != kNever) data_.back().push_back(sources_[source].event);
  }
}

void Recording::publish(int rank, std::size_t word, std::uint32_t count, bool releases) {
  Word& target = words_[word];
  if (target.owner != rank) complain(join("rank ", rank, " writes ", target.place));
  events_.push_back({Action::kPublish, rank, word});
  events_.back().ordered = releases;
  events_.back().version = target.counts.size();
  target.writes.push_back(events_.size() - 1);
  target.counts.push_back(count);
}

void Recording::wait(int rank, std::size_t word, std::uint32_t wanted, bool acquires, bool wraps) {
  if (words_[word].owner == rank) return;
  events_.push_back({Action::kWait, rank, word});
  events_.back().ordered = acquires;
  events_.back().wanted = wanted;
  wraps_.resize(events_.size(), true);
  wraps_.back() = wraps;
}

void Recording::keep(int rank, const std::string& what, const Sum& sum,
                     const std::vector<int>& expected) {
  kept_.push_back({rank, what, sum, expected});
}

void Recording::give_range(const std::string& place, std::uint32_t message, std::size_t begin,
                           std::size_t end) {
  given_.push_back({0, place, message, begin, end});
}

void Recording::expect_range(int rank, const std::string& place, std::uint32_t message,
                             std::size_t begin, std::size_t end) {
  expected_.push_back({rank, place, message, begin, end});
}

std::size_t Recording::version_of(std::size_t word, const Value& meant) const {
  const std::vector<Value>& values = words_[word].values;
  for (std::size_t version = 0; version < values.size(); ++version) {
    if (values[version].message == meant.message && values[version].stage == meant.stage) {
      return version;
    }
  }
  return kNever;
}

std::vector<int> Recording::add_up(const Sum& sum) {
  std::vector<int> ranks = sum.own;
  for (const std::size_t at : sum.reads) {
    const Source& source = sources_[at];
    const std::size_t version = version_of(source.word, source.meant);
    if (version == kNever) continue;
    for (Pending& pending : pending_) {
      if (pending.is_done || pending.word != source.word || pending.version != version) continue;
      pending.is_done = true;
      words_[source.word].values[version].ranks = add_up(pending.sum);
    }
    const std::vector<int>& more = words_[source.word].values[version].ranks;
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Of words with several writers: the ranks' programs were recorded one after the other.
void Recording::order_versions() {
  for (std::size_t at = 0; at < words_.size(); ++at) {
    Word& word = words_[at];
    if (word.owner != kNobody) continue;
    const std::vector<Value> recorded = word.values;
    std::stable_sort(word.writes.begin(), word.writes.end(), [&](std::size_t a, std::size_t b) {
      const Value& one = recorded[events_[a].version];
      const Value& other = recorded[events_[b].version];
      return std::pair{one.message, one.stage} < std::pair{other.message, other.stage};
    });
    std::vector<std::size_t> new_version(recorded.size(), 0);
    for (std::size_t i = 0; i < word.writes.size(); ++i) {
      Event& write = events_[word.writes[i]];
      new_version[write.version] = i + 1;
      word.values[i + 1] = recorded[write.version];
      write.version = i + 1;
    }
    for (Pending& pending : pending_) {
      if (pending.word == at) pending.version = new_version[pending.version];
    }
  }
}

void Recording::resolve_reads() {
  for (const Source& source : sources_) {
    const std::size_t version = version_of(source.word, source.meant);
    const Word& word = words_[source.word];
    const Value meant = version == kNever ? source.meant : word.values[version];
    if (source.event != kNever) {
      events_[source.event].version = version;
      events_[source.event].meant = meant;
    } else if (version != source.own_seen) {
      complain(join("rank ", source.rank, ": reads ", word.place, word.part.empty() ? "" : ", ",
                    word.part, ": expected ", show(meant), ", found ",
                    show(word.values[source.own_seen]), ", which it wrote there itself"));
    }
  }
}

void Recording::resolve_waits() {
  for (std::size_t at = 0; at < events_.size(); ++at) {
    Event& event = events_[at];
    if (event.action != Action::kWait) continue;
    for (const std::uint32_t count : words_[event.word].counts) {
      event.passes.push_back(wraps_[at] ? reached(count, event.wanted) : count >= event.wanted);
    }
  }
}

void Recording::resolve_ranges() {
  for (const Carried& wanted : expected_) {
    for (const Carried& given : given_) {
      if (given.place != wanted.place || given.message != wanted.message) continue;
      if (given.begin == wanted.begin && given.end == wanted.end) continue;
      complain(join("rank ", wanted.rank, ": reads ", wanted.place, ", message ", wanted.message,
                    ": expected elements [", wanted.begin, ", ", wanted.end, "), found [",
                    given.begin, ", ", given.end, ")"));
    }
  }
}

bool Recording::stays_before(std::size_t older, std::size_t younger) const {
  const Event& first = events_[older];
  const Event& second = events_[younger];
  const bool stores = second.action == Action::kWrite || second.action == Action::kPublish;
  if (second.action == Action::kPublish && second.ordered) return true;
  if (first.action == Action::kWait && (first.ordered || stores)) return true;
  if (first.word == second.word) return true;
  return second.action == Action::kWrite &&
         std::find(data_[younger].begin(), data_[younger].end(), older) != data_[younger].end();
}

// Only the last of several that must come first: the others come before it.
void Recording::order_rank(std::size_t begin, std::size_t end) {
  std::vector<std::vector<bool>> follows(end - begin);
  for (std::size_t younger = begin; younger < end; ++younger) {
    std::vector<bool>& mine = follows[younger - begin];
    mine.resize(end - begin);
    for (std::size_t older = younger; older-- > begin;) {
      if (mine[older - begin] || !stays_before(older, younger)) continue;
      events_[younger].after.push_back(older);
      events_[older].before.push_back(younger);
      mine[older - begin] = true;
      for (std::size_t at = 0; at < older - begin; ++at) {
        if (follows[older - begin][at]) mine[at] = true;
      }
    }
  }
}

void Recording::finish() {
  data_.resize(events_.size());
  wraps_.resize(events_.size(), true);
  order_versions();
  for (Pending& pending : pending_) {
    if (pending.is_done) continue;
    pending.is_done = true;
    words_[pending.word].values[pending.version].ranks = add_up(pending.sum);
  }
  resolve_reads();
  resolve_waits();
  resolve_ranges();
  for (const Kept& kept : kept_) {
    const Value found{0, Stage::kSum, add_up(kept.sum)};
    if (found.ranks == kept.expected) continue;
    complain(join("rank ", kept.rank, ": keeps ", kept.what, ": expected ",
                  show({0, Stage::kSum, kept.expected}), ", found ", show(found)));
  }
  for (std::size_t begin = 0; begin < events_.size();) {
    std::size_t end = begin;
    while (end < events_.size() && events_[end].rank == events_[begin].rank) ++end;
    order_rank(begin, end);
    begin = end;
  }
}

std::string Recording::show(const Value& value) {
  if (value.stage == Stage::kNothing) return "nothing";
  if (value.stage == Stage::kCall) return join("call ", value.message);
  std::string text = value.message > 0 ? join("message ", value.message) : "";
  text += text.empty() ? "the sum of ranks" : value.ranks.size() > 1 ? ": ranks" : ": rank";
  for (std::size_t i = 0; i < value.ranks.size(); ++i) {
    text += join(i == 0 ? " " : "+", value.ranks[i]);
  }
  return text;
}

std::string Recording::show(std::size_t at) const {
  const Event& event = events_[at];
  const Word& word = words_[event.word];
  const std::string who = join("rank ", event.rank, ": ");
  const auto what = [&](const Value& value) {
    if (value.stage == Stage::kCall) return join(word.place, ", call ", value.message);
    return join(word.place, ", message ", value.message, ", ", word.part);
  };
  switch (event.action) {
    case Action::kWrite:
      return join(who, "writes ", what(word.values[event.version]));
    case Action::kRead:
      return join(who, "reads ", what(event.meant));
    case Action::kPublish:
      return join(who, "publishes ", word.place, " = ", word.counts[event.version]);
    case Action::kWait:
      return join(who, "waits for ", word.place, " >= ", event.wanted);
  }
  return who;
}

}  // namespace pyringar::model
