// own_tests: the parts of main.cpp that tests/cpp/cuda does not have.
//
// Contract  A round leaves nothing behind and needs no other round before it.
#pragma once

#include "check.h"

namespace pyringar::ptx {

void litmus_round(stress::Random& random);  // memory.h, all orders
void forms_round(stress::Random& random);   // forms.h
void peers_round(stress::Random& random);   // cuda/peers.cu
void direct_round(stress::Random& random);  // the fused kernels on two and three devices at once

}  // namespace pyringar::ptx
