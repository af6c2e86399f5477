// All functions of libhugetlbfs, as programs call them; the output is the same with each library.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <hugetlbfs.h>

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, strerror(errno));     \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

static size_t page;

static void sizes(void) {
  long some[16];
  int count = gethugepagesizes(NULL, 0);
  CHECK(count > 0 && gethugepagesizes(some, 16) == count && gethugepagesizes(some, 1) == 1);
  CHECK(getpagesizes(NULL, 0) == count + 1 && getpagesizes(some, 16) == count + 1);
  CHECK(gethugepagesizes(some, -1) == -1 && errno == EINVAL);
  CHECK(gethugepagesizes(NULL, 1) == -1 && errno == EINVAL);
  printf("%ld is the default of %d sizes\n", gethugepagesize(), count);
}

static void paths(int has_mount) {
  CHECK(hugetlbfs_test_path("/proc") == 0);
  CHECK(hugetlbfs_test_path("/no such path") == -1 && errno == ENOENT);
  const char *path = hugetlbfs_find_path();
  CHECK((path != NULL) == has_mount);
  if (path == NULL) return;
  CHECK(hugetlbfs_test_path(path) == 1);
  CHECK(strcmp(hugetlbfs_find_path_for_size((long)page), path) == 0);
  printf("mounted on %s\n", path);
}

// A file without a name, whose pages are huge.
static void file(int fd) {
  struct statfs system;
  CHECK(fd >= 0 && fstatfs(fd, &system) == 0);
  CHECK((unsigned)system.f_type == HUGETLBFS_MAGIC && (size_t)system.f_bsize == page);
  char *bytes = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(bytes != MAP_FAILED);
  bytes[page - 1] = 1;
  munmap(bytes, page);
  close(fd);
}

static void with_pages(void) {
  file(hugetlbfs_unlinked_fd());
  file(hugetlbfs_unlinked_fd_for_size((long)page));
  char *pages = get_huge_pages(2 * page, GHP_DEFAULT);
  CHECK(pages != NULL && (size_t)pages % page == 0);
  memset(pages, 1, 2 * page);
  free_huge_pages(pages);
  char *region = get_hugepage_region(page + 1, GHR_STRICT | GHR_COLOR);
  CHECK(region != NULL);
  memset(region, 1, page + 1);
  free_hugepage_region(region);
  puts("pages of the pool");
}

static void without_pages(void) {
  // More than any pool has, and never touched.
  CHECK(get_huge_pages((size_t)1 << 45, GHP_DEFAULT) == NULL);
  CHECK(get_hugepage_region((size_t)1 << 45, GHR_STRICT) == NULL);
  char *region = get_hugepage_region(100, GHR_DEFAULT);
  CHECK(region != NULL);
  memset(region, 1, 100);
  free_hugepage_region(region);
  puts("none, and smaller ones");
}

static void segment(void) {
  int id = shmget(IPC_PRIVATE, 100, IPC_CREAT | 0600);
  CHECK(id >= 0);
  char *bytes = shmat(id, NULL, 0);
  CHECK(bytes != (void *)-1);
  bytes[0] = 1;
  struct shmid_ds state;
  CHECK(shmctl(id, IPC_STAT, &state) == 0 && shmctl(id, IPC_RMID, NULL) == 0);
  printf("a segment of %zu bytes\n", state.shm_segsz);
}

int main(int argc, char **argv) {
  page = (size_t)gethugepagesize();
  sizes();
  paths(argc > 1 && strstr(argv[1], "mount") != NULL);
  if (argc > 1 && strstr(argv[1], "pages") != NULL) with_pages();
  without_pages();
  segment();
  return 0;
}
