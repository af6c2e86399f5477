// A file in memory, and memory made resident, by their owners of jumbo.hpp.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include <jumbo.hpp>

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)

int main() {
  char path[] = "/tmp/jumbo-file-XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && unlink(path) == 0);
  std::string bytes(std::size_t{5} << 20, 'x');
  bytes[4 << 20] = 'y';
  CHECK(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  jumbo::file copied = jumbo::file::copy(fd), mapped = jumbo::file::open(fd, JUMBO_FILE_WHOLE);
  close(fd);
  for (const jumbo::file *file : {&copied, &mapped}) {
    CHECK(file->size() == bytes.size() && file->huge() <= bytes.size());
    CHECK(std::memcmp(file->data(), bytes.data(), bytes.size()) == 0);
  }
  CHECK(copied.method() == JUMBO_FILE_COPY && mapped.method() != JUMBO_FILE_COPY);
  jumbo::file moved = std::move(copied);
  CHECK(moved.method() == JUMBO_FILE_COPY);
  try {
    copied.size();
    CHECK(!"a size of no file");
  } catch (const std::system_error &error) {
    CHECK(error.code().value() == EBADF);
  }

  const std::size_t length = 128 << 20;
  void *memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  try {
    int threads = jumbo::populate(memory, length, 0, 2);
    CHECK(threads == 2 || threads == 1);
    unsigned char resident[2];
    CHECK(mincore(static_cast<char *>(memory) + length - 8192, 8192, resident) == 0);
    CHECK(resident[0] & resident[1] & 1);
  } catch (const std::system_error &error) {
    // Before Linux 5.14, and under valgrind, which may not know the advice.
    CHECK(error.code().value() == EINVAL);
  }
  std::puts("a file of 5242880 bytes");
}
