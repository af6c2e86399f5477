// Wrong arguments, ended handles, shortages, forks and threads: an errno and a message each.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define OK(call) CHECK((call) == 0)
// The call fails with the errno, and says why.
#define FAILS(call, expected)                                                              \
  do {                                                                                     \
    errno = 0;                                                                             \
    CHECK((long long)(call) == -1 && errno == (expected) && jumbo_error()[0] != '\0');     \
  } while (0)
#define NO_PAGES(call, expected)                                                           \
  do {                                                                                     \
    errno = 0;                                                                             \
    CHECK((call) == NULL && errno == (expected) && jumbo_error()[0] != '\0');              \
  } while (0)

static const jumbo_pool_options FEW = {
    .size = sizeof FEW, .source = JUMBO_THP, .overcommit = 4, .capacity = 64};
static size_t page;

static jumbo_pool opened(void) {
  jumbo_pool pool;
  OK(jumbo_pool_open(&FEW, &pool));
  return pool;
}

static int ends_well(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  return status == 0;
}

static void options(void) {
  jumbo_pool pool = {0};
  jumbo_pool_options bad = FEW;
  FAILS(jumbo_pool_open(NULL, &pool), EINVAL);
  FAILS(jumbo_pool_open(&FEW, NULL), EINVAL);
  FAILS(jumbo_pool_open((const void *)((const char *)&FEW + 1), &pool), EINVAL);
  for (size_t size = 0; size < 8; size++) {
    bad.size = size;
    FAILS(jumbo_pool_open(&bad, &pool), EINVAL);
  }
  bad.size = (size_t)-1;
  FAILS(jumbo_pool_open(&bad, &pool), EINVAL);

  // A program of a later version: zero where this library knows no field.
  struct {
    jumbo_pool_options known;
    uint64_t later;
  } later = {FEW, 0};
  later.known.size = sizeof later;
  OK(jumbo_pool_open(&later.known, &pool));
  OK(jumbo_pool_close(pool));
  later.later = 1;
  FAILS(jumbo_pool_open(&later.known, &pool), E2BIG);

  bad = FEW, bad.source = 99;
  FAILS(jumbo_pool_open(&bad, &pool), EINVAL);
  bad = FEW, bad.page_size = 3;
  FAILS(jumbo_pool_open(&bad, &pool), EINVAL);
  bad.page_size = 4096;
  FAILS(jumbo_pool_open(&bad, &pool), EINVAL);
  bad = FEW, bad.pages = (uint64_t)-1;
  FAILS(jumbo_pool_open(&bad, &pool), ENOMEM);
  bad.pages = 65;
  FAILS(jumbo_pool_open(&bad, &pool), ENOMEM);
  bad = FEW, bad.capacity = (uint64_t)-1;
  FAILS(jumbo_pool_open(&bad, &pool), ENOMEM);
}

// A pool of 1 TiB that the kernel does not have.
static void cannot_be_had(void) {
  jumbo_pool pool;
  jumbo_pool_options large = {.size = sizeof large, .source = JUMBO_HUGETLB, .pages = 1 << 19};
  large.capacity = large.pages;
  errno = 0;
  CHECK(jumbo_pool_open(&large, &pool) == -1);
  // Valgrind has no addresses for so much.
  CHECK(errno != ENOMEM || strstr(jumbo_error(), "hint: ") || strstr(jumbo_error(), "window"));
  // A container may hide hugetlb.
  CHECK(errno == ENOMEM || errno == ENODEV || errno == EINVAL);
}

// Pages of the kernel's pool, or THPs and the reason.
static void either(void) {
  jumbo_pool pool;
  jumbo_pool_options any = {.size = sizeof any, .source = JUMBO_ANY, .pages = 1, .capacity = 64};
  jumbo_pool_stats stats;
  OK(jumbo_pool_open(&any, &pool));
  OK(jumbo_pool_status(pool, &stats, sizeof stats));
  CHECK(stats.source == JUMBO_HUGETLB || strncmp(jumbo_error(), "THPs: ", 6) == 0);
  OK(jumbo_pool_close(pool));
}

