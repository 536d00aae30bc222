// fake_torch: what os/torch_team asks of libtorch_cpu.so, on a real OpenMP runtime or without one.
//
//   -DWITHOUT_OPENMP  it depends on none
//   -DMUTE            it does not tell its number of threads

#if !defined(WITHOUT_OPENMP)
#include <omp.h>
#endif

namespace at {

#if !defined(MUTE)
int get_num_threads() {
#if defined(WITHOUT_OPENMP)
  return 3;
#else
  return omp_get_max_threads();
#endif
}
#endif

}  // namespace at

#if !defined(WITHOUT_OPENMP)
extern "C" void set_threads(int count) { omp_set_num_threads(count); }

// What an operation of torch's does to the team.
extern "C" void operate() {
#pragma omp parallel
  {
  }
}
#endif
