// process_prepare: reads the tensors, checks them, and finds their memory or copies it.

#include "bindings/process_prepare.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings/convert.h"
#include "core/error.h"
#include "process/group.h"

namespace pyringar {

namespace {

// A mean travels as a sum, which is divided at its end.
void set_fold(ProcessCall& call, Reduction reduction, int world_size) {
  call.fold = Fold::of(reduction, world_size);
  if (reduction.op == ReduceOp::kMean) call.fold.op = ReduceOp::kSum;
}

// Sizes are what ranks must have alike; not where only the order of elements counts.
void mix_sizes(ProcessCall& call, const TensorView& view) {
  std::uint64_t& digest = call.shapes;
  digest = mix(digest, static_cast<std::uint64_t>(view.ndim));
  for (int dim = 0; dim < view.ndim; ++dim) {
    digest = mix(digest, static_cast<std::uint64_t>(view.shape[dim]));
  }
}

// kSent: read, and in place on other ranks.
enum class Use { kInput, kOutput, kInPlace, kSent };

class CallBuilder {
 public:
  CallBuilder(LocalRank self, CallKind kind, const char* operation)
      : self_(self), tensors_(operation) {
    call_.kind = kind;
  }

  ProcessCall& call() { return call_; }
  void set_reduction(Reduction reduction) { set_fold(call_, reduction, self_.world_size); }

  void add(py::handle given, ArgName name, Use use) {
    py::object tensor = as_tensor(given.ptr(), tensors_.operation(), name.text());
    // In place on some rank: refused on all, or those that are not would wait for this one.
    tensors_.add(tensor.ptr(), name, self_.rank, self_.device, use != Use::kInput);
    uses_.push_back(use);
    objects_.push_back(std::move(tensor));
  }

  void check_parts(std::size_t whole, std::size_t part) const {
    tensors_.check_parts(whole, part, self_.world_size);
  }

  PreparedCall finish() {
    tensors_.check_disjoint();
    py::list written;
    py::list read;
    py::list copies;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const TensorView& view = tensors_[i];
      (is_output(i) ? written : read).append(py::handle(view.object));
      (uses_[i] == Use::kInput ? call_.inputs : call_.outputs)
          .push_back({memory(i, copies), view.numel, view.dtype});
    }
    if (call_.kind == CallKind::kBroadcast) call_.inputs = call_.outputs;
    return {std::move(call_), std::move(written), std::move(read), std::move(copies)};
  }

 private:
  bool is_output(std::size_t i) const {
    return uses_[i] == Use::kOutput || uses_[i] == Use::kInPlace;
  }

  // The tensor's own, or a copy; in another order than the index only where all ranks may have it.
  std::byte* memory(std::size_t i, const py::list& copies) {
    const TensorView& view = tensors_[i];
    const bool is_in_place = uses_[i] == Use::kInPlace || uses_[i] == Use::kSent;
    if (is_in_place && self_.compares_shapes) mix_sizes(call_, view);
    if (view.is_dense && has_index_order(view)) return view.data;
    if (view.is_dense && is_in_place) {
      mix_strides(view, i);
      call_.permuted.push_back({i, view.strided(), is_output(i)});
      return view.data;
    }
    if (self_.device != kHost) return tensors_.copy_by_torch(i, is_output(i), copies);
    return tensors_.copy_on_host(i, uses_[i] != Use::kOutput, is_output(i), call_.packed);
  }

  void mix_strides(const TensorView& view, std::size_t index) {
    std::uint64_t& digest = call_.strides;
    digest = mix(digest, index + 1);
    for (int dim = 0; dim < view.ndim; ++dim) {
      if (view.shape[dim] == 1) continue;  // its stride means nothing
      digest = mix(digest, static_cast<std::uint64_t>(view.strides[dim]));
    }
  }

  const LocalRank self_;
  TensorArgs tensors_;
  ProcessCall call_;
  std::vector<Use> uses_;
  std::vector<py::object> objects_;  // keep what tensors_ points into
};

}  // namespace

bool make_plain_all_reduce(LocalRank self, PyObject* tensor, Reduction reduction,
                           ProcessCall* call) {
  TensorView view;
  if (self.device != kHost || !read_plain(tensor, &view)) return false;
  call->kind = CallKind::kAllReduce;
  set_fold(*call, reduction, self.world_size);
  call->outputs.assign(1, {view.data, view.numel, view.dtype});
  call->shapes = 0;
  if (self.compares_shapes) mix_sizes(*call, view);
  return true;
}

PreparedCall prepare_process_all_reduce(LocalRank self, py::handle tensors, Reduction reduction,
                                        const char* operation) {
  CallBuilder builder(self, CallKind::kAllReduce, operation);
  builder.set_reduction(reduction);
  if (is_sequence(tensors.ptr())) {
    const py::tuple items = tuple_of(tensors.ptr());
    for (int i = 0; i < static_cast<int>(items.size()); ++i) {
      builder.add(PyTuple_GET_ITEM(items.ptr(), i), {"tensors", i}, Use::kInPlace);
    }
  } else {
    builder.add(tensors, {"tensor"}, Use::kInPlace);
  }
  return builder.finish();
}

PreparedCall prepare_process_reduce_scatter(LocalRank self, py::handle output, py::handle input,
                                            Reduction reduction) {
  CallBuilder builder(self, CallKind::kReduceScatter, "reduce_scatter");
  builder.set_reduction(reduction);
  builder.add(input, {"input"}, Use::kInput);
  builder.add(output, {"output"}, Use::kOutput);
  builder.check_parts(0, 1);
  return builder.finish();
}

PreparedCall prepare_process_all_gather(LocalRank self, py::handle output, py::handle input) {
  CallBuilder builder(self, CallKind::kAllGather, "all_gather");
  builder.add(input, {"input"}, Use::kInput);
  builder.add(output, {"output"}, Use::kOutput);
  builder.check_parts(1, 0);
  return builder.finish();
}

PreparedCall prepare_process_broadcast(LocalRank self, py::handle tensor, int root) {
  CallBuilder builder(self, CallKind::kBroadcast, "broadcast");
  builder.call().root = root;
  builder.add(tensor, {"tensor"}, self.rank == root ? Use::kSent : Use::kInPlace);
  return builder.finish();
}

PreparedCall prepare_process_barrier() {
  ProcessCall call;
  call.kind = CallKind::kBarrier;
  return {std::move(call), py::list(), py::list(), py::list()};
}

SegmentToken parse_token(const py::bytes& token) {
  const std::string_view text = token;
  SegmentToken parsed{};
  std::memcpy(parsed.data(), text.data(), std::min(text.size(), kTokenBytes));
  return parsed;
}

SharedMemory create_segment(int world_size, const py::bytes& token) {
  const SegmentToken parsed = parse_token(token);
  SharedMemory memory =
      SharedMemory::create(Segment::bytes_for(world_size), "a group of processes");
  Segment::lay_out(memory.data(), world_size, parsed);
  return memory;
}

SharedMemory open_segment(std::int32_t pid, int fd, int world_size) {
  return SharedMemory::open(pid, fd, Segment::bytes_for(world_size), "a group of processes");
}

}  // namespace pyringar