static void pages(void) {
  jumbo_pool pool = opened(), second = opened(), none = {0};
  jumbo_pool_stats stats;
  OK(jumbo_pool_status(pool, &stats, sizeof stats));
  page = stats.page_size;
  FAILS(jumbo_pool_status(pool, NULL, sizeof stats), EINVAL);
  FAILS(jumbo_pool_status(pool, &stats, 0), EINVAL);
  FAILS(jumbo_pool_status(none, &stats, sizeof stats), EBADF);

  NO_PAGES(jumbo_pool_take(pool, 0), EINVAL);
  NO_PAGES(jumbo_pool_take(pool, 5), ENOMEM);
  NO_PAGES(jumbo_pool_take(pool, (size_t)-1), ENOMEM);
  NO_PAGES(jumbo_pool_take(pool, (size_t)1 << 62), ENOMEM);
  char *taken = jumbo_pool_take(pool, 3);
  CHECK(taken != NULL && (size_t)taken % page == 0);
  memset(taken, 1, 3 * page);
  FAILS(jumbo_pool_give(pool, NULL), EINVAL);
  FAILS(jumbo_pool_give(pool, taken + page), EINVAL);
  FAILS(jumbo_pool_give(pool, &stats), EINVAL);
  FAILS(jumbo_pool_give(second, taken), EINVAL);
  FAILS(jumbo_pool_resize(pool, (uint64_t)-1), ENOMEM);

  // Memory that would outlive its pool: the pool stays.
  FAILS(jumbo_pool_close(pool), EBUSY);
  memset(taken, 2, 3 * page);
  OK(jumbo_pool_give(pool, taken));
  FAILS(jumbo_pool_give(pool, taken), EINVAL);
  OK(jumbo_pool_close(pool));
  OK(jumbo_pool_close(second));

  // A later pool may have the slot, and not the handle.
  second = opened();
  FAILS(jumbo_pool_close(pool), EBADF);
  FAILS(jumbo_pool_give(pool, taken), EBADF);
  FAILS(jumbo_pool_status(pool, &stats, sizeof stats), EBADF);
  FAILS(jumbo_pool_resize(pool, 1), EBADF);
  FAILS(jumbo_pool_limit(pool, 1), EBADF);
  FAILS(jumbo_pool_reserve(pool, 1, &none), EBADF);
  FAILS(jumbo_pool_quota(pool, 1, &none), EBADF);
  NO_PAGES(jumbo_pool_take(pool, 1), EBADF);
  OK(jumbo_pool_close(second));
}

static void shares(void) {
  jumbo_pool pool = opened(), quota, promise, another;
  FAILS(jumbo_pool_reserve(pool, (size_t)-1, &promise), ENOMEM);
  FAILS(jumbo_pool_reserve(pool, 1, NULL), EINVAL);
  OK(jumbo_pool_quota(pool, 1, &quota));
  OK(jumbo_pool_reserve(pool, 3, &promise));
  FAILS(jumbo_pool_quota(quota, 1, &another), EINVAL);
  FAILS(jumbo_pool_reserve(promise, 1, &another), EINVAL);
  FAILS(jumbo_pool_resize(quota, 1), EINVAL);
  FAILS(jumbo_pool_limit(promise, 1), EINVAL);
  NO_PAGES(jumbo_pool_take(quota, 2), EDQUOT);
  NO_PAGES(jumbo_pool_take(promise, 4), ENOMEM);
  void *one = jumbo_pool_take(quota, 1), *two = jumbo_pool_take(promise, 2);
  CHECK(one != NULL && two != NULL);
  NO_PAGES(jumbo_pool_take(pool, 1), ENOMEM);
  FAILS(jumbo_pool_close(pool), EBUSY);
  // Taken pages stay taken, and the last promised page is free again.
  OK(jumbo_pool_close(promise));
  OK(jumbo_pool_close(quota));
  memset(two, 1, 2 * page);
  void *last = jumbo_pool_take(pool, 1);
  CHECK(last != NULL);
  OK(jumbo_pool_give(pool, last));
  OK(jumbo_pool_give(pool, one));
  OK(jumbo_pool_give(pool, two));
  OK(jumbo_pool_close(pool));
}

