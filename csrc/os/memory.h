// memory: how much more memory this process may take.
//
// Floor     os: std, /proc and the cgroup file systems (Linux; elsewhere the machine's memory).
// Units     bytes.
// Contract  The least of what the machine has left and of what every memory cgroup above this
//           process, its own included, has left below its limit: cgroup v1, v2 and both at once, in
//           a namespace or not. What the kernel would give up for the asking (the cache of files,
//           and on the machine swap) counts as left. What cannot be read sets no limit.
// Threads   any.
// Tests     tests/test_memory_limits.py
#pragma once

#include <cstddef>
#include <string>

namespace pyringar {

// root: what stands before /proc and the cgroups' mount points; tests have trees of their own.
std::size_t memory_left_bytes(const std::string& root = "");

}  // namespace pyringar
