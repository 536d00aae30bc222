// peers: which devices can access each other's memory. A test transfer decides.
//
// Contract  enable_peers() enables peer access once per process and pair, and never disables it. A
//           kernel on each device writes a pattern into the other's memory and reads it back. The
//           owner checks it too: some machines report peer access and deliver zeros.
// Threads   any.
// Tests     tests/cuda (on machines with two devices)
#pragma once

namespace pyringar::cuda {

bool enable_peers(int a, int b);

// True for memory from cudaMalloc. Peers cannot access torch's expandable segments, for example.
bool is_peer_visible(const void* memory);

}  // namespace pyringar::cuda