static void regions(void) {
  jumbo_region region, second;
  jumbo_region_options small = {.size = sizeof small, .source = JUMBO_THP, .length = 10};
  jumbo_region_options bad = small;
  bad.length = 0;
  FAILS(jumbo_region_make(&bad, &region), EINVAL);
  bad.length = (uint64_t)-1;
  FAILS(jumbo_region_make(&bad, &region), ENOMEM);
  bad.length = 10, bad.capacity = 5;
  FAILS(jumbo_region_make(&bad, &region), EINVAL);
  bad = small, bad.page_size = 5;
  FAILS(jumbo_region_make(&bad, &region), EINVAL);
  bad = small, bad.source = JUMBO_HUGETLB;
  FAILS(jumbo_region_make(&bad, &region), EINVAL);
  FAILS(jumbo_region_make(&small, NULL), EINVAL);

  FAILS(jumbo_region_attach(-1, &region), EBADF);
  FAILS(jumbo_region_attach(1 << 20, &region), EBADF);
  int null = open("/dev/null", O_RDWR);
  FAILS(jumbo_region_attach(null, &region), EINVAL);
  close(null);

  OK(jumbo_region_make(&small, &region));
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", jumbo_region_fd(region));
  int readable = open(path, O_RDONLY);
  CHECK(readable >= 0);
  FAILS(jumbo_region_attach(readable, &second), EACCES);
  close(readable);

  CHECK(jumbo_region_size(region) == 10);
  FAILS(jumbo_region_punch(region, 5, 6), EINVAL);
  FAILS(jumbo_region_punch(region, (size_t)-1, (size_t)-1), EINVAL);
  FAILS(jumbo_region_fill(region, 11, 0), EINVAL);
  FAILS(jumbo_region_grow(region, (uint64_t)-1), EINVAL);
  OK(jumbo_region_seal(region));
  FAILS(jumbo_region_grow(region, 4096), EPERM);

  // A child of fork(2) shares it, also after its parent closed it.
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  char *bytes = jumbo_region_address(region), byte = 1;
  pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    bytes[0] = 7;
    CHECK(write(ends[1], &byte, 1) == 1);
    CHECK(read(ends[1], &byte, 1) == 0);
    CHECK(bytes[0] == 7 && jumbo_region_size(region) == 10);
    OK(jumbo_region_close(region));
    exit(0);
  }
  close(ends[1]);
  CHECK(read(ends[0], &byte, 1) == 1 && bytes[0] == 7);
  OK(jumbo_region_close(region));
  close(ends[0]);
  CHECK(ends_well(child));

  FAILS(jumbo_region_close(region), EBADF);
  FAILS(jumbo_region_size(region), EBADF);
  FAILS(jumbo_region_fd(region), EBADF);
  FAILS(jumbo_region_huge(region), EBADF);
  FAILS(jumbo_region_punch(region, 0, 1), EBADF);
  FAILS(jumbo_region_fill(region, 0, 1), EBADF);
  FAILS(jumbo_region_grow(region, 1), EBADF);
  FAILS(jumbo_region_seal(region), EBADF);
  FAILS(jumbo_region_collapse(region), EBADF);
  NO_PAGES(jumbo_region_address(region), EBADF);
}

static void ranges(void) {
  size_t length = 4 << 20;
  char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  memset(memory, 1, length);
  struct iovec good = {memory, length}, odd = {memory + 1, length}, empty = {memory, 0},
               wrapping = {memory, (size_t)-4096}, two[] = {good, odd};
  FAILS(jumbo_free_ranges(&good, 1, 8), EINVAL);
  FAILS(jumbo_free_ranges(NULL, 1, 0), EINVAL);
  FAILS(jumbo_free_ranges(&good, (size_t)-1, 0), EINVAL);
  FAILS(jumbo_free_ranges(&odd, 1, 0), EINVAL);
  FAILS(jumbo_free_ranges(&empty, 1, 0), EINVAL);
  FAILS(jumbo_free_ranges(&wrapping, 1, 0), EINVAL);
  FAILS(jumbo_free_ranges(two, 2, 0), EINVAL);
  CHECK(memory[0] == 1);
  OK(jumbo_free_ranges(NULL, 0, 0));
  OK(jumbo_free_ranges(&good, 1, 0));
  CHECK(memory[0] == 0 && memory[length - 1] == 0);
  OK(jumbo_free_ranges(&good, 1, JUMBO_FREE_UNMAP));
  OK(jumbo_end_workers());

  jumbo_memory found;
  FAILS(jumbo_status(NULL, sizeof found), EINVAL);
  FAILS(jumbo_status_range((char *)&found + 1, 4096, &found, sizeof found), EINVAL);
  FAILS(jumbo_status_range((void *)-4096, (size_t)-1, &found, sizeof found), EINVAL);
  OK(jumbo_status(&found, sizeof found));
  CHECK(found.resident > 0 && found.resident <= found.mapped);
}

