// choice: the algorithm of a call, or one for each range of sizes.
//
// Floor     bindings
// Units     bytes of one rank's data.
// Contract  Python passes a name, or a tuple (name, bytes, name, bytes, name, ...): from so many
//           bytes on, ascending, the next name holds. Reading it takes tens of nanoseconds, where
//           adding up sizes in Python would cost a small call a third of its time.
// Threads   with the GIL held.
// Tests     tests/test_tuning.py
#pragma once

#include <utility>
#include <vector>

#include "bindings/convert.h"

namespace pyringar {

template <typename Enum>
class Choice {
 public:
  Choice(Enum first) : first_(first) {}

  // name_of and count are those of parse().
  static Choice parse(py::handle given, const char* (*name_of)(Enum), int count) {
    const auto named = [&](py::handle name) {
      return pyringar::parse<Enum>(name, "algorithm", name_of, count);
    };
    if (!PyTuple_Check(given.ptr())) return Choice(named(given));
    const Py_ssize_t size = PyTuple_GET_SIZE(given.ptr());
    const auto item = [&](Py_ssize_t i) { return py::handle(PyTuple_GET_ITEM(given.ptr(), i)); };
    if (size % 2 == 0) fail_on(given);
    Choice choice(named(item(0)));
    for (Py_ssize_t i = 1; i < size; i += 2) {
      if (!PyLong_Check(item(i).ptr())) fail_on(given);
      const std::size_t from = PyLong_AsSize_t(item(i).ptr());
      if (PyErr_Occurred() != nullptr) throw PythonErrorPending{};
      choice.later_.emplace_back(from, named(item(i + 1)));
    }
    return choice;
  }

  Enum at(std::size_t nbytes) const {
    Enum found = first_;
    for (const auto& [from, algorithm] : later_) {
      if (nbytes >= from) found = algorithm;
    }
    return found;
  }

 private:
  [[noreturn]] static void fail_on(py::handle given) {
    const std::string value = py::repr(given);
    fail(ErrorKind::kArgument, "algorithm is ", value,
         ", expected a name, or (name, bytes, name, ...)");
  }

  Enum first_;
  std::vector<std::pair<std::size_t, Enum>> later_;
};

}  // namespace pyringar
