// std::pmr::unordered_map of strings on a pool against malloc: `strings [MILLIONS [ROUNDS]]`.
//
// Each sample is a process of its own, which fills the map, looks each string up, and frees it. The
// rounds alternate. Before each one memory is touched and freed, so that no sample pays a virtual
// machine's host for memory.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <jumbo.hpp>

struct sample {
  double seconds;
  long faults, kib;
};

// libstdc++ stores the hash in each node, as for std::string, if the function may throw.
struct hash {
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

static double work(std::pmr::memory_resource *memory, std::size_t count) {
  auto start = std::chrono::steady_clock::now();
  {
    std::pmr::unordered_map<std::pmr::string, std::size_t, hash> map(memory);
    char text[64];
    auto name = [&](std::size_t at) {
      std::snprintf(text, sizeof text, "the string of number %zu", at);
      return std::string_view(text);
    };
    for (std::size_t at = 0; at < count; at++) map.emplace(name(at), at);
    std::pmr::string key(memory);
    for (std::size_t at = 0, next = 1; at < count; at++, next = (next * 7 + 3) % count) {
      key = name(next);
      if (map.find(key) == map.end()) std::abort();
    }
  }
  std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  return time.count();
}

static void warm(std::size_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  munmap(memory, bytes);
}

static sample measure(bool on_pool, std::size_t count) {
  warm(count * 256);
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  pid_t child = fork();
  if (child == 0) {
    std::optional<jumbo::pool_resource> pool;
    if (on_pool) {
      jumbo_pool_options options{};
      options.overcommit = UINT64_MAX;
      pool.emplace(jumbo::pool(options));
    }
    sample found{};
    found.seconds = work(on_pool ? &*pool : std::pmr::new_delete_resource(), count);
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    found.faults = usage.ru_minflt;
    found.kib = usage.ru_maxrss;
    _exit(write(ends[1], &found, sizeof found) != sizeof found);
  }
  sample found{};
  int status = 0;
  bool is_read = read(ends[0], &found, sizeof found) == sizeof found;
  close(ends[0]);
  close(ends[1]);
  if (waitpid(child, &status, 0) != child || status != 0 || !is_read) std::abort();
  return found;
}

int main(int argc, char **argv) {
  std::size_t count = static_cast<std::size_t>((argc > 1 ? std::atof(argv[1]) : 4) * 1e6);
  int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  std::vector<sample> sides[2];
  for (int round = 0; round < rounds; round++)
    for (int turn = 0; turn < 2; turn++) {
      int side = (round + turn) % 2;
      sides[side].push_back(measure(side == 1, count));
    }
  double medians[2];
  for (int side = 0; side < 2; side++) {
    auto &all = sides[side];
    std::sort(all.begin(), all.end(), [](auto &a, auto &b) { return a.seconds < b.seconds; });
    sample median = all[all.size() / 2];
    medians[side] = median.seconds;
    std::printf("%-6s %.3f s (%.3f to %.3f), %ld faults, %ld MiB at most\n",
                side == 0 ? "malloc" : "pool", median.seconds, all.front().seconds,
                all.back().seconds, median.faults, median.kib >> 10);
  }
  std::printf("malloc / pool: %.2f\n", medians[0] / medians[1]);
}
