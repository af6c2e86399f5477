// A pool of two huge pages that grows to four, with a quota and a reservation.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jumbo.h>

static void die(const char *what) {
  fprintf(stderr, "%s: %s: %s\n", what, strerror(errno), jumbo_error());
  exit(1);
}

int main(void) {
  // `capacity` keeps the reserved addresses few, for valgrind and ulimit -v.
  jumbo_pool_options options = {.size = sizeof options, .pages = 2, .overcommit = 2, .capacity = 64};
  jumbo_pool pool;
  if (jumbo_pool_open(&options, &pool) != 0) die("jumbo_pool_open");

  // Two pages at consecutive addresses: a touch cannot fail.
  jumbo_pool_stats stats;
  if (jumbo_pool_status(pool, &stats, sizeof stats) != 0) die("jumbo_pool_status");
  char *buffer = jumbo_pool_take(pool, 2);
  if (buffer == NULL) die("jumbo_pool_take");
  memset(buffer, 1, 2 * stats.page_size);

  jumbo_memory memory;
  if (jumbo_status_range(buffer, 2 * stats.page_size, &memory, sizeof memory) == 0)
    printf("%" PRIu64 " of %" PRIu64 " KiB are huge\n", memory.huge >> 10, memory.resident >> 10);
  else if (errno != ENOSYS)
    die("jumbo_status_range");

  // One user may take one page at a time. Another one is promised one.
  jumbo_pool user, promised;
  if (jumbo_pool_quota(pool, 1, &user) != 0) die("jumbo_pool_quota");
  if (jumbo_pool_reserve(pool, 1, &promised) != 0) die("jumbo_pool_reserve");
  void *page = jumbo_pool_take(user, 1);
  if (page == NULL) die("jumbo_pool_take");
  if (jumbo_pool_take(user, 1) == NULL) printf("refused: %s\n", jumbo_error());
  if (jumbo_pool_take(pool, 1) == NULL) printf("refused: %s\n", jumbo_error());
  void *sure = jumbo_pool_take(promised, 1);
  if (sure == NULL) die("jumbo_pool_take");

  if (jumbo_pool_close(pool) == -1) printf("not closed: %s\n", jumbo_error());
  if (jumbo_pool_give(pool, page) != 0 || jumbo_pool_give(pool, sure) != 0 ||
      jumbo_pool_give(pool, buffer) != 0)
    die("jumbo_pool_give");
  if (jumbo_pool_close(user) != 0 || jumbo_pool_close(promised) != 0 || jumbo_pool_close(pool) != 0)
    die("jumbo_pool_close");
  return 0;
}