static void files(void) {
  jumbo_file file, second, none = {0};
  char path[] = "/tmp/jumbo-bad-XXXXXX";
  int made = mkstemp(path), null = open("/dev/null", O_RDWR), writable = open(path, O_WRONLY);
  CHECK(made >= 0 && null >= 0 && writable >= 0 && unlink(path) == 0);
  OK(jumbo_file_open(made, 0, &file));
  CHECK(jumbo_file_size(file) == 0 && jumbo_file_address(file) != NULL);
  OK(jumbo_file_close(file));
  CHECK(write(made, "bytes", 5) == 5);
  FAILS(jumbo_file_open(-1, 0, &file), EBADF);
  FAILS(jumbo_file_open(1 << 20, 0, &file), EBADF);
  FAILS(jumbo_file_open(made, 2, &file), EINVAL);
  FAILS(jumbo_file_open(made, 0, NULL), EINVAL);
  FAILS(jumbo_file_open(null, 0, &file), EINVAL);
  FAILS(jumbo_file_open(writable, 0, &file), EACCES);
  FAILS(jumbo_file_copy(-1, 0, &file), EBADF);
  FAILS(jumbo_file_copy(null, 0, &file), EINVAL);
  FAILS(jumbo_file_copy(made, 65, &file), EINVAL);
  FAILS(jumbo_file_copy(made, (uint32_t)-1, &file), EINVAL);
  FAILS(jumbo_file_copy(writable, 0, &file), EBADF);
  OK(jumbo_file_open(made, JUMBO_FILE_WHOLE, &file));
  OK(jumbo_file_copy(made, 2, &second));
  // The descriptor ends first, and a child has the bytes too.
  close(made), close(null), close(writable);
  pid_t child = fork();
  if (child == 0) {
    CHECK(memcmp(jumbo_file_address(file), "bytes", 5) == 0);
    CHECK(memcmp(jumbo_file_address(second), "bytes", 5) == 0);
    exit(0);
  }
  CHECK(ends_well(child));
  CHECK(jumbo_file_size(second) == 5 && jumbo_file_huge(second) >= 0);
  CHECK(jumbo_file_method(file) == JUMBO_FILE_BASE_PAGES);
  CHECK(jumbo_file_method(second) == JUMBO_FILE_COPY);
  OK(jumbo_file_close(second));
  OK(jumbo_file_close(file));
  FAILS(jumbo_file_close(file), EBADF);
  FAILS(jumbo_file_size(file), EBADF);
  FAILS(jumbo_file_huge(none), EBADF);
  FAILS(jumbo_file_method(second), EBADF);
  NO_PAGES(jumbo_file_address(file), EBADF);
}

