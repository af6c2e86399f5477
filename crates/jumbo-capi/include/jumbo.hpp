// jumbo for C++17: owners of the handles of jumbo.h, and std::pmr::memory_resource on a pool.
//
// A failure throws std::system_error with the message of jumbo_error(). See jumbo(3).

#ifndef JUMBO_HPP
#define JUMBO_HPP

#include <cerrno>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "jumbo.h"

namespace jumbo {

[[noreturn]] inline void fail() {
  throw std::system_error(errno, std::generic_category(), jumbo_error());
}

inline void check(int result) {
  if (result != 0) fail();
}

inline std::int64_t number(std::int64_t result) {
  if (result < 0) fail();
  return result;
}

// A pool, a quota of one or a reservation in one. Copies share the handle, and pages keep it: the
// pool closes after the last of them.
class pool {
  struct state {
    jumbo_pool handle{};
    // A quota or reservation closes before its pool.
    std::shared_ptr<state> parent;
    ~state() { jumbo_pool_close(handle); }
  };

 public:
  explicit pool(jumbo_pool_options options) {
    options.size = sizeof options;
    adopt([&](jumbo_pool *made) { return jumbo_pool_open(&options, made); }, nullptr);
  }

  // Pages that are promised: `take` cannot fail for so many.
  pool reserve(std::size_t pages) const {
    return pool([&](jumbo_pool *made) { return jumbo_pool_reserve(get(), pages, made); }, state_);
  }

  // At most `limit` pages at a time.
  pool quota(std::uint64_t limit) const {
    return pool([&](jumbo_pool *made) { return jumbo_pool_quota(get(), limit, made); }, state_);
  }

  void resize(std::uint64_t pages) const { check(jumbo_pool_resize(get(), pages)); }
  void limit(std::uint64_t pages) const { check(jumbo_pool_limit(get(), pages)); }

  jumbo_pool_stats status() const {
    jumbo_pool_stats stats;
    check(jumbo_pool_status(get(), &stats, sizeof stats));
    return stats;
  }

  class returner {
   public:
    explicit returner(const pool &from) : from_(from.state_) {}
    void operator()(std::byte *pages) {
      jumbo_pool_give(from_->handle, pages);
      from_.reset();
    }

   private:
    std::shared_ptr<state> from_;
  };
  using pages = std::unique_ptr<std::byte[], returner>;

  // Takes pages at consecutive addresses, with unspecified content.
  pages take(std::size_t count = 1) const {
    returner back(*this);
    void *address = jumbo_pool_take(get(), count);
    if (address == nullptr) fail();
    return pages(static_cast<std::byte *>(address), std::move(back));
  }

  jumbo_pool get() const { return state_->handle; }

 private:
  template <class Make>
  pool(Make make, std::shared_ptr<state> parent) {
    adopt(make, std::move(parent));
  }

  template <class Make>
  void adopt(Make make, std::shared_ptr<state> parent) {
    state_ = std::make_shared<state>();
    state_->parent = std::move(parent);
    check(make(&state_->handle));
  }

  std::shared_ptr<state> state_;
};

// Memory of a pool for std::pmr containers. As std::pmr::unsynchronized_pool_resource it serves one
// thread at a time; freed blocks serve later ones of their size, and their pages return to the pool
// with the resource. Blocks of a quarter of a page and more have pages of their own, which return
// when they are freed. Without pages it throws std::bad_alloc.
class pool_resource : public std::pmr::memory_resource {
 public:
  explicit pool_resource(pool from)
      : pages_(std::move(from)), large_(pages_.page_size / 4), chunks_(pages_.page_size, &pages_) {}

 private:
  // Whole pages.
  struct page_resource : std::pmr::memory_resource {
    pool from;
    std::size_t page_size;

    explicit page_resource(pool of) : from(std::move(of)), page_size(from.status().page_size) {}

    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
      if (alignment > page_size) throw std::bad_alloc();
      std::size_t count = bytes / page_size + (bytes % page_size != 0);
      void *address = jumbo_pool_take(from.get(), count == 0 ? 1 : count);
      if (address == nullptr) throw std::bad_alloc();
      return address;
    }
    void do_deallocate(void *address, std::size_t, std::size_t) override {
      jumbo_pool_give(from.get(), address);
    }
    bool do_is_equal(const memory_resource &other) const noexcept override {
      return this == &other;
    }
  };

