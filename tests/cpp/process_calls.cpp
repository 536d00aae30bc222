#include "process_calls.h"

namespace pyringar::stress {

namespace {

std::vector<std::byte> expected_of(const Case& made, const std::vector<const CallTensors*>& all,
                                   int rank, std::size_t i) {
  std::vector<const void*> sources;
  std::vector<std::byte> gathered;
  for (const CallTensors* tensors : all) {
    sources.push_back(tensors->inputs[i].before()[0]);
    const auto* bytes = static_cast<const std::byte*>(sources.back());
    gathered.insert(gathered.end(), bytes, bytes + tensors->inputs[i].bytes());
  }
  const auto part = [&](const std::vector<std::byte>& whole, int which) -> std::vector<std::byte> {
    const auto size = static_cast<std::ptrdiff_t>(whole.size() / all.size());
    return {whole.begin() + which * size, whole.begin() + (which + 1) * size};
  };
  if (made.kind == CallKind::kAllGather) return gathered;
  if (made.kind == CallKind::kBroadcast) return part(gathered, made.root);
  const Tensors& input = all[0]->inputs[i];
  const std::vector<std::byte> reduced =
      expected_reduction(input.dtype(), made.fold, sources, input.numel(), false);
  return made.kind == CallKind::kReduceScatter ? part(reduced, rank) : reduced;
}

}  // namespace

CallKind random_kind(Random& random) {
  constexpr CallKind kKinds[] = {CallKind::kAllReduce, CallKind::kReduceScatter,
                                 CallKind::kAllGather, CallKind::kBroadcast, CallKind::kBarrier};
  return kKinds[random.below(std::size(kKinds))];
}

CallTensors make_tensors(const Case& made, int world_size, int rank) {
  Random random(made.seed * 31 + static_cast<std::uint64_t>(rank));
  CallTensors tensors;
  if (made.kind == CallKind::kBarrier) return tensors;
  const auto k = static_cast<std::size_t>(world_size);
  for (const auto& [dtype, numel] : made.shapes) {
    const bool scatters = made.kind == CallKind::kReduceScatter;
    const bool gathers = made.kind == CallKind::kAllGather;
    tensors.inputs.emplace_back(random, dtype, 1, scatters ? numel * k : numel);
    if (scatters || gathers) {
      tensors.outputs.emplace_back(random, dtype, 1, gathers ? numel * k : numel);
    }
  }
  return tensors;
}

Collective call_of(const Case& made, const CallTensors& tensors, int world_size) {
  Collective call;
  call.kind = made.kind;
  call.fold = made.fold;
  call.root = made.kind == CallKind::kBroadcast ? made.root : 0;
  call.world_size = world_size;
  call.reserve_local(tensors.inputs.size());
  for (std::size_t i = 0; i < tensors.inputs.size(); ++i) {
    const Tensors& input = tensors.inputs[i];
    const Tensors& result = tensors.results()[i];
    call.add_local(input[0], result[0], std::max(input.numel(), result.numel()), input.dtype());
  }
  return call;
}

void check_case(const Case& made, const std::vector<const CallTensors*>& all, int rank) {
  const CallTensors& own = *all[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < own.results().size(); ++i) {
    const Tensors& result = own.results()[i];
    const std::vector<std::byte> expected = expected_of(made, all, rank, i);
    const void* found = own.after.empty() ? result[0] : own.after[i].data();
    check_same(result.dtype(), found, expected.data(), result.numel(),
               join(call_name(made.kind), ", rank ", rank, " of ", all.size(), ", tensor ", i,
                    " of ", own.results().size(), made.is_async ? ", async" : ""));
    const bool is_copy = made.kind == CallKind::kAllGather || made.kind == CallKind::kBroadcast;
    CHECK(!is_copy || expected.empty() || std::memcmp(found, expected.data(), expected.size()) == 0,
          "a NaN has other bits");
    result.check_canaries();
  }
  if (own.outputs.empty()) return;
  for (const Tensors& input : own.inputs) input.check_unchanged();
}

void check_unchanged(const CallTensors& tensors) {
  for (const Tensors& tensor : tensors.inputs) tensor.check_unchanged();
  for (const Tensors& tensor : tensors.outputs) tensor.check_unchanged();
}

}  // namespace pyringar::stress
