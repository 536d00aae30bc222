// builder: checks the tensors of one call against each other, and lays out its pointer tables.
//
// Contract  An Error names the operation, the argument and its value. In-place results bypass
//           autograd, so a written tensor must not require grad while autograd records.
// Threads   with the GIL held; bindings/prepare.cpp is the only user.
// Tests     tests/conformance/test_refused.py, tests/conformance/test_layouts.py
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bindings/prepare.h"

namespace pyringar {

inline std::string describe_shape(const TensorView& view) {
  std::string text = "(";
  for (int dim = 0; dim < view.ndim; ++dim) text += join(dim == 0 ? "" : ", ", view.shape[dim]);
  return text + (view.ndim == 1 ? ",)" : ")");
}

class Builder {
 public:
  Builder(const CallOptions& options, const LocalRanks& ranks, int world_size)
      : operation_(options.name()), ranks_(ranks) {
    collective_.kind = kind_of(options.operation);
    collective_.operation = operation_;
    collective_.root = options.root;
    collective_.world_size = world_size;
    collective_.num_local = ranks.num_local(world_size);
    collective_.fold = Fold::of(options.reduction, world_size);
    collective_.algorithm = world_size == 1 ? Algorithm::kFused : options.algorithm;
    collective_.remote.what = options.what;
  }

  const TensorView& operator[](std::size_t i) const { return views_[i]; }
  Collective& collective() { return collective_; }

  // -- collecting tensors -------------------------------------------------------------------------

  void reserve(std::size_t num_tensors) {
    views_.reserve(num_tensors);
    names_.reserve(num_tensors);
    is_written_.reserve(num_tensors);
  }
  void add(PyObject* object, ArgName name, int rank, bool is_written) {
    TensorView& view = views_.emplace_back();
    names_.push_back(name);
    is_written_.push_back(is_written);
    read_tensor(object, operation_, name, &view);
    const int device =
        ranks_.devices == nullptr ? kHost : (*ranks_.devices)[static_cast<std::size_t>(rank)];
    if (view.device != device) {
      fail(ErrorKind::kArgument, operation_, ": ", name.text(), " is on ", device_name(view.device),
           ", expected ", device_name(device), ", the device of rank ", ranks_.first_rank + rank);
    }
    if (is_written && is_recording_ && TorchFunctions::get().requires_grad(object)) {
      fail(ErrorKind::kArgument, operation_, ": ", name.text(),
           " requires grad, and autograd would not see this in-place change; "
           "call it under torch.no_grad(), or pass .detach()");
    }
  }
  // Add all ranks' tensors and check that shapes and dtypes agree. is_written(rank): true if the
  // call writes that rank's tensors.
  template <typename IsWritten>
  void add_all(const GivenTensors& given, IsWritten&& is_written) {
    const std::size_t n = given.num_tensors();
    reserve(static_cast<std::size_t>(given.num_ranks() + 1) * n);
    for (int rank = 0; rank < given.num_ranks(); ++rank) {
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t at = static_cast<std::size_t>(rank) * n + i;
        add(given.at(at), given.name(at), rank, is_written(rank));
        if (rank > 0) check_agree(at, i);
      }
    }
  }

  // -- checks -------------------------------------------------------------------------------------

  void check_agree(std::size_t i, std::size_t first) const {
    const TensorView& a = views_[i];
    const TensorView& b = views_[first];
    const auto differs = [&](const char* what, const std::string& value,
                             const std::string& expected) {
      fail(ErrorKind::kArgument, operation_, ": ", names_[i].text(), " has ", what, " ", value,
           ", but ", names_[first].text(), " has ", expected, "; all ranks must agree");
    };
    if (a.dtype != b.dtype) differs("dtype", dtype_name(a.dtype), dtype_name(b.dtype));
    if (a.ndim != b.ndim || !std::equal(a.shape, a.shape + a.ndim, b.shape)) {
      differs("shape", describe_shape(a), describe_shape(b));
    }
  }
  // Raise unless dtypes agree and tensor `whole` has world_size times the elements of `part`.
  void check_parts(std::size_t whole, std::size_t part) const {
    const TensorView& w = views_[whole];
    const TensorView& p = views_[part];
    if (w.dtype != p.dtype) {
      fail(ErrorKind::kArgument, operation_, ": ", names_[part].text(), " has dtype ",
           dtype_name(p.dtype), ", but ", names_[whole].text(), " has ", dtype_name(w.dtype));
    }
    if (w.numel == p.numel * static_cast<std::size_t>(ranks_.world_size)) return;
    fail(ErrorKind::kArgument, operation_, ": ", names_[whole].text(), " has ", w.numel, " ",
         dtype_name(w.dtype), " elements and ", names_[part].text(), " has ", p.numel, " ",
         dtype_name(p.dtype), "; expected ", ranks_.world_size,
         " times as many, one part per rank");
  }
  // Raise if a written tensor overlaps itself or another tensor. is_skipped[i]: ignore tensor i.
  void check_disjoint(const std::vector<bool>& is_skipped = {}) const;

  // -- layouts ------------------------------------------------------------------------------------

  // True if tensors i and j, of equal shape, are the same elements in memory.
  bool is_same(std::size_t i, std::size_t j) const {
    const TensorView& a = views_[i];
    const TensorView& b = views_[j];
    return a.numel > 0 && a.data == b.data && a.is_negated == b.is_negated && same_layout(a, b);
  }
  // True if tensors first, first + step, ... (one per rank) have the same layout.
  bool all_same_layout(std::size_t first, std::size_t step) const {
    for (std::size_t i = first + step; i < views_.size(); i += step) {
      if (!same_layout(views_[i], views_[first])) return false;
    }
    return true;
  }

