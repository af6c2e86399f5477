/* Threads that allocate, fill and free COUNT blocks of SIZE bytes in ROUNDS rounds. Prints the
 * milliseconds and the peak of the resident memory in MiB.
 *
 * Arguments: THREADS SIZE COUNT ROUNDS */
#include "check.h"
#include <pthread.h>
#include <sys/resource.h>
#include <time.h>

static size_t size, count, rounds;

static void *work(void *unused)
{
    char **blocks = malloc(count * sizeof *blocks);
    for (size_t round = 0; round < rounds; round++) {
        for (size_t i = 0; i < count; i++) {
            CHECK((blocks[i] = malloc(size)) != NULL);
            memset(blocks[i], 1, size);
        }
        for (size_t i = 0; i < count; i++)
            free(blocks[i]);
    }
    free(blocks);
    return unused;
}

static double now(void)
{
    struct timespec time;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

int main(int argc, char **argv)
{
    CHECK(argc == 5);
    pthread_t threads[64];
    size_t others = strtoul(argv[1], NULL, 10) - 1;
    CHECK(others < 64);
    size = strtoul(argv[2], NULL, 10);
    count = strtoul(argv[3], NULL, 10);
    rounds = strtoul(argv[4], NULL, 10);
    double start = now();
    for (size_t i = 0; i < others; i++)
        CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
    work(NULL);
    for (size_t i = 0; i < others; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    double end = now();
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    printf("%.0f %ld\n", end - start, usage.ru_maxrss >> 10);
    return 0;
}
