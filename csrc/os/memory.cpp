// memory: /proc/meminfo, /proc/self/cgroup, /proc/self/mountinfo.
//
// Tests     tests/test_memory_limits.py

#include "os/memory.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "os/text.h"

namespace pyringar {

namespace {

// "max" is no number, and no limit.
std::optional<std::size_t> number_in(const std::string& path) { return to_number(read_file(path)); }

// From lines "name value", as in /proc/meminfo ("name:") and memory.stat.
std::optional<std::size_t> number_of(std::string_view name, std::string_view lines) {
  while (!lines.empty()) {
    std::string_view line = take_line(lines);
    if (take_word(line) == name) return to_number(take_word(line));
  }
  return std::nullopt;
}

std::size_t machine_left(const std::string& root) {
  const std::string meminfo = read_file(root + "/proc/meminfo");
  if (const auto available = number_of("MemAvailable:", meminfo)) {
    return (*available + number_of("SwapFree:", meminfo).value_or(0)) * 1024;
  }
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// A hierarchy of cgroups that counts memory: where it is mounted, and this process's place below.
struct Hierarchy {
  std::string mount;
  std::string place;  // "" for the mount point itself, else "/a/b"
  bool is_v2;
};

// The path of this process's cgroup, as the hierarchy has it: "/a/b".
std::optional<std::string> own_cgroup(const std::string& root, bool is_v2) {
  const std::string text = read_file(root + "/proc/self/cgroup");
  for (std::string_view lines = text; !lines.empty();) {
    std::string_view line = take_line(lines);  // number:controllers:path, which may hold ':'
    take_until(line, ':');
    const std::string controllers = join(",", take_until(line, ':'), ",");
    if (controllers == ",," ? is_v2 : !is_v2 && controllers.find(",memory,") != std::string::npos) {
      return std::string(line);
    }
  }
  return std::nullopt;
}

// From the root of a mount, which a container can see in part only, to the cgroup; "" where the
// cgroup lies outside of what is mounted.
std::string place_below(const std::string& mount_root, const std::string& cgroup) {
  const std::string prefix = mount_root == "/" ? "" : mount_root;
  const bool is_below = cgroup.compare(0, prefix.size(), prefix) == 0 &&
                        (cgroup.size() == prefix.size() || cgroup[prefix.size()] == '/');
  if (!is_below || (cgroup + "/").find("/../") != std::string::npos) return "";
  return cgroup.substr(prefix.size());
}

std::vector<Hierarchy> hierarchies(const std::string& root) {
  std::vector<Hierarchy> found;
  const std::string text = read_file(root + "/proc/self/mountinfo");
  for (std::string_view lines = text; !lines.empty();) {
    // id, parent, device, root, mount point, options, optional fields, "-", type, source, options
    std::string_view line = take_line(lines);
    const std::string mount_root(take_word(line, 3));
    const std::string mount(take_word(line));
    while (!line.empty() && take_word(line) != "-") {
    }
    const std::string_view type = take_word(line);
    const std::string_view options = take_word(line, 1);
    const bool is_v2 = type == "cgroup2";
    if (!is_v2 &&
        (type != "cgroup" || join(",", options, ",").find(",memory,") == std::string::npos)) {
      continue;
    }
    const auto cgroup = own_cgroup(root, is_v2);
    if (cgroup) found.push_back({root + mount, place_below(mount_root, *cgroup), is_v2});
  }
  return found;
}

// What one cgroup has left below its limit.
std::size_t left_in(const std::string& folder, bool is_v2) {
  constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
  const auto limit = number_in(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  if (!limit) return kNoLimit;
  const auto used = number_in(folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  const std::string stat = read_file(folder + "/memory.stat");
  // v1 counts the cgroups below under names of their own.
  const std::string total = is_v2 ? "" : "total_";
  const std::size_t cache = number_of(total + "inactive_file", stat).value_or(0) +
                            number_of(total + "active_file", stat).value_or(0);
  const std::size_t held = used.value_or(0) - std::min(used.value_or(0), cache);
  return *limit - std::min(*limit, held);
}

}  // namespace

std::size_t memory_left_bytes(const std::string& root) {
  std::size_t least = machine_left(root);
  for (Hierarchy hierarchy : hierarchies(root)) {
    std::string& place = hierarchy.place;
    for (;; place.erase(place.rfind('/'))) {
      while (!place.empty() && place.back() == '/') place.pop_back();
      least = std::min(least, left_in(hierarchy.mount + place, hierarchy.is_v2));
      if (place.empty()) break;
    }
  }
  return least;
}

}  // namespace pyringar