static void populates(void) {
  size_t length = 4 << 20;
  char *memory = mmap(NULL, length, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  FAILS(jumbo_populate(memory, length, 2, 1), EINVAL);
  FAILS(jumbo_populate(memory + 1, length, 0, 1), EINVAL);
  FAILS(jumbo_populate(memory, length - 1, 0, 1), EINVAL);
  FAILS(jumbo_populate(memory, (size_t)-4096, 0, 1), EINVAL);
  FAILS(jumbo_populate(memory, (size_t)-1, 0, (uint32_t)-1), EINVAL);
  CHECK(jumbo_populate(memory, 0, 0, 0) == 1);
  errno = 0;
  // EINVAL: before Linux 5.14.
  CHECK(jumbo_populate(memory, length, JUMBO_POPULATE_READ, 0) == 1 || errno == EINVAL);
  FAILS(jumbo_populate(memory, length, 0, 0), EINVAL);
  CHECK(munmap(memory, length) == 0);
  CHECK(jumbo_populate(memory, length, 0, 0) == -1 && (errno == ENOMEM || errno == EINVAL));
}

// A pool of THPs is copied by fork(2); one of hugetlb stays with its process.
static void forks(void) {
  jumbo_pool pool = opened();
  char *taken = jumbo_pool_take(pool, 1);
  CHECK(taken != NULL);
  memset(taken, 1, page);
  pid_t child = fork();
  if (child == 0) {
    taken[0] = 2;
    FAILS(jumbo_pool_close(pool), EBUSY);
    OK(jumbo_pool_give(pool, taken));
    taken = jumbo_pool_take(pool, 1);
    CHECK(taken != NULL);
    memset(taken, 3, page);
    OK(jumbo_pool_give(pool, taken));
    OK(jumbo_pool_close(pool));
    exit(0);
  }
  CHECK(ends_well(child) && taken[0] == 1 && taken[page - 1] == 1);
  OK(jumbo_pool_give(pool, taken));
  OK(jumbo_pool_close(pool));

  jumbo_pool_options huge = FEW;
  huge.source = JUMBO_HUGETLB;
  if (jumbo_pool_open(&huge, &pool) != 0) return;
  taken = jumbo_pool_take(pool, 1);
  if (taken != NULL) {
    taken[0] = 1;
    child = fork();
    if (child == 0) {
      NO_PAGES(jumbo_pool_take(pool, 1), EOWNERDEAD);
      OK(jumbo_pool_give(pool, taken));
      OK(jumbo_pool_close(pool));
      exit(0);
    }
    CHECK(ends_well(child) && taken[0] == 1);
    OK(jumbo_pool_give(pool, taken));
    puts("with pages of the kernel's pool");
  }
  OK(jumbo_pool_close(pool));
}

// A region of the kernel's pool: populated when made and attached, and in a hole after a fill.
static void huge_regions(void) {
  jumbo_region_options options = {.size = sizeof options, .source = JUMBO_HUGETLB};
  jumbo_region region, second;
  options.length = 2 * page;
  if (jumbo_region_make(&options, &region) != 0) {
    CHECK(errno == ENOMEM);
    return;
  }
  OK(jumbo_region_attach(jumbo_region_fd(region), &second));
  char *bytes = jumbo_region_address(region), *others = jumbo_region_address(second);
  CHECK(jumbo_region_size(second) == (int64_t)options.length && others != bytes);
  CHECK(jumbo_region_huge(second) == (int64_t)options.length);
  bytes[page] = 5;
  CHECK(others[page] == 5);
  OK(jumbo_region_punch(second, page, page));
  OK(jumbo_region_fill(second, page, page));
  CHECK(bytes[page] == 0 && others[page] == 0);
  FAILS(jumbo_region_grow(region, 3 * page), EINVAL);
  OK(jumbo_region_close(region));
  others[0] = 1;
  OK(jumbo_region_close(second));
}

static void *user(void *of) {
  jumbo_pool pool = *(jumbo_pool *)of;
  for (int round = 0; round < 400; round++) {
    char *taken = jumbo_pool_take(pool, 1 + round % 2);
    if (taken == NULL) {
      // Another thread has the pages, or has closed the pool.
      CHECK(errno == ENOMEM || errno == EBADF);
      continue;
    }
    taken[0] = 1;
    OK(jumbo_pool_give(pool, taken));
    FAILS(jumbo_pool_give(pool, taken + 1), errno == EBADF ? EBADF : EINVAL);
  }
  return NULL;
}

// Threads use a pool while another closes it: it closes between two takes, or not.
static void threads(void) {
  for (int round = 0; round < 10; round++) {
    jumbo_pool pool = opened();
    pthread_t users[4];
    for (int at = 0; at < 4; at++) CHECK(pthread_create(&users[at], NULL, user, &pool) == 0);
    for (int tries = 0; jumbo_pool_close(pool) != 0 && tries < 1 << round; tries++)
      CHECK(errno == EBUSY);
    for (int at = 0; at < 4; at++) CHECK(pthread_join(users[at], NULL) == 0);
    CHECK(jumbo_pool_close(pool) == 0 || errno == EBADF);
  }
}

int main(void) {
  CHECK(jumbo_error()[0] == '\0' && jumbo_version()[0] != '\0');
  options();
  cannot_be_had();
  either();
  pages();
  shares();
  regions();
  ranges();
  files();
  populates();
  forks();
  huge_regions();
  threads();
  puts("all refused");
  return 0;
}