  // Return the memory of tensor i, or of a dense copy in index order. If !is_flat, dense tensors in
  // any order are not copied. `packed` holds host copies; on GPUs torch copies on its stream.
  std::byte* memory(std::size_t i, bool is_input, bool is_output, bool is_flat) {
    const TensorView& v = views_[i];
    if (v.numel == 0 || (v.is_dense && (!is_flat || has_index_order(v)))) return v.data;
    if (ranks_.devices == nullptr) {
      std::shared_ptr<std::byte[]> dense = std::make_unique_for_overwrite<std::byte[]>(v.bytes());
      std::byte* const data = dense.get();
      collective_.packed.push_back({v.strided(), std::move(dense), is_input, is_output});
      return data;
    }
    const py::handle tensor = v.object;
    const py::object dense = tensor.attr("detach")().attr("resolve_neg")().attr("contiguous")();
    copies_.append(py::make_tuple(is_output ? tensor : py::none(), dense));
    TensorView copy;
    read_tensor(dense.ptr(), operation_, names_[i], &copy);
    return copy.data;
  }

  // Add tensor i of a group of processes, reduced in place. The digest includes permuted strides.
  void add_in_place(std::size_t i, bool is_output) {
    const TensorView& v = views_[i];
    if (ranks_.compares_shapes) mix_sizes(v);
    const bool is_permuted = v.is_dense && !has_index_order(v);
    if (is_permuted) {
      mix_strides(v, i);
      collective_.remote.permuted.push_back({i, v.strided(), is_output});
    }
    std::byte* const data = memory(i, true, is_output, !is_permuted);
    collective_.add_local(data, data, v.numel, v.dtype);
  }

  // Reserve memory for all pointer tables at once: growing would move tables that are in use.
  void reserve_pointers(std::size_t n) {
    collective_.pointers.reserve(n);
    collective_.ranks.reserve(n);
  }
  void* const* table_end() { return collective_.pointers.data() + collective_.pointers.size(); }
  void push(void* pointer, int rank) {
    collective_.pointers.push_back(pointer);
    collective_.ranks.push_back(rank);
  }

  PreparedCollective finish(py::object written, py::object read = py::none()) {
    return {std::move(collective_), std::move(written), std::move(read), std::move(copies_)};
  }

 private:
  void mix_sizes(const TensorView& view) {
    std::uint64_t& digest = collective_.remote.shapes;
    digest = mix(digest, static_cast<std::uint64_t>(view.ndim));
    for (int dim = 0; dim < view.ndim; ++dim) {
      digest = mix(digest, static_cast<std::uint64_t>(view.shape[dim]));
    }
  }
  void mix_strides(const TensorView& view, std::size_t index) {
    std::uint64_t& digest = collective_.remote.strides;
    digest = mix(digest, index + 1);
    for (int dim = 0; dim < view.ndim; ++dim) {
      if (view.shape[dim] == 1) continue;  // the stride of a dimension of size 1 has no effect
      digest = mix(digest, static_cast<std::uint64_t>(view.strides[dim]));
    }
  }

  const TensorReadGuard reading_;
  const char* const operation_;
  const LocalRanks& ranks_;
  const bool is_recording_ = TorchFunctions::get().is_grad_enabled();
  std::vector<TensorView> views_;
  std::vector<ArgName> names_;
  std::vector<bool> is_written_;
  Collective collective_;
  py::list copies_;
};

inline void Builder::check_disjoint(const std::vector<bool>& is_skipped) const {
  if (views_.size() == 1 && views_[0].is_dense) return;
  struct Span {
    ByteSpan bytes;
    std::size_t index;
  };
  std::vector<Span> spans;
  spans.reserve(views_.size());
  for (std::size_t i = 0; i < views_.size(); ++i) {
    const TensorView& view = views_[i];
    if (view.numel == 0 || (i < is_skipped.size() && is_skipped[i])) continue;
    ByteSpan bytes{view.data, view.data + view.bytes()};
    if (!view.is_dense) {
      const StridedView strided = view.strided();
      if (overlaps_itself(strided)) {
        fail(ErrorKind::kArgument, operation_, ": ", names_[i].text(), " of shape ",
             describe_shape(view),
             " overlaps itself (an expanded tensor?); expected every element at its own address");
      }
      bytes = span_of(strided);
    }
    spans.push_back({bytes, i});
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.bytes.first < b.bytes.first; });
  for (std::size_t a = 0; a < spans.size(); ++a) {
    for (std::size_t b = a + 1; b < spans.size() && spans[b].bytes.first < spans[a].bytes.last;
         ++b) {
      const std::size_t i = std::min(spans[a].index, spans[b].index);
      const std::size_t j = std::max(spans[a].index, spans[b].index);
      if (!is_written_[i] && !is_written_[j]) continue;
      const bool dense = views_[i].is_dense && views_[j].is_dense;
      if (!dense && !overlap(views_[i].strided(), views_[j].strided())) continue;
      fail(ErrorKind::kArgument, operation_, ": ", names_[j].text(), " shares memory with ",
           names_[i].text(),
           "; expected separate memory. If these are gradients, the ranks share their parameters: "
           "copy parameters with pr.get_params(params, device)");
    }
  }
}

}  // namespace pyringar