  void *do_allocate(std::size_t bytes, std::size_t alignment) override {
    return layer(bytes, alignment).allocate(bytes, alignment);
  }
  void do_deallocate(void *address, std::size_t bytes, std::size_t alignment) override {
    layer(bytes, alignment).deallocate(address, bytes, alignment);
  }
  bool do_is_equal(const memory_resource &other) const noexcept override { return this == &other; }

  std::pmr::memory_resource &layer(std::size_t bytes, std::size_t alignment) {
    if (bytes >= large_ || alignment >= large_) return pages_;
    return small_;
  }

  page_resource pages_;
  std::size_t large_;
  std::pmr::monotonic_buffer_resource chunks_;
  std::pmr::unsynchronized_pool_resource small_{{0, large_}, &chunks_};
};

// A region of shared memory.
class region {
 public:
  explicit region(jumbo_region_options options) {
    options.size = sizeof options;
    check(jumbo_region_make(&options, &handle_));
  }
  explicit region(int descriptor) { check(jumbo_region_attach(descriptor, &handle_)); }
  region(region &&other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  region &operator=(region &&other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~region() {
    if (handle_.handle != 0) jumbo_region_close(handle_);
  }

  std::byte *data() const { return static_cast<std::byte *>(jumbo_region_address(handle_)); }
  std::size_t size() const { return static_cast<std::size_t>(number(jumbo_region_size(handle_))); }
  std::size_t huge() const { return static_cast<std::size_t>(number(jumbo_region_huge(handle_))); }
  int descriptor() const { return static_cast<int>(number(jumbo_region_fd(handle_))); }
  void grow(std::size_t to) const { check(jumbo_region_grow(handle_, to)); }
  void punch(std::size_t offset, std::size_t size) const {
    check(jumbo_region_punch(handle_, offset, size));
  }
  void fill(std::size_t offset, std::size_t size) const {
    check(jumbo_region_fill(handle_, offset, size));
  }
  void collapse() const { check(jumbo_region_collapse(handle_)); }
  void seal() const { check(jumbo_region_seal(handle_)); }

 private:
  jumbo_region handle_{};
};

// A file in memory, read-only. The descriptor may be closed.
class file {
 public:
  static file open(int descriptor, std::uint32_t flags = 0) {
    file opened;
    check(jumbo_file_open(descriptor, flags, &opened.handle_));
    return opened;
  }
  static file copy(int descriptor, std::uint32_t threads = 0) {
    file copied;
    check(jumbo_file_copy(descriptor, threads, &copied.handle_));
    return copied;
  }
  file(file &&other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  file &operator=(file &&other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~file() {
    if (handle_.handle != 0) jumbo_file_close(handle_);
  }

  const std::byte *data() const {
    return static_cast<const std::byte *>(jumbo_file_address(handle_));
  }
  std::size_t size() const { return static_cast<std::size_t>(number(jumbo_file_size(handle_))); }
  std::size_t huge() const { return static_cast<std::size_t>(number(jumbo_file_huge(handle_))); }
  // JUMBO_FILE_BASE_PAGES, JUMBO_FILE_PAGE_CACHE or JUMBO_FILE_COPY.
  int method() const { return static_cast<int>(number(jumbo_file_method(handle_))); }

 private:
  file() = default;
  jumbo_file handle_{};
};

// Makes memory resident, by several threads; returns their number.
inline int populate(void *start, std::size_t length, std::uint32_t flags = 0,
                    std::uint32_t threads = 0) {
  return static_cast<int>(number(jumbo_populate(start, length, flags, threads)));
}

// The memory of this process.
inline jumbo_memory status() {
  jumbo_memory memory;
  check(jumbo_status(&memory, sizeof memory));
  return memory;
}

}  // namespace jumbo

#endif
