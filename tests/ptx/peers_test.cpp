// peers_test: the kernels that probe whether a device reaches another one's memory: with memory
// that does what it should they count nothing, and with a word that is lost one.

#include <cstring>
#include <vector>

#include "launches.h"
#include "own_tests.h"

namespace pyringar::ptx {

namespace {

constexpr std::size_t kProbeWords = 4096;
constexpr unsigned kThreadsOfProbe = 256;

void launch(const char* kernel, int device, std::uint32_t* words, std::uint32_t seed,
            std::uint32_t* wrong) {
  std::vector<std::byte> parameters(24);
  std::memcpy(&parameters[0], &words, sizeof words);
  std::memcpy(&parameters[8], &seed, sizeof seed);
  std::memcpy(&parameters[16], &wrong, sizeof wrong);
  machine().enqueue(0, {&find_kernel("peers", kernel), kernel, kernel, 1, kThreadsOfProbe, device,
                        false, parameters});
  machine().run();
}

}  // namespace

void peers_round(stress::Random& random) {
  std::vector<std::uint32_t> words(kProbeWords);
  std::uint32_t wrong_there = 0;
  std::uint32_t wrong_here = 0;
  machine().memory().add_region(words.data(), kProbeWords * sizeof words[0], "the peer's words");
  machine().memory().add_region(&wrong_there, sizeof wrong_there, "the count there");
  machine().memory().add_region(&wrong_here, sizeof wrong_here, "the count here");
  const auto seed = static_cast<std::uint32_t>(random.bits());
  launch("probe_kernel", 0, words.data(), seed, &wrong_there);
  launch("verify_kernel", 1, words.data(), seed, &wrong_here);
  CHECK(wrong_there == 0 && wrong_here == 0, wrong_there, " and ", wrong_here, " words are wrong");
  words[random.below(kProbeWords)] ^= 1;
  launch("verify_kernel", 1, words.data(), seed, &wrong_here);
  CHECK(wrong_here == 1, wrong_here, " words are wrong, expected the one that was lost");
}

}  // namespace pyringar::ptx
