// A region that two processes share by its descriptor, and memory freed by several threads.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jumbo.h>

static void die(const char *what) {
  fprintf(stderr, "%s: %s: %s\n", what, strerror(errno), jumbo_error());
  exit(1);
}

// Maps the region of a descriptor, as a process that got it by SCM_RIGHTS, and changes it.
static int other(int fd) {
  jumbo_region region;
  if (jumbo_region_attach(fd, &region) != 0) die("jumbo_region_attach");
  char *bytes = jumbo_region_address(region);
  strcat(bytes, ", and of another process");
  return jumbo_region_close(region);
}

int main(void) {
  jumbo_region_options options = {.size = sizeof options, .length = 8 << 20};
  jumbo_region region;
  if (jumbo_region_make(&options, &region) != 0) die("jumbo_region_make");
  // No holder of the descriptor can truncate it from here on.
  if (jumbo_region_seal(region) != 0) die("jumbo_region_seal");
  char *bytes = jumbo_region_address(region);
  if (bytes == NULL) die("jumbo_region_address");
  for (size_t at = 0; at < 8 << 20; at += 4096) bytes[at] = 1;
  strcpy(bytes, "bytes of this process");
  if (jumbo_region_collapse(region) != 0) printf("on base pages: %s\n", jumbo_error());

  pid_t child = fork();
  if (child == 0) _exit(other(jumbo_region_fd(region)) != 0);
  int status;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0) die("the other process");
  printf("%s\n", bytes);

  if (jumbo_region_punch(region, 0, 4096) != 0) die("jumbo_region_punch");
  printf("punched: \"%s\"\n", bytes);
  if (jumbo_region_close(region) != 0) die("jumbo_region_close");

  // Private memory of malloc(3)'s kind, freed by all CPUs where that is faster.
  struct iovec table = {.iov_len = 64 << 20};
  table.iov_base =
      mmap(NULL, table.iov_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (table.iov_base == MAP_FAILED) die("mmap");
  memset(table.iov_base, 1, table.iov_len);
  if (jumbo_free_ranges(&table, 1, JUMBO_FREE_UNMAP) != 0) die("jumbo_free_ranges");

  jumbo_memory memory;
  if (jumbo_status(&memory, sizeof memory) != 0) die("jumbo_status");
  printf("resident: %s\n", memory.resident < 64 << 20 ? "less than the table" : "the table too");
  return 0;
}
