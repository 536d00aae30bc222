// peers: which devices can read and write each other's memory, tried out with real data.
//
// Contract  enable_peers() switches access on, once per process and pair, and never off; a pair
//           counts only after a kernel of each has written a pattern into the other's memory, read
//           it back, and the other has found it there: some machines say yes and deliver zeros.
// Threads   any.
// Tests     tests/cuda (on machines with two devices)
#pragma once

#include <span>
#include <vector>

namespace pyringar::cuda {

struct PeerLink {
  int from;
  int to;
  bool can_access;  // what CUDA says
  bool delivers;    // what the probe found
};

// Both directions work.
bool enable_peers(int a, int b);

// Every ordered pair of these devices.
std::vector<PeerLink> peer_links(std::span<const int> devices);

// Memory that cudaMalloc made; other memory (torch's expandable segments) no peer can see.
bool is_peer_visible(const void* memory);

}  // namespace pyringar::cuda
