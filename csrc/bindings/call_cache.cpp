// call_cache: looks up and stores prepared calls by a digest of their options and memory.
#include "bindings/call_cache.h"

#include <utility>

namespace pyringar {

namespace {

std::uint64_t digest_of(const CallOptions& options, const std::byte* memory) {
  const auto words = static_cast<unsigned>(options.operation) << 24 |
                     static_cast<unsigned>(options.reduction.op) << 16 |
                     static_cast<unsigned>(options.reduction.order) << 8 |
                     static_cast<unsigned>(options.algorithm);
  return mix(words, reinterpret_cast<std::uintptr_t>(memory));
}

}  // namespace

PreparedCall::PreparedCall(const CallOptions& made_with, const GivenTensors& tensors,
                           std::shared_ptr<const Collective> checked)
    : options(made_with), call(std::move(checked)) {
  const TensorReadGuard reading;
  for (std::size_t i = 0; i < tensors.all().size(); ++i) identities.emplace_back(tensors.at(i));
}

void PreparedCall::check_unchanged(const GivenTensors& tensors) const {
  const TensorReadGuard reading;
  TensorView view;
  for (std::size_t i = 0; i < identities.size(); ++i) {
    if (try_view(tensors.at(i), &view) && identities[i].matches(view)) continue;
    fail(ErrorKind::kArgument, "bind: ", tensors.name(i).text(),
         " has new memory or layout; bind again");
  }
}

std::shared_ptr<const Collective> CallCache::find(const CallOptions& options,
                                                  const GivenTensors& tensors) const {
  const TensorReadGuard reading;
  const std::size_t size = tensors.all().size();
  TensorView view;
  if (size == 0 || !try_view(tensors.at(0), &view)) return nullptr;
  const auto found = entries_.find(digest_of(options, view.data));
  if (found == entries_.end()) return nullptr;
  // Hold a reference: torch may release the GIL below, and another thread may replace the entry.
  const std::shared_ptr<const PreparedCall> shared = found->second;
  const PreparedCall& entry = *shared;
  // Equal tensor counts imply equal rank counts: world_size is fixed, or each rank has one tensor.
  if (!entry.has_options(options) || entry.identities.size() != size) return nullptr;
  const TorchFunctions& torch = TorchFunctions::get();
  const bool is_recording = torch.is_grad_enabled();
  for (std::size_t i = 0; i < size; ++i) {
    if (i > 0 && !try_view(tensors.at(i), &view)) return nullptr;
    if (!entry.identities[i].matches(view)) return nullptr;
    if (is_recording && torch.requires_grad(view.object)) return nullptr;
  }
  return entry.call;
}

void CallCache::keep(const CallOptions& options, const GivenTensors& tensors,
                     std::shared_ptr<const Collective> call) {
  const TensorReadGuard reading;
  const std::size_t size = tensors.all().size();
  TensorView view;
  if (size == 0 || !try_view(tensors.at(0), &view) || view.data == nullptr) return;
  const std::uint64_t digest = digest_of(options, view.data);
  if (std::exchange(noted_[digest % kMostCalls], digest) != digest) return;
  if (entries_.size() >= kMostCalls) entries_.clear();
  entries_[digest] = std::make_shared<const PreparedCall>(options, tensors, std::move(call));
}

}  // namespace pyringar
