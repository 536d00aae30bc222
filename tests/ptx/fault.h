// fault: what a program did that PTX forbids, or what nothing here knows how to do.
#pragma once

#include <stdexcept>

#include "core/error.h"

namespace pyringar::ptx {

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fault(const Parts&... parts) {
  throw Fault(join("", parts...));
}

}  // namespace pyringar::ptx
