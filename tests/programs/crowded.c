/* A SCHED_IDLE thread unmaps MIB; the others touch MORE MiB, mapped before, as soon as it has.
 * There is room for these only.
 *
 * crowded MIB MORE */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { THREADS = 8 };

static pthread_barrier_t freed;
static size_t more;

static char *map(size_t size)
{
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    return start;
}

static void touch(char *start, size_t size)
{
    for (size_t at = 0; at < size; at += 4 * KIB)
        start[at] = 1;
}

static void *busy(void *start)
{
    pthread_barrier_wait(&freed);
    touch(start, more / THREADS);
    return NULL;
}

int main(int count, char **arguments)
{
    CHECK(count == 3);
    size_t size = strtoul(arguments[1], NULL, 10) * MIB;
    more = strtoul(arguments[2], NULL, 10) * MIB;
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    CHECK(pthread_barrier_init(&freed, NULL, THREADS + 1) == 0);
    char *first = map(size), *second = map(more);
    touch(first, size);
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, second + more / THREADS * i) == 0);
    struct sched_param none = {0};
    CHECK(sched_setscheduler(0, SCHED_IDLE, &none) == 0);
    CHECK(munmap(first, size) == 0);
    pthread_barrier_wait(&freed);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    puts("all there");
    return 0;
}
