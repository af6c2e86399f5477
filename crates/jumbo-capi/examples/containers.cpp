// Containers on a pool, a page that outlives the pool's owner, and a shortage as std::bad_alloc.
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <jumbo.hpp>

int main() {
  jumbo_pool_options options{};
  options.overcommit = 16;
  options.capacity = 64;
  auto pool = std::make_unique<jumbo::pool>(options);
  {
    jumbo::pool_resource memory(*pool);
    std::pmr::map<std::pmr::string, int> words(&memory);
    for (int number = 0; number < 20000; number++)
      words.emplace("a word that is too long for its string " + std::to_string(number), number);
    std::pmr::vector<int> large(1 << 20, 7, &memory);
    jumbo_pool_stats stats = pool->status();
    std::cout << words.size() << " words and " << large.size() << " numbers on "
              << (stats.total - stats.free) * (stats.page_size >> 20) << " MiB of huge pages\n";
    try {
      std::pmr::vector<char> huge(std::size_t(1) << 40, &memory);
    } catch (const std::bad_alloc &) {
      std::cout << "too large: " << jumbo_error() << "\n";
    }
  }
  std::cout << pool->status().total << " pages when all is freed\n";

  // A page keeps the pool open.
  jumbo_pool handle = pool->get();
  auto page = pool->quota(1).take();
  pool.reset();
  std::memset(page.get(), 1, 2 << 20);
  std::cout << "open: " << (jumbo_pool_limit(handle, 16) == 0) << "\n";
  page.reset();
  std::cout << "open: " << (jumbo_pool_limit(handle, 16) == 0) << ", " << jumbo_error() << "\n";
}
