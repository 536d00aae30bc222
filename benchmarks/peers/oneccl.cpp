// Be a rank of oneCCL: mpiexec -n K oneccl ADDRESS. Protocol, numbers and check are rank.py's.

#include <mpi.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <oneapi/ccl.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPeriod = 17, kShifts = 8;

long cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000L + now.tv_nsec;
}

class Rank {
 public:
  Rank() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
    ccl::kvs::address_type address{};
    ccl::shared_ptr_class<ccl::kvs> kvs;
    if (rank_ == 0) {
      kvs = ccl::create_main_kvs();
      address = kvs->get_address();
    }
    MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (rank_ != 0) kvs = ccl::create_kvs(address);
    comm_ = std::make_unique<ccl::communicator>(ccl::create_communicator(world_size_, rank_, kvs));
  }

  int rank() const { return rank_; }

  // Makes calls as rank.py does, and returns the line that answers.
  std::string run(int calls, int warm_up, long idle_us, const std::vector<size_t>& numels) {
    const long cpu_begin_ns = cpu_ns();
    make(numels);
    std::string times;
    int wrong = 0;
    std::this_thread::sleep_for(std::chrono::microseconds(idle_us));
    for (int shift = 0; shift < warm_up + calls; ++shift) {
      fill(shift);
      ccl::barrier(*comm_);
      const auto begin = std::chrono::steady_clock::now();
      for (auto& data : tensors_) {
        ccl::allreduce(data.data(), data.data(), data.size(), ccl::reduction::sum, *comm_).wait();
      }
      const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - begin;
      ccl::barrier(*comm_);
      if (shift >= warm_up) times += " " + std::to_string(spent.count());
      wrong += !is_right(shift);
    }
    return std::to_string(wrong) + " " + std::to_string(cpu_begin_ns) + " " +
           std::to_string(cpu_ns()) + times + "\n";
  }

 private:
  // Allocates tensors, unless these are there.
  void make(const std::vector<size_t>& numels) {
    if (numels == numels_) return;
    numels_ = numels;
    tensors_.clear();
    for (const size_t numel : numels) tensors_.emplace_back(numel);
  }

  void fill(size_t shift) {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const auto add = static_cast<float>(static_cast<size_t>(rank_) + (shift + t) % kShifts);
      for (size_t i = 0; i < tensors_[t].size(); ++i) {
        tensors_[t][i] = static_cast<float>(i % kPeriod) + add;
      }
    }
  }

  bool is_right(size_t shift) const {
    const auto k = static_cast<float>(world_size_);
    const float ranks = k * (k - 1) / 2;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const size_t add = (shift + t) % kShifts;
      for (size_t i = 0; i < tensors_[t].size(); ++i) {
        if (tensors_[t][i] != k * static_cast<float>(i % kPeriod + add) + ranks) return false;
      }
    }
    return true;
  }

  int rank_ = 0, world_size_ = 0;
  std::unique_ptr<ccl::communicator> comm_;
  std::vector<size_t> numels_;
  std::vector<std::vector<float>> tensors_;
};

int connect_to(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  const int connection = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    throw std::runtime_error("cannot connect to the benchmark");
  }
  return connection;
}

// Writes all of a line.
void send_all(int connection, const std::string& line) {
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t n = write(connection, line.data() + sent, line.size() - sent);
    if (n <= 0) throw std::runtime_error("the benchmark is gone");
    sent += static_cast<size_t>(n);
  }
}

void serve(const char* path) {
  Rank rank;
  const int connection = connect_to(path);
  const auto version = ccl::get_library_version();
  send_all(connection, "hello " + std::to_string(rank.rank()) + " " + std::to_string(getpid()) +
                           " oneCCL " + version.full + "\n");
  FILE* lines = fdopen(connection, "r");
  char line[4096];
  while (fgets(line, sizeof line, lines)) {
    int calls = 0, warm_up = 0;
    long idle_us = 0;
    char sizes[4096];
    if (std::sscanf(line, "%d %d %ld %4095s", &calls, &warm_up, &idle_us, sizes) != 4) return;
    std::vector<size_t> numels;
    for (char* size = std::strtok(sizes, ","); size; size = std::strtok(nullptr, ",")) {
      numels.push_back(std::stoul(size));
    }
    send_all(connection, rank.run(calls, warm_up, idle_us, numels));
  }
}

}  // namespace

int main(int, char** argv) {
  MPI_Init(nullptr, nullptr);
  ccl::init();
  serve(argv[1]);
  MPI_Finalize();
}
