// What concerns the whole process: a limit of its addresses, and forks while other threads are in calls.
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static const jumbo_pool_options FEW = {
    .size = sizeof FEW, .source = JUMBO_THP, .overcommit = 8, .capacity = 64};
static jumbo_pool pool;

// Without addresses a reservation keeps its pages.
static void shortage(void) {
  jumbo_pool promise;
  jumbo_pool_stats stats;
  struct rlimit limit, none;
  CHECK(jumbo_pool_reserve(pool, 3, &promise) == 0);
  CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
  none = (struct rlimit){0, limit.rlim_max};
  CHECK(setrlimit(RLIMIT_AS, &none) == 0);
  void *refused = jumbo_pool_take(promise, 2);
  int why = errno;
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  CHECK(refused == NULL && why == ENOMEM);
  CHECK(jumbo_pool_status(promise, &stats, sizeof stats) == 0);
  CHECK(stats.limit == 3 && stats.reserved == 3);
  void *pages = jumbo_pool_take(promise, 3);
  CHECK(pages != NULL && jumbo_pool_give(pool, pages) == 0);
  CHECK(jumbo_pool_close(promise) == 0);
}

static volatile int is_over;

static void *use(void *unused) {
  while (!is_over) {
    jumbo_pool quota;
    jumbo_pool_stats stats;
    void *pages = jumbo_pool_take(pool, 1);
    if (pages)
      CHECK(jumbo_pool_give(pool, pages) == 0);
    CHECK(jumbo_pool_quota(pool, 1, &quota) == 0);
    CHECK(jumbo_pool_status(quota, &stats, sizeof stats) == 0);
    CHECK(jumbo_pool_close(quota) == 0);
  }
  return unused;
}

// A child finds no lock that a thread of its parent holds.
static void forks(void) {
  pthread_t threads[3];
  for (int at = 0; at < 3; at++)
    CHECK(pthread_create(&threads[at], NULL, use, NULL) == 0);
  for (int round = 0; round < 300; round++) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(20);
      jumbo_pool quota;
      jumbo_pool_stats stats;
      CHECK(jumbo_pool_quota(pool, 1, &quota) == 0);
      CHECK(jumbo_pool_status(pool, &stats, sizeof stats) == 0);
      CHECK(jumbo_pool_close(quota) == 0);
      void *pages = jumbo_pool_take(pool, 1);
      CHECK(pages == NULL || jumbo_pool_give(pool, pages) == 0);
      _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  is_over = 1;
  for (int at = 0; at < 3; at++)
    CHECK(pthread_join(threads[at], NULL) == 0);
}

int main(void) {
  CHECK(jumbo_pool_open(&FEW, &pool) == 0);
  shortage();
  forks();
  CHECK(jumbo_pool_close(pool) == 0);
  puts("as it was");
  return 0;
}
