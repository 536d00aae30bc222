// own_tests: the parts of main.cpp that tests/cpp/cuda does not have.
//
// Contract  A round leaves nothing behind and needs no other round before it.
#pragma once

#include "check.h"

namespace pyringar::ptx {

void litmus_round(stress::Random& random);  // memory.h, all orders
void forms_round(stress::Random& random);   // forms.h
void peers_round(stress::Random& random);   // cuda/peers.cu
// The fused kernels on several devices at once.
void direct_round(stress::Random& random);
void direct_all_round(stress::Random& random);  // every dtype and reduction, two to four ranks

}  // namespace pyringar::ptx
