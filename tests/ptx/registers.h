// registers: see registers.cpp.
#pragma once

#include "program.h"

namespace pyringar::ptx {

void share_registers(Kernel& kernel);

}  // namespace pyringar::ptx
