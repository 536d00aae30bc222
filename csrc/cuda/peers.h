// peers: which devices can read and write each other's memory, tried out with real data.
//
// Contract  enable_peers() switches access on, once per process and pair, and never off; a pair
//           counts only after a kernel of each has written a pattern into the other's memory, read
//           it back, and the other has found it there: some machines say yes and deliver zeros.
// Threads   any.
// Tests     tests/cuda (on machines with two devices)
#pragma once

namespace pyringar::cuda {

// Both directions work.
bool enable_peers(int a, int b);

// Memory that cudaMalloc made; other memory (torch's expandable segments) no peer can see.
bool is_peer_visible(const void* memory);

}  // namespace pyringar::cuda
